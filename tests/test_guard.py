"""The guard beside a training run: what it says, when it stops one, and that it decides no result."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_group_loop import Run, equal
from test_group_loop import make_settings as group_settings
from tiny_runs import CPU, prompts, sets_fixture, tokenizer_fixture

from pipeline.curves import write_curve
from pipeline.diagnosis.guard import Guard
from pipeline.params import load_params
from pipeline.params.schema import Runtime
from pipeline.stage import StageRun, stage_run
from pipeline.text.tokenizer import Tokenizer
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.training.group_loop import train_group

ROOT = Path(__file__).parents[1]
tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(12))
SETTINGS = group_settings(epochs=8, kl_coef=0.5)  # 24 steps


def runtime(**changes: Any) -> Runtime:
    quiet = {"device": "cpu", "threads": 1, "save_every_s": 1e9, "progress": "auto", "mlflow": False, "replay_every_steps": None}
    return load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet | changes)


def opened(root: Path, **changes: Any) -> Any:
    return stage_run("grpo", params={"grpo": SETTINGS.model_dump()}, inputs=[], runtime=runtime(**changes), root=root)


def folder(root: Path) -> RunFolder:
    (path,) = (root / ".runs/grpo").glob("*/1")
    return RunFolder(path)


def train(root: Path, sets: Path, tokenizer: Tokenizer, **changes: Any) -> dict[str, bytes]:
    """A run of the real loop whose rewards are all equal; its files, and its weights."""
    run = Run(sets, tokenizer, SETTINGS, score=equal)
    with torch.no_grad():  # off the reference, so that KL moves it
        run.policy.lm_head.weight.mul_(1.1)
    root.mkdir(exist_ok=True)
    with opened(root, **changes) as record:
        train_group(run.task, SETTINGS, CPU, record)
        write_curve(root / "curve.csv", record.folder.metrics, every=1)
    weights = b"".join(p.detach().numpy().tobytes() for p in run.policy.parameters())
    return {"weights": weights, "curve": (root / "curve.csv").read_bytes(), "samples": record.folder.samples.read_bytes()}


def test_the_guard_decides_no_byte(tmp_path: Path, sets: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    """Off, warning, and stopping with a resume under another setting end alike."""
    without = train(tmp_path / "off", sets, tokenizer, guard="off")
    assert "no_signal" not in capsys.readouterr().err
    assert train(tmp_path / "warn", sets, tokenizer, guard="warn") == without
    said = capsys.readouterr().err
    assert said.count("grpo: problem: no_signal: in 100% of the groups") == 1  # once, though every look sees it
    kept = read_json(folder(tmp_path / "warn").guard)["no_signal"]
    assert kept.startswith("problem: no_signal: in 100% of the groups") and f"grpo: {kept}\n" in said
    assert not folder(tmp_path / "off").guard.exists()
    assert "(rollout/zero_std_frac, steps 8-10)" in said and "grpo.group_size (now 4)" in said

    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "stop", sets, tokenizer, guard="stop")
    stopped = folder(tmp_path / "stop")
    end = read_json(stopped.exit)
    assert ended.value.code == end["code"] == 4 and stopped.commits() == [10]
    reason = "stopped by runtime.guard after step 10, saved; with guard: warn it goes on. no_signal: "
    assert end["reason"].startswith(reason) and capsys.readouterr().err.count(f"grpo: {reason}") == 1
    assert train(tmp_path / "stop", sets, tokenizer, guard="warn") == without
    assert [step for step, _ in steps(stopped)] == list(range(1, 25))


def steps(run: RunFolder) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["step"], json.loads(line)["metrics"]


def test_a_warning_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path, guard="stop") as run:
        log(run, range(1, 31), {"rollout/truncated_frac": 0.2})
    assert read_json(folder(tmp_path).exit)["code"] == 0
    assert capsys.readouterr().err.count("warn: length_cap: 20% of the answers") == 1


def test_what_becomes_worse_is_said_again_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), opened(tmp_path, guard="stop") as run:
        log(run, range(1, 12), {"rollout/truncated_frac": 0.2})
        log(run, range(12, 100), {"rollout/truncated_frac": 0.9})
    said = capsys.readouterr().err
    assert said.count("warn: length_cap") == 1 and folder(tmp_path).commits() == [20]


def log(run: StageRun, numbers: range, metrics: Mapping[str, float]) -> None:
    for step in numbers:
        run.log(step, metrics)
        run.checkpoint(step, lambda: {"x": 1})


def test_a_resumed_run_is_judged_by_all_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), opened(tmp_path) as run:
        for step in range(1, 9):
            run.log(step, {"rollout/truncated_frac": 0.9})
        run.save(8, {"x": 1})
        for step in range(9, 30):  # lost with the kill
            run.log(step, {"rollout/truncated_frac": 0.0})
        raise KeyboardInterrupt
    capsys.readouterr()
    with opened(tmp_path) as run:
        assert run.resumed_step == 8
        log(run, range(9, 11), {"rollout/truncated_frac": 0.9})
    assert "problem: length_cap: 90% of the answers are cut at the length limit (rollout/truncated_frac, steps 8-10)" in (
        capsys.readouterr().err
    )


def test_values_that_are_not_finite_and_keys_that_come_late_are_no_fault() -> None:
    guard = Guard("grpo", {}, {})
    for step in range(1, 41):
        metrics = {"reward/mean": float("nan"), "reward/term/a": float("inf"), "policy/entropy": 0.0}
        assert guard.follow(step, metrics if step % 2 else {}) == []


def test_it_costs_next_to_nothing(tmp_path: Path) -> None:
    """Below 1% of the quickest step of profile micro, 85 ms in pretrain. Here the keys of a step of grpo come 3000 times."""
    keys = (ROOT / "plots/grpo.csv").read_text(encoding="utf-8").splitlines()[0].split(",")[1:]
    guard = Guard("grpo", {}, {})
    started = time.process_time()
    for step in range(1, 3001):
        guard.follow(step, dict.fromkeys(keys, 1.0 + 0.1 * (step % 7)))
    assert (time.process_time() - started) / 3000 < 0.01 * 0.085


@pytest.mark.parametrize("stage", ["tokenizer", "eval"])
def test_stages_without_checks_are_left_alone(stage: str) -> None:
    guard = Guard(stage, {}, {})
    assert [guard.follow(step, {"reward/mean": 1.0}) for step in range(30)] == [[]] * 30
