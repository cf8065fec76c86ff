"""The whole lineage at tiny size, run as a user runs it, in a copy of this repository whose network is cut.

The tests share one lineage and go through it in order: what it made, what runs again and what does not, what a killed
trainer leaves behind. It takes minutes; `-m "not e2e"` leaves it out.
"""

import csv
import json
import math
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lineage.project import RECORDS, ROOT, Project, commit, copy_repository, yaml

from pipeline.lineage.causes import FIRST
from pipeline.lineage.overrides import shown
from pipeline.tracking.records import noted_complete
from pipeline.tracking.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SETS = ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent")
ENCODED = ("pretrain", "full_sft", "lora", "dpo")
TRAINING = ("pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent")
TRACKED = ("tokenizer", *TRAINING, "eval")
STAGES = {"code", "gate", *TRACKED, *(f"data@{name}" for name in SETS), *(f"encode@{name}" for name in ENCODED)}
METRICS = {"bits_per_byte", "stops_frac", "qa_exact", "preference_accuracy", "reward_mean", "tool_success", "tool_valid_frac"}
EXECUTION = (
    "pipeline",
    "stages",
    "params.yaml",
    "dvc.yaml",
    "dvc.lock",
    ".runs",
    ".dvc/tmp/rwlock",  # what DVC resolved, compared with what the stage reads
    "metrics/code.json",  # looked for and not there: these stages have no results to show
    "metrics/gate.json",
)  # covered by code hashes, by `params:`, or no input
PATIENCE_S = 120.0
COMMANDS = ("python", "-m", "pipeline")


@dataclass(frozen=True)
class Lineage:
    """What `dvc repro` made of a fresh copy."""

    project: Project
    ran: set[str]
    changed: list[str]
    lock: dict[str, Any] = field(repr=False)
    reads: dict[str, set[str]] = field(repr=False)

    def declared(self, stage: str, what: str) -> dict[str, str]:
        """Path to digest of a stage's `deps` or `outs`, as dvc.lock has them."""
        return {entry["path"]: entry["md5"] for entry in self.lock[stage].get(what, [])}


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Lineage:
    folder = tmp_path_factory.mktemp("lineage")
    (folder / "copy").mkdir()
    project = copy_repository(folder / "copy")
    ran = project.repro(LINEAGE_READS=str(folder / "reads.txt"))
    changed = project.check("git", "status", "--porcelain", "--untracked-files=all").splitlines()
    commit(project, "results")
    reads: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for line in (folder / "reads.txt").read_text(encoding="utf-8").splitlines():
        stage, _, path = line.partition("\t")
        reads[stage].add(path)
    return Lineage(project, ran, changed, yaml.load(project.root / "dvc.lock")["stages"], reads)


