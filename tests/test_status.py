"""The lineage at a glance and what it cost, as the terminal shows them."""

import pytest

from pipeline.reading.cost import Bill, Cost, as_text
from pipeline.reading.status import State, print_status


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
