"""A workspace with runs as stage scripts and DVC would leave them, quickly, and what an MLflow store holds of them."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.digests import digest
from pipeline.lineage.declaration import Declaration, declaration, read_lock
from pipeline.lineage.overrides import write_overrides
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.tracking.replay import send_missing
from pipeline.tracking.run_folder import RunFolder, read_json

ROOT = Path(__file__).parents[1]
DVC = """
stages:
  code: {cmd: "true"}
  data:
    foreach: [agent, dpo]
    do: {cmd: "true"}
  agent:
    cmd: exec python
    deps: [data/code/agent.json, data/prepared/agent]
    params: [agent.lr, agent.loss, agent.seed]
    outs: [checkpoints/agent.pth]
  eval:
    cmd: exec python
    deps: [data/prepared/agent, checkpoints/agent.pth]
    params: [eval.panel_rows]
artifacts:
  minimind-agent: {path: checkpoints/agent.pth, type: model}
"""
OPEN, SHUT = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2*3"}}\n</tool_call>'
PROMPT = f"<|im_start|>system\n# Tools<|im_end|>\n<|im_start|>user\n2*3?<|im_end|>\n{OPEN}"
RESULT = "<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n"
COMPLETION = f"I ask.\n</think>\n\n{CALL}<|im_end|>\n{RESULT}{SHUT}It is 6.<|im_end|>"


def make_workspace(root: Path) -> None:
    """What the two stages of `DVC` start from."""
    (root / "dvc.yaml").write_text(DVC)
    (root / "params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    for path, text in {"data/prepared/agent": "rows", "data/code/agent.json": "{}", "checkpoints/agent.pth": "weights"}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def train(
    root: Path, stage: str = "agent", *, lr: float = 1e-4, weights: str | None = None, fails: bool = False, recorded: bool = True
) -> RunFolder:
    """A run of a stage as its script and DVC would leave it; nothing is sent.

    The agent's 47 steps sample three rows each; `eval` finds that its success is `lr`.
    """
    if stage == "agent":
        write_overrides(root / "params.yaml", {"agent.lr": lr, "agent.seed": 7})
    params = load_params(root / "params.yaml")
    runtime = params.runtime.model_copy(update={"mlflow": False, "progress": "off"})
    used = declaration(stage, params, dvc_file=root / "dvc.yaml")
    with suppress(SystemExit), stage_run(stage, params=used.params, inputs=used.deps, runtime=runtime, root=root) as run:
        for step in range(1, 48) if stage == "agent" else [0]:
            if stage != "agent":
                run.log(step, {"agent/tool_success": lr})
            else:
                times = {"time/step_s": 1.0, **({"time/rollout_s": 0.5} if step > 1 else {})}
                run.log(step, {"tool/success": step / 100, "reward/mean": 3 * lr + step / 50, **times})
                row = {"prompt": PROMPT, "completion": COMPLETION, "reward": 1.5, "stop": "eos"}
                run.log_samples(step, [{**row, "completion": "no tool"}, row, {**row, "reward": 0.0}])
        if fails:
            raise RuntimeError("told to fail")
        if stage == "agent":
            (root / "checkpoints/agent.pth").write_text(f"weights of {lr}" if weights is None else weights)
    if recorded:
        _record(root, stage, used)
    folder: RunFolder = run.folder
    return folder


def record_again(root: Path) -> None:
    """DVC takes over what the agent's last run made."""
    _record(root, "agent", Declaration(["data/prepared/agent"], read_lock(root / "dvc.lock")["agent"].params))


def _record(root: Path, stage: str, used: Declaration) -> None:
    """What DVC writes after a stage has ended well."""
    lock = root / "dvc.lock"
    known = json.loads(lock.read_text()) if lock.exists() else {"schema": "2.0", "stages": {}}
    read = [path for path in [*used.deps, f"data/code/{stage}.json"] if (root / path).exists()]
    deps = [{"path": path, "md5": digest(root / path)} for path in read]
    outs = [{"path": "checkpoints/agent.pth", "md5": digest(root / "checkpoints/agent.pth")}] if stage == "agent" else []
    known["stages"][stage] = {"deps": deps, "params": {"params.yaml": used.params}, "outs": outs}
    lock.write_text(json.dumps(known))


def feed(*folders: RunFolder) -> None:
    list(send_missing(folders, None))


class Seen:
    """What the store that the environment names holds of one experiment."""

    def __init__(self, experiment_name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        experiment = self.client.get_experiment_by_name(experiment_name)
        assert experiment is not None
        self.id = experiment.experiment_id

    def run(self, folder: RunFolder) -> Any:
        (found,) = self.client.search_runs([self.id], f"tags.`run.uid` = '{read_json(folder.about)['uid']}'")
        return found

    def rebuilds(self) -> list[Any]:
        return [
            run
            for run in self.client.search_runs([self.id], order_by=["attributes.start_time ASC"])
            if "rebuild.key" in run.data.tags
        ]

    def models(self) -> list[Any]:
        return list(self.client.search_logged_models([self.id]))

    def versions(self) -> list[Any]:
        """Of this test: the registry is one for all."""
        runs = {run.info.run_id for run in self.client.search_runs([self.id])}
        return [version for version in self.client.search_model_versions("name = 'minimind-agent'") if version.run_id in runs]

    def traces(self) -> list[Any]:
        return list(self.client.search_traces(locations=[self.id], include_spans=True, max_results=500))
