"""Line charts as numbers that a template draws: one chart for one metric, a line for each run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.tracking.records import Series

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 26
MAX_POINTS = 300
COLOURS = 8
"""How many the style sheet has; further lines begin again."""

FURTHER = "Further metrics"
GROUPS = {
    "Reward": ("reward/mean", "reward/term/*", "reward/*", "rollout/zero_std_frac"),
    "Tools": ("tool/*",),
    "Loss": ("train/loss", "val/loss*", "val/bits_per_byte*", "policy/loss"),
    "Preference": ("*/accuracy", "*/margin", "dpo/*"),
    "KL": ("policy/*kl*",),
    "Entropy": ("policy/entropy", "rollout/distinct_3gram"),
    "Length": ("rollout/length*", "rollout/truncated_frac", "stop/*"),
    "Critic": ("value/*",),
    FURTHER: ("*",),
}
"""Heading -> patterns of the metrics below it, in this order; a metric belongs to the first that fits."""


@dataclass(frozen=True, slots=True)
class Line:
    """A run's curve.

    Attributes:
        colour: which one of the style sheet.
        path: for `d` of an SVG path.
        points: (x, y) where there are too few for a line to show.
    """

    colour: int
    path: str
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A metric over steps, in SVG units; ticks are pairs of position and label."""

    group: str
    title: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def charts(runs: Sequence[Mapping[str, Series]]) -> list[Chart]:
    """A chart of every metric that moves in some run, in the order of `GROUPS`; the others are left to the tables.

    Args:
        runs: per run, its metrics; a run keeps its colour in every chart.
    """
    keys = dict.fromkeys(key for metrics in runs for key in metrics)
    moving = [key for key in keys if any(key in metrics and len(set(metrics[key].values)) > 1 for metrics in runs)]
    return [chart(_place(key)[1], key, [metrics.get(key) for metrics in runs]) for key in sorted(moving, key=_place)]


def _place(key: str) -> tuple[int, str, int]:
    """Rank of the metric's group, its heading, and the metric's rank in it."""
    return next(
        (index, heading, rank)
        for index, (heading, patterns) in enumerate(GROUPS.items())
        for rank, pattern in enumerate(patterns)
        if fnmatchcase(key, pattern)
    )


def chart(group: str, title: str, series: Sequence[Series | None]) -> Chart:
    """One metric of several runs on common axes; None for a run that does not have it."""
    curves = [(index, *_thinned(each)) for index, each in enumerate(series) if each and each.steps]
    x = _Scale([step for _, steps, _ in curves for step in steps], LEFT, WIDTH - RIGHT, pad=0.0)
    y = _Scale([value for _, _, values in curves for value in values], HEIGHT - BOTTOM, TOP, pad=0.05)
    lines = []
    for index, steps, values in curves:
        points = [(x(step), y(value)) for step, value in zip(steps, values, strict=True)]
        path = "M" + "L".join(f"{across} {down}" for across, down in points)
        lines.append(Line(index % COLOURS, path, points if len(points) < 8 else []))
    return Chart(group, title, lines, x.ticks(5, whole=True), y.ticks(4))


def _thinned(series: Series) -> tuple[list[float], list[float]]:
    """At most 300 points: means of as many neighbours as that takes."""
    size = math.ceil(len(series.steps) / MAX_POINTS)
    starts = range(0, len(series.steps), size)
    means = [sum(window) / len(window) for window in (series.values[start : start + size] for start in starts)]
    return [series.steps[min(start + size, len(series.steps)) - 1] for start in starts], means


class _Scale:
    """Maps values to one axis of the drawing.

    Args:
        values: what must fit.
        start: where the smallest lies.
        end: where the largest lies.
        pad: share of the range that is left free at both ends.
    """

    def __init__(self, values: Sequence[float], start: float, end: float, *, pad: float) -> None:
        low, high = min(values), max(values)
        margin = (high - low) * pad or (0.0 if high > low else abs(high) * 0.05 or 1.0)
        self._low, self._high, self._start, self._end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self, number: int, *, whole: bool = False) -> list[tuple[float, str]]:
        """Position and label of about `number` round values."""
        from matplotlib.ticker import MaxNLocator  # slow to import

        values = MaxNLocator(number, steps=[1, 2, 5, 10], integer=whole).tick_values(self._low, self._high)
        return [(self(value), f"{value:.6g}") for value in values if self._low <= value <= self._high]
