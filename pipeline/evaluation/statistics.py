"""Intervals and verdicts. All are functions of the per-row values, so the same panel always gives the same interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

BOOTSTRAP_RESAMPLES = 2000

Verdict = Literal["better", "worse", "no clear difference"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` rows with the bounds of its interval."""

    value: float
    low: float
    high: float
    n: int


def proportion(successes: Sequence[bool], confidence: float) -> Estimate:
    """Share of True with its Wilson score interval (Wilson 1927), which stays inside [0, 1] also at 0 and n successes.

    Raises:
        ValueError: no rows.
    """
    n = len(successes)
    if not n:
        raise ValueError("a proportion needs at least one row")
    p = sum(successes) / n
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n)


def mean(values: Sequence[float], confidence: float) -> Estimate:
    """Mean with the percentile interval of a seeded bootstrap over rows; a single row has no spread to show."""
    return ratio(values, [1.0] * len(values), confidence)


def ratio(numerators: Sequence[float], denominators: Sequence[float], confidence: float) -> Estimate:
    """Sum over sum (bits over bytes, for example) with a bootstrap interval over rows.

    Raises:
        ValueError: no rows, or denominators that sum to 0.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if not len(top) or bottom.sum() == 0:
        raise ValueError("a ratio needs at least one row and a denominator that is not 0")
    picks = _resamples(len(top))
    resampled = top[picks].sum(axis=1) / np.maximum(bottom[picks].sum(axis=1), 1e-300)
    low, high = np.quantile(resampled, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high), len(top))


def paired(values: Sequence[float], others: Sequence[float], confidence: float) -> Estimate:
    """Mean difference of two models on the same rows, with its bootstrap interval.

    Raises:
        ValueError: no rows, or the two were not measured on the same ones.
    """
    if len(values) != len(others):
        raise ValueError(f"paired rows differ in number: {len(values)} and {len(others)}")
    return mean([own - other for own, other in zip(values, others, strict=True)], confidence)


def verdict(values: Sequence[float], parent_values: Sequence[float], confidence: float, *, higher_is_better: bool) -> Verdict:
    """Paired comparison on the same rows: the bootstrap interval of the mean difference excludes 0, or it does not.

    A single row has no spread and proves nothing.

    Raises:
        ValueError: the two models were not measured on the same rows.
    """
    difference = paired(values, parent_values, confidence)
    if difference.n > 1 and (difference.low > 0 or difference.high < 0):
        return "better" if (difference.low > 0) == higher_is_better else "worse"
    return "no clear difference"


def _resamples(n: int) -> np.ndarray:
    """[BOOTSTRAP_RESAMPLES, n] row indices, the same for every metric and model, so that comparisons are paired."""
    return np.random.Generator(np.random.Philox(key=n)).integers(0, n, size=(BOOTSTRAP_RESAMPLES, n))