def load_json(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{path}: {constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_clocked(key: str) -> bool:
    return key.startswith(("time/", "memory/")) or key.endswith("_per_s")


def run_folders(project: Project, stage: str) -> list[Path]:
    """Every run folder of a stage, oldest first; feeders still write to run.json when a stage has ended."""
    folders = [about.parent for about in (project.root / ".runs" / stage).glob("*/*/run.json")]
    return sorted(folders, key=lambda folder: load_json(folder / "run.json")["started_s"])


def wait_until_fed(project: Project) -> None:
    """Feeders outlive their trainers, and a busy machine lets them wait."""
    deadline = time.monotonic() + PATIENCE_S
    folders = [folder for stage in TRACKED for folder in run_folders(project, stage)]
    while missing := [folder for folder in folders if not noted_complete(RunFolder(folder))]:
        assert time.monotonic() < deadline, f"not sent: {missing}"
        time.sleep(0.2)


# What was made


def test_every_stage_ran_and_wrote_what_it_declares(lineage: Lineage) -> None:
    assert lineage.ran == STAGES == set(lineage.lock)
    root = lineage.project.root
    for stage in STAGES:
        for out in lineage.declared(stage, "outs"):
            assert (root / out).is_file() or any((root / out).iterdir()), out
    assert (root / "reports/eval.md").read_text(encoding="utf-8").startswith("# Evaluation")
    assert {path.name for path in (root / "reports/curves").iterdir()} == {f"{stage}.png" for stage in TRAINING}


def test_git_sees_nothing_but_the_records(lineage: Lineage) -> None:
    made = {line[3:] for line in lineage.changed}
    assert made == {
        "dvc.lock",
        *(f"metrics/{stage}.json" for stage in TRACKED),
        *(f"plots/{stage}.csv" for stage in TRAINING),
    }
    assert {Path(path).parts[0] for path in made} == set(RECORDS)


@pytest.mark.parametrize("stage", [stage for stage in TRACKED if stage != "eval"])
def test_metrics_are_flat_and_finite(lineage: Lineage, stage: str) -> None:
    metrics = load_json(lineage.project.root / f"metrics/{stage}.json")
    assert metrics and all(type(value) in (int, float) and math.isfinite(value) for value in metrics.values())
    assert not any(map(is_clocked, metrics))


def test_eval_measures_every_model_on_the_same_rows(lineage: Lineage) -> None:
    models = load_json(lineage.project.root / "metrics/eval.json")
    assert set(models) == set(TRAINING)
    for name, metrics in models.items():
        own = {key for key in metrics if not key.endswith(("_low", "_high", "_n"))}
        assert own == {"preference_accuracy"} if name == "reward" else METRICS <= own, name
        for key in own:
            low, value, high = (metrics[key + suffix] for suffix in ("_low", "", "_high"))
            assert math.isfinite(low) and math.isfinite(high) and low <= value <= high, (name, key)
            assert metrics[f"{key}_n"] == models["pretrain" if name == "reward" else "agent"][f"{key}_n"] >= 1


@pytest.mark.parametrize("stage", TRAINING)
def test_curves_have_few_rows_and_every_column_that_is_plotted(lineage: Lineage, stage: str) -> None:
    with (lineage.project.root / f"plots/{stage}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert list(rows[0])[0] == "step" and 2 <= len(rows) <= 500 and steps == sorted(set(steps))
    assert all(math.isfinite(float(cell)) for row in rows for cell in row.values() if cell)
    assert not any(map(is_clocked, rows[0]))
    dvc = yaml.load(ROOT / "dvc.yaml")
    plotted = [next(iter(plot.values()))["y"].get(f"plots/{stage}.csv", []) for plot in dvc["plots"]]
    plotted += [next(iter(dvc["stages"][stage]["plots"][0].values()))["y"]]
    for columns in plotted:
        for column in [columns] if isinstance(columns, str) else columns:
            assert any(row[column] for row in rows), column


def test_checkpoints_load_and_differ_from_their_parents(lineage: Lineage) -> None:
    import torch

    from pipeline.checkpoint.files import load_model, load_state
    from pipeline.checkpoint.lora import load_lora_model
    from pipeline.checkpoint.reward import load_reward_model
    from pipeline.model.transformer import CausalLM
    from pipeline.text.tokenizer import load_tokenizer

    root = lineage.project.root
    digest = load_tokenizer(root / "data/tokenizer").digest
    files = {name: root / f"checkpoints/{name}.pth" for name in TRAINING}
    models = {name: load_model(path, tokenizer_digest=digest) for name, path in files.items() if name not in ("lora", "reward")}
    seed = yaml.load(root / "params.yaml")["pretrain"]["seed"]
    start = CausalLM(models["pretrain"].config, seed=seed).state_dict()
    for name, model in models.items():
        parent = start if name == "pretrain" else models["pretrain" if name == "full_sft" else "full_sft"].state_dict()
        same = [key for key, value in model.state_dict().items() if torch.equal(value, parent[key])]
        assert not same, f"{name} left untouched: {same}"

    base = models["full_sft"].state_dict()
    adapters = load_state(files["lora"])
    assert adapters and not set(adapters) & set(base) and all("lora" in key for key in adapters)
    assert all(value.any() for value in adapters.values())
    load_lora_model(files["full_sft"], files["lora"], tokenizer_digest=digest)

    load_reward_model(files["reward"], tokenizer_digest=digest)
    reward = load_state(files["reward"])
    assert not [key for key in set(reward) & set(base) if torch.equal(reward[key], base[key])]


def test_reports_find_the_mlflow_run_of_every_stage(lineage: Lineage) -> None:
    from pipeline.lineage.records import tracked_run

    wait_until_fed(lineage.project)
    root = lineage.project.root
    for stage in TRACKED:
        (folder,) = run_folders(lineage.project, stage)
        found = tracked_run(root, root, stage)
        assert found is not None and not found.served
        assert found.url.rpartition("/")[2] == load_json(folder / "feeder.json")["run_id"]
    assert tracked_run(root, root, "code") is None


def test_status_and_cost_know_every_stage(lineage: Lineage) -> None:
    wait_until_fed(lineage.project)
    states = {state["stage"]: state for state in json.loads(lineage.project.check(*COMMANDS, "status", "--json"))}
    assert set(states) == STAGES and {state["state"] for state in states.values()} == {"up to date"}
    assert all(states[stage]["run"] and states[stage]["age_s"] > 0 for stage in TRACKED)
    assert all(states[stage]["url"].endswith(f"/#/runs/{states[stage]['mlflow']}") for stage in TRACKED)
    assert states["grpo"]["under"] == states["reward"]["under"] == "full_sft" and states["full_sft"]["under"] == "pretrain"
    assert states["pretrain"]["metrics"]["val/loss"] == load_json(lineage.project.root / "metrics/pretrain.json")["val/loss"]

    bill = json.loads(lineage.project.check(*COMMANDS, "cost", "grpo", "--json"))
    costs = {cost["stage"]: cost["used"] for cost in bill["stages"]}
    assert {"data@pretrain", "pretrain", "full_sft", "reward", "grpo"} <= set(costs) and "dpo" not in costs
    assert all(0 < used["seconds"] < 600 and used["cpu_s"] > 0 for used in costs.values())
    assert bill["total"]["seconds"] == pytest.approx(sum(used["seconds"] for used in costs.values()), abs=0.1)
    steps = json_lines(run_folders(lineage.project, "pretrain")[0] / "metrics.jsonl")
    assert costs["pretrain"]["tokens"] == max(line["metrics"].get("train/tokens_seen", 0) for line in steps) > 0


@pytest.mark.parametrize("stage", ["ppo", "grpo", "agent"])
def test_logged_steps_can_be_replayed(lineage: Lineage, stage: str) -> None:
    said = lineage.project.check(*COMMANDS, "replay-step", stage, "2").splitlines()[-1]
    assert said.startswith(f"{stage} step 2, replayed from ") and " agree within 1e-06 " in said, said


# Declared = real


def covered(path: str, by: Any) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in by)


def test_stages_read_nothing_that_they_do_not_declare(lineage: Lineage) -> None:
    allowed = {stage: {*lineage.declared(stage, "deps"), *lineage.declared(stage, "outs"), *EXECUTION} for stage in STAGES}
    strange = {
        stage: sorted(path for path in paths if not covered(path, allowed[stage])) for stage, paths in lineage.reads.items()
    }
    assert not any(strange.values()), strange


def test_stages_declare_nothing_that_they_do_not_read(lineage: Lineage) -> None:
    """Apart from what stands for code, and from the empty file that stands for `null`."""
    unread = {
        stage: [
            dep
            for dep in lineage.declared(stage, "deps")
            if not dep.startswith("data/code/") and dep != "external/None" and not any(covered(path, [dep]) for path in paths)
        ]
        for stage, paths in lineage.reads.items()
    }
    assert not any(unread.values()), unread


# What runs again


def test_nothing_runs_again(lineage: Lineage) -> None:
    project = lineage.project
    assert project.repro() == set()
    assert "up to date" in project.check("dvc", "status")


def test_a_changed_key_runs_the_stages_that_it_decides(lineage: Lineage) -> None:
    project = lineage.project
    measured = set((project.root / ".runs/eval/cache").iterdir())
    planned = json.loads(project.check(*COMMANDS, "plan", "--json", "--set", "grpo.lr=0.003"))
    assert project.repro() == set()  # planning changes nothing
    project.set_params({"grpo.lr": 0.003})
    assert json.loads(project.check(*COMMANDS, "plan", "--json")) == planned
    causes = {each["stage"]: (each["verdict"], each["causes"]) for each in planned if each["verdict"] != "up to date"}
    old = lineage.lock["grpo"]["params"]["params.yaml"]["grpo"]["lr"]
    why = [f"grpo.lr {shown(old)} → 3e-3"]
    assert causes == {
        "grpo": ("runs", why),
        "eval": ("may run", ["unless grpo comes out unchanged"]),
        "gate": ("may run", ["unless eval comes out unchanged"]),
    }
    assert all(each["seconds"] > 0 for each in planned if each["stage"] in ("grpo", "eval", "gate"))
    assert project.repro() == {"grpo", "eval", "gate"}
    assert load_json(run_folders(project, "grpo")[-1] / "run.json")["why"] == why
    assert load_json(run_folders(project, "pretrain")[0] / "run.json")["why"] == [FIRST]
    assert len(set((project.root / ".runs/eval/cache").iterdir()) - measured) == 1  # grpo alone was measured again


def test_comments_and_runtime_settings_run_no_training(lineage: Lineage) -> None:
    lineage.project.set_params({"runtime.keep_saves": 1, "runtime.progress": "off"})
    path = lineage.project.root / "pipeline/maths/policy.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# An afterthought.\n", encoding="utf-8")
    assert lineage.project.repro() == {"code"}


def test_forced_stages_train_again_to_the_same_bytes(lineage: Lineage) -> None:
    project, forced = lineage.project, ("pretrain", "dpo", "grpo")
    commit(project, "before")
    before = {stage: run_folders(project, stage) for stage in forced}
    assert project.repro("--force", "--single-item", *forced) == set(forced)
    assert project.check("git", "status", "--porcelain") == ""  # dvc.lock, metrics and plots included
    for stage in forced:
        (new,) = set(run_folders(project, stage)) - set(before[stage])
        (older,) = (folder for folder in before[stage] if folder.parent == new.parent)  # the same recipe
        assert len(run_folders(project, stage)) == len(before[stage]) + 1
        assert [line["step"] for line in json_lines(new / "metrics.jsonl")] == [
            line["step"] for line in json_lines(older / "metrics.jsonl")
        ]
        assert load_json(new / "run.json")["attempt"] == 1


# Tracking


def finished_runs(project: Project) -> dict[Path, Any]:
    """The store's runs by run folder, once each folder has a finished one there: feeders outlive their trainers."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project.root}/mlflow.db")
    experiment = client.get_experiment_by_name("minimind")
    assert experiment is not None
    folders = {folder for stage in TRACKED for folder in run_folders(project, stage)}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        runs = [run for run in client.search_runs([experiment.experiment_id]) if "rebuild.key" not in run.data.tags]
        finished = {Path(run.data.tags["run.folder"]): run for run in runs if run.info.status == "FINISHED"}
        if set(finished) == folders:
            assert len(runs) == len(folders)
            return finished
        assert time.monotonic() < deadline, f"not in MLflow: {folders - set(finished)}"
        time.sleep(0.2)


def test_every_execution_is_one_finished_run(lineage: Lineage) -> None:
    from importlib.metadata import version

    project = lineage.project
    runs = finished_runs(project)
    commits = project.check("git", "rev-list", "HEAD").split()
    for folder, run in runs.items():
        stage, tags = folder.parts[-3], run.data.tags
        assert tags["dvc.stage"] == stage and tags["git.commit"] in commits
        assert tags["version.python"] == platform.python_version()
        for library in ("torch", "transformers", "tokenizers"):
            assert tags[f"version.{library}"] == version(library)
        assert any(key.startswith(f"{stage}.") for key in run.data.params)
    for stage in TRACKED:
        tags = runs[run_folders(project, stage)[0]].data.tags
        assert tags["git.dirty"] == "false"  # results that are not committed do not count
        for path, digest in lineage.declared(stage, "deps").items():
            assert path.startswith("data/code/") or tags[f"dvc.{path}"] == digest


def test_runs_hold_each_step_once_and_samples(lineage: Lineage) -> None:
    from mlflow import MlflowClient

    project = lineage.project
    client = MlflowClient(f"sqlite:///{project.root}/mlflow.db")
    for folder, run in finished_runs(project).items():
        stage = folder.parts[-3]
        recorded: dict[str, list[tuple[int, float]]] = {}
        for line in json_lines(folder / "metrics.jsonl"):
            for key, value in line["metrics"].items():
                if value is not None:
                    recorded.setdefault(key, []).append((line["step"], value))
        stored = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}
        stored = {
            key: points for key, points in stored.items() if not key.startswith("system/")
        }  # of what takes longer than 10 s
        assert stored == recorded, folder
        assert all(steps == sorted(set(steps)) for steps in ([step for step, _ in points] for points in recorded.values()))
        if stage == "eval":
            continue
        artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
        assert artifacts.is_relative_to(project.root / "mlartifacts")
        tables = [load_json(path) for path in sorted((artifacts / "samples").glob("*.json"))]
        assert sum(len(table["data"]) for table in tables) == len(json_lines(folder / "samples.jsonl")) > 0
        if stage in ("ppo", "grpo", "agent"):
            wanted = {"step", "prompt", "completion", "reward", "advantage", "stop"}
            assert wanted <= set(tables[0]["columns"]), stage


# Killed and started again


@contextmanager
def paused(project: Project, stage: str, *, save: int) -> Iterator["subprocess.Popen[str]"]:
    """The trainer of a stage, stopped as it begins to write the save of step `save`: its records are written by then."""
    process = project.start(*project.stage(stage), LINEAGE_PAUSE_AT=f"state-{save:08d}.pt.tmp")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            pytest.fail(f"{stage}: not paused but ended with {process.returncode}: {output_of(process)}")
        yield process
    finally:
        process.kill()
        process.wait()
        output_of(process)


def output_of(process: "subprocess.Popen[str]") -> str:
    """What it has printed and nobody has read; waits for its end."""
    assert process.stdout is not None
    if process.stdout.closed:
        return ""
    with process.stdout:
        return process.stdout.read()


def declared_files_only(lineage: Lineage, stage: str, folder: Path) -> Project:
    """A copy with the code, and of all data and weights only what the stage declares."""
    source = lineage.project
    folder.mkdir()
    listed = source.check("git", "ls-files", "pipeline", "stages", "params.yaml", "dvc.yaml").split()
    inputs = [path for dep in lineage.declared(stage, "deps") for path in files_below(source.root, dep)]
    for name in [*listed, *inputs]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((source.root / name).read_bytes())
    project = Project(folder, source.attempts)
    project.set_params({"runtime.mlflow": False})
    return project


def files_below(root: Path, name: str) -> list[str]:
    path = root / name
    return [file.relative_to(root).as_posix() for file in path.rglob("*") if file.is_file()] if path.is_dir() else [name]


@dataclass(frozen=True)
class Attempts:
    """How the starts of one stage ended: what was sent and what came back, and the folder they ran in."""

    project: Project
    ends: list[tuple[int, str]]


def killed_pretrain(project: Project) -> list[tuple[int, str]]:
    with paused(project, "pretrain", save=2) as process:
        second = project.run(*project.stage("pretrain"))
        assert f" {process.pid};" in second[1]
    return [second, (process.returncode, ""), project.run(*project.stage("pretrain"))]


def killed_ppo(project: Project) -> list[tuple[int, str]]:
    with paused(project, "ppo", save=2) as process:
        pass
    return [(process.returncode, ""), project.run(*project.stage("ppo"))]


def stopped_and_killed_grpo(project: Project) -> list[tuple[int, str]]:
    with paused(project, "grpo", save=1) as stopped:
        stopped.send_signal(signal.SIGTERM)
        stopped.send_signal(signal.SIGCONT)
        stopped.wait()
        said = output_of(stopped)
    with paused(project, "grpo", save=3) as process:
        pass
    return [(stopped.returncode, said), (process.returncode, ""), project.run(*project.stage("grpo"))]


@pytest.fixture(scope="module")
def attempts(lineage: Lineage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempts]:
    folder = tmp_path_factory.mktemp("attempts")
    scenarios = {"grpo": stopped_and_killed_grpo, "pretrain": killed_pretrain, "ppo": killed_ppo}
    projects = {stage: declared_files_only(lineage, stage, folder / stage) for stage in scenarios}
    with ThreadPoolExecutor(2) as pool:
        running = {stage: pool.submit(scenario, projects[stage]) for stage, scenario in scenarios.items()}
        return {stage: Attempts(projects[stage], future.result()) for stage, future in running.items()}


def test_second_trainer_is_refused_with_one_line(attempts: dict[str, Attempts]) -> None:
    code, output = attempts["pretrain"].ends[0]
    assert code == 6 and output.count("\n") == 1 and output.startswith("pretrain: ") and "held by the live process" in output


def test_terminated_trainer_saves_and_says_so(attempts: dict[str, Attempts]) -> None:
    code, output = attempts["grpo"].ends[0]
    assert code == 128 + signal.SIGTERM
    # a step that has not yet changed anything is left
    assert re.fullmatch("grpo: stopped by SIGTERM after step [12], saved; the same command resumes", output.splitlines()[-1])


@pytest.mark.parametrize(("stage", "step"), [("pretrain", 1), ("ppo", 1), ("grpo", 2)])
def test_killed_trainer_ends_where_an_uninterrupted_one_does(
    lineage: Lineage, attempts: dict[str, Attempts], stage: str, step: int
) -> None:
    project, ends = attempts[stage].project, attempts[stage].ends
    assert -signal.SIGKILL in [code for code, _ in ends]
    code, output = ends[-1]
    assert code == 0 and f"(resumes at step {step})" in output, output
    for name in (f"checkpoints/{stage}.pth", f"checkpoints/{stage}.json", f"metrics/{stage}.json", f"plots/{stage}.csv"):
        assert (project.root / name).read_bytes() == (lineage.project.root / name).read_bytes(), name

    (folder,) = run_folders(project, stage)
    twin = lineage.project.root / folder.relative_to(project.root)
    assert (folder / "samples.jsonl").read_bytes() == (twin / "samples.jsonl").read_bytes()
    assert without_clocks(folder / "metrics.jsonl") == without_clocks(twin / "metrics.jsonl")


def without_clocks(metrics: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (line["step"], {key: value for key, value in line["metrics"].items() if not is_clocked(key)})
        for line in json_lines(metrics)
    ]


# Mistakes, and the network


def test_mistake_in_params_shows_before_torch_is_imported(lineage: Lineage, tmp_path: Path) -> None:
    project = declared_files_only(lineage, "code", tmp_path / "mistake")
    params = yaml.load(project.root / "params.yaml")
    params["grpo"]["group_sise"] = 4
    with (project.root / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(params, file)
    started = time.monotonic()
    code, output = project.run(project.stage("pretrain")[0], "-X", "importtime", *project.stage("pretrain")[1:])
    assert time.monotonic() - started < 3
    imported = {line.rpartition("|")[2].strip() for line in output.splitlines() if line.startswith("import time:")}
    said = [line for line in output.splitlines() if not line.startswith("import time:")]
    assert code == 2 and len(said) == 1 and "grpo.group_sise" in said[0] and "did you mean `group_size`" in said[0], said
    assert "pydantic" in imported and "torch" not in imported


def test_nothing_reached_for_the_network(lineage: Lineage, tmp_path: Path) -> None:
    call = "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)"
    guarded = Project(tmp_path, tmp_path / "attempts.txt")
    code, output = guarded.run("python", "-c", call)
    assert code == 1 and "the network is cut" in output and "192.0.2.1" in guarded.attempts.read_text(encoding="utf-8")
    attempts = lineage.project.attempts
    assert not attempts.exists(), attempts.read_text(encoding="utf-8")
