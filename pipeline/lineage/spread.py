"""Whether values differ by more than seeds do."""

import math
from collections.abc import Sequence
from statistics import fmean

CONFIDENCE = 0.95


def outside(left: Sequence[float], right: Sequence[float]) -> bool | None:
    """Whether two groups, a value per seed, differ by more than seeds do; None where none has two seeds.

    A two-sided t-test at 95 % with the standard deviation pooled over both groups, of which one may be a single value. With few
    seeds its limits are wide, as they must be.
    """
    groups = [left, right]
    degrees = sum(len(group) - 1 for group in groups)
    if not all(groups) or degrees == 0:
        return None
    means = [fmean(group) for group in groups]
    squares = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    error = math.sqrt(squares / degrees) * math.sqrt(sum(1 / len(group) for group in groups))
    return abs(means[0] - means[1]) > _t_quantile(degrees) * error


def _t_quantile(degrees: int) -> float:
    from scipy.special import stdtrit  # slow to import, and most comparisons have no repeated seeds

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))
