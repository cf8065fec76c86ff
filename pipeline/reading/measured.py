"""What a metric came to: its last and best value, its final level, and whether higher is better."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pipeline.tracking.records import Record, Series

Direction = Literal["up", "down"]

_UP = (
    "*/accuracy",
    "*/margin",
    "reward/mean",
    "reward/max",
    "reward/min",
    "reward/term/*",
    "tool/success",
    "value/explained_variance",
    "tokenizer/*_per_token",
    "tokenizer/round_trip_frac",
    # Of an evaluation. `pipeline.evaluation` has their list, but imports torch; a test compares the two.
    "*/stops_frac",
    "*/qa_exact*",
    "*/subject_exact*",
    "*/preference_accuracy",
    "*/reward_mean",
    "*/reward_term_*",
    "*/tool_*",
)
_DOWN = (
    "train/loss",
    "val/loss",
    "val/loss_written",
    "*/bits_per_byte*",
    "value/loss",
    "policy/*kl*",
    "tool/error_frac",
    "moe/aux_loss",
)


def direction(key: str, *, reinforcement: bool = False) -> Direction | None:
    """Which way a metric gets better; None where neither way is, such as entropy and lengths.

    Args:
        key: of a run, or `<model>/<metric>` of an evaluation.
        reinforcement: whether the run learns from rewards. Its `train/loss` is a surrogate whose value says nothing.
    """
    if key == "train/loss" and reinforcement:
        return None
    if any(fnmatchcase(key, pattern) for pattern in _UP):
        return "up"
    return "down" if any(fnmatchcase(key, pattern) for pattern in _DOWN) else None


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of one run.

    Attributes:
        last: its last value.
        last_step: of that value.
        best: its best value; None where no direction is better.
        best_step: the first step that had it.
        final: the mean over the last tenth of the run's steps, or the last value of `val/*`: what metrics/<stage>.json holds, up
            to rounding.
    """

    last: float
    last_step: int
    best: float | None
    best_step: int | None
    final: float


def measure(record: Record) -> dict[str, Measured]:
    """Every metric of a run."""
    final, reinforcement = finals(record), "reward/mean" in record.metrics
    return {
        key: _measure(series, final[key], direction(key, reinforcement=reinforcement)) for key, series in record.metrics.items()
    }


def finals(record: Record) -> dict[str, float]:
    """The final level of every metric of a run."""
    return {key: _final(key, series, record.steps) for key, series in record.metrics.items()}


def _measure(series: Series, final: float, better: Direction | None) -> Measured:
    best = None if better is None else max(series.values) if better == "up" else min(series.values)
    step = None if best is None else series.steps[series.values.index(best)]
    return Measured(series.last, series.steps[-1], best, step, final)


def _final(key: str, series: Series, steps: int) -> float:
    first = steps - max(1, steps // 10)
    window = [value for step, value in zip(series.steps, series.values, strict=True) if step > first]
    return series.last if key.startswith("val/") or not window else sum(window) / len(window)
