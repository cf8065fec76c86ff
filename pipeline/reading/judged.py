"""What `eval` measured of the sides of a comparison, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.lineage.headlines import EVAL_HEADLINES, JUDGED_BY
from pipeline.reading.sides import Side

_BOUNDS = ("_low", "_high", "_n")


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric of the evaluation with its bounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A metric of the evaluation on every side, and whether each side's interval overlaps the first's (None: not both known)."""

    key: str
    values: tuple[Interval | None, ...]
    overlaps: tuple[bool | None, ...]


def judge(sides: Sequence[Side]) -> list[Judged]:
    """Every metric that `eval` measured of one of them; what models of the first one's stage are ranked by comes first."""
    found = dict.fromkeys(key for side in sides for key in side.evaluation if not key.endswith(_BOUNDS))
    headlines = [*filter(None, [JUDGED_BY.get(sides[0].stage)]), *EVAL_HEADLINES]
    keys = sorted(found, key=lambda key: rank(key, headlines))
    rows = [(key, tuple(_interval(side.evaluation, key) for side in sides)) for key in keys]
    return [Judged(key, values, tuple(_overlap(values[0], other) for other in values[1:])) for key, values in rows]


def rank(key: str, headlines: Sequence[str]) -> int:
    """Where a key stands among those that matter; behind all of them if it does not."""
    return headlines.index(key) if key in headlines else len(headlines)


def _interval(evaluation: Mapping[str, float], key: str) -> Interval | None:
    bounds = [evaluation.get(name) for name in (key, f"{key}_low", f"{key}_high")]
    value, low, high = bounds
    return None if value is None or low is None or high is None else Interval(value, low, high)


def _overlap(left: Interval | None, right: Interval | None) -> bool | None:
    return None if left is None or right is None else left.low <= right.high and right.low <= left.high
