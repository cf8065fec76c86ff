"""The lineage at a glance and what it cost, as the terminal shows them."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import write_run

from pipeline.digests import digest
from pipeline.lineage.plan import Planned, Verdict
from pipeline.reading.cost import Bill, Cost, as_text
from pipeline.reading.status import STATES, State, print_status, status
from pipeline.supervise import hold


def test_a_long_reason_leaves_the_names_of_the_stages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    chain = ["data@pretrain", "encode@pretrain", "pretrain", "full_sft", "grpo"]
    states = [
        State(stage, under, "behind one that runs", note="why " * 60, metrics={"val/loss": 0.75931}, age_s=5040.0)
        for stage, under in zip(chain, [None, *chain], strict=False)
    ]
    print_status(states)
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert len(rows) == len(chain)
    for row, stage in zip(rows, chain, strict=True):
        assert row.lstrip(" └─").startswith(f"{stage} ") and "behind one that runs" in row and "84 min" in row
        assert "val/loss 0.7593" in row and row.rstrip().endswith("…")


def test_every_verdict_is_a_state() -> None:
    assert set(STATES) == set(Verdict)


def test_a_stage_at_work_says_how_far_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, 1, code=None)
    folder = next((tmp_path / ".runs/grpo").glob("*/*"))
    (folder / "metrics.jsonl").write_text('{"step": 30, "time_s": 1.0, "metrics": {"train/loss": 1.0}}\n')
    (folder / "progress.json").write_text(json.dumps({"total": 100, "done": 10, "began_s": time.time() - 40}))
    planned = Planned("grpo", Verdict.RUNS, ["why"], [])
    with hold(tmp_path / ".runs/grpo/lock", wait=False):
        assert [(found.state, found.note) for found in status([planned], tmp_path, tmp_path)] == [("running", "")]
        with hold(folder / "lock", wait=False):
            [found] = status([planned], tmp_path, tmp_path)
    assert found.note == "step 30 of 100, about 2 min left"  # 2 s a step


# What a failed attempt says of a stage that is to run


def leave_exit(home: Path, stage: str, code: int, *, time_s: float, seconds: float) -> None:
    end = {"code": code, "reason": f"{stage}: exit {code}", "time_s": time_s, "used": {"seconds": seconds}}
    (home / ".runs" / stage).mkdir(parents=True, exist_ok=True)
    (home / ".runs" / stage / "exit.json").write_text(json.dumps(end))


def fail(home: Path, number: int, code: int | None, **run: Any) -> None:
    """A run of grpo from 1000 * number on; after 60 s it fails, and the process a moment later."""
    write_run(home, number, code=code, **run)
    if code is not None:
        leave_exit(home, "grpo", code, time_s=1000.0 * number + 60.5, seconds=63.0)


def state(root: Path, lr: float = 1e-4, *, verdict: Verdict = Verdict.RUNS, read: str | None = "a" * 32) -> tuple[str, str]:
    params = {"grpo.lr": lr, "grpo.seed": 42}
    planned = Planned("grpo", verdict, ["grpo.lr 1 → 2"], [], None, params, {"data/in": read})
    (found,) = status([planned], root, root)
    return found.state, found.note


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        (3, "failed", "the last attempt failed (exit 3)"),
        (143, "stopped", "the last attempt was stopped (exit 143)"),
        (None, "stopped", "the last attempt was killed"),
    ],
)
def test_a_failure_counts_for_what_the_stage_would_do_now(tmp_path: Path, code: int | None, expected: str, words: str) -> None:
    reason = f"grpo: exit {code}" if code else "was killed; the same command begins anew: nothing was saved yet"
    fail(tmp_path, 1, code)
    assert state(tmp_path) == (expected, reason)
    older = ("out of date", f"grpo.lr 1 → 2; {words} with older settings")
    assert state(tmp_path, lr=2e-4) == state(tmp_path, read="b" * 32) == older
    assert state(tmp_path, read=None) == ("out of date", f"grpo.lr 1 → 2; {words}")
    assert state(tmp_path, verdict=Verdict.MAY_RUN) == ("behind one that runs", f"grpo.lr 1 → 2; {words}")
    assert state(tmp_path, verdict=Verdict.UP_TO_DATE) == ("up to date", "grpo.lr 1 → 2")


def test_a_whole_number_in_params_yaml_is_the_same_rate(tmp_path: Path) -> None:
    fail(tmp_path, 1, 3, params={"lr": 1.0})
    assert state(tmp_path, lr=1)[0] == "failed"


def test_the_last_attempt_counts_whatever_other_runs_there_are(tmp_path: Path) -> None:
    fail(tmp_path, 1, 3)
    fail(tmp_path, 2, 4, params={"lr": 2e-4})
    assert state(tmp_path) == ("out of date", "grpo.lr 1 → 2; the last attempt failed (exit 4) with older settings")
    fail(tmp_path, 3, None)  # killed since: what exit.json has is of the one before
    assert state(tmp_path)[0] == "stopped"
    fail(tmp_path, 4, 0)  # finished, and its outputs are gone
    assert state(tmp_path) == ("out of date", "grpo.lr 1 → 2")


@pytest.fixture
def gated(tmp_path: Path) -> Planned:
    """`gate`, which keeps no runs, has failed after its inputs were written."""
    for name in ("params.yaml", "metrics/eval.json", "data/code/gate.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1000, 1000))
    leave_exit(tmp_path, "gate", 7, time_s=1010.0, seconds=5.0)
    code = digest(tmp_path / "data/code/gate.json")
    return Planned(
        "gate", Verdict.RUNS, ["why"], [], None, {"eval.gate": ["x"]}, {"data/code/gate.json": code, "metrics/eval.json": "e"}
    )


def test_a_stage_without_runs_failed_unless_something_was_written_since(tmp_path: Path, gated: Planned) -> None:
    def said() -> tuple[str, str]:
        (found,) = status([gated], tmp_path, tmp_path)
        return found.state, found.note

    assert said() == ("failed", "gate: exit 7")
    for name in ("params.yaml", "metrics/eval.json"):
        os.utime(tmp_path / name, (1006, 1006))  # after it began
        assert said() == ("out of date", f"why; the last attempt failed (exit 7) before {name} was written")
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / "data/code/gate.json").write_text('{"stages.gate": "what code wrote for another version"}')
    assert said() == ("out of date", "why; the last attempt failed (exit 7) with older code")


def cost(stage: str, seconds: float | None, *, skipped: bool = False) -> Cost:
    used = {"tokens": 10.0} if seconds is None else {"tokens": 10.0, "seconds": seconds}
    return Cost(stage, used, ended_s=1.0, skipped=skipped, run=None)


def test_a_sum_says_what_it_leaves_out() -> None:
    stages = [cost("pretrain", None, skipped=True), cost("full_sft", 40.0, skipped=True), cost("grpo", 20.0)]
    total = {"seconds": 60.0, "tokens": 30.0}
    lines = list(as_text(Bill("grpo", stages, total, saved={"seconds": 40.0, "tokens": 20.0}, elsewhere={}, others=0)))
    assert lines[-3].split() == ["sum", "60", "s", "30"]
    assert lines[-2].startswith("not in the sum") and lines[-2].endswith(": pretrain")
    assert lines[-1] == "the last rebuild skipped what had taken 40 s"


def test_what_was_saved_is_not_said_where_nobody_knows() -> None:
    stages = [cost("pretrain", None, skipped=True), cost("grpo", 20.0)]
    lines = list(as_text(Bill("grpo", stages, {"seconds": 20.0, "tokens": 20.0}, saved={"tokens": 10.0}, elsewhere={}, others=0)))
    assert not any("skipped what had taken" in line for line in lines)
