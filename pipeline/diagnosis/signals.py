"""A run's series as checks look at them: how they began, how they are now, and whether they moved by more than their noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.diagnosis.findings import Evidence
from pipeline.tracking.records import Series

MIN_POINTS = 9
"""Fewer say nothing about a course: its thirds would be one or two points."""
FEW = MIN_POINTS // 3
NOISE = 2.5
"""Standard errors that a difference must have to be none: 1% of a normal distribution, some more of few points."""
NO_GAIN = 1.0
"""Standard errors: what has not gained this much has not visibly risen."""


@dataclass(frozen=True, slots=True)
class Window:
    """Points of a series that stand side by side.

    Attributes:
        mean: of their values.
        error: the standard error of that mean; 0 for a single point.
        evidence: where they stand.
    """

    mean: float
    error: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Course:
    """First, middle and last third of a series."""

    early: Window
    middle: Window
    late: Window

    @property
    def gain(self) -> float:
        """From the first third to the last."""
        return self.late.mean - self.early.mean

    @property
    def z(self) -> float:
        """`gain` in standard errors; infinite where nothing scatters."""
        return _z(self.early, self.late)

    @property
    def rose(self) -> bool:
        return self.z >= NOISE

    @property
    def fell(self) -> bool:
        return self.z <= -NOISE

    @property
    def declined(self) -> bool:
        """Whether it had been higher in between."""
        return _z(self.middle, self.late) <= -NOISE


@dataclass(frozen=True, slots=True)
class Signals:
    """What checks know of a run.

    Attributes:
        stage: its name.
        params: what decided its result, by section.
        series: every metric by name; missing ones are no fault.
        ended: whether no step will follow.
        evaluation: metrics/eval.json where it is about this run's model: by model, by metric.
        samples: the newest rows of its sample table.
    """

    stage: str
    params: Mapping[str, Any]
    series: Mapping[str, Series]
    ended: bool = True
    evaluation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()

    def param(self, name: str, default: Any = None) -> Any:
        """The value of `<stage>.<name>`; `default` when the record lacks it."""
        return self.params.get(self.stage, {}).get(name, default)

    def key(self, name: str) -> str:
        """A parameter of the stage as advice names it: `grpo.lr (now 0.0001)`."""
        value = self.param(name)
        return f"{self.stage}.{name}" + (f" (now {value:g})" if isinstance(value, (int, float)) else "")

    def get(self, key: str) -> Series:
        """A series; an empty one when the record lacks it."""
        return self.series.get(key) or Series()

    def course(self, key: str, *, after: int = 0) -> Course | None:
        """How a series went; None when it has fewer than `MIN_POINTS`.

        Args:
            key: its name.
            after: steps up to this one are left out.
        """
        series = self.get(key)
        start = next((place for place, step in enumerate(series.steps) if step > after), len(series.steps))
        steps, values = series.steps[start:], series.values[start:]
        if len(values) < MIN_POINTS:
            return None
        third = len(values) // 3
        cuts = ((0, third), (third, len(values) - third), (len(values) - third, len(values)))
        return Course(*(window(key, steps[first:end], values[first:end]) for first, end in cuts))

    def late(self, key: str, *, after: int = 0) -> Window | None:
        """The last third of a series; None when it has fewer than `MIN_POINTS`."""
        course = self.course(key, after=after)
        return course.late if course else None

    def start(self, key: str) -> Window:
        """The first points of a series that has some, as many as thirds have at least."""
        series = self.get(key)
        return window(key, series.steps[:FEW], series.values[:FEW])

    def last(self, key: str) -> Window | None:
        """As `late`; of a series that broke off early, while rewards went on, its last few points without the very first."""
        series = self.get(key)
        if 1 < len(series.values) < MIN_POINTS and self.late("reward/mean"):
            return window(key, series.steps[1:][-FEW:], series.values[1:][-FEW:])
        return self.late(key)


def window(key: str, steps: Sequence[int], values: Sequence[float]) -> Window:
    """Mean and standard error of at least one point."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return Window(mean, math.sqrt(variance / len(values)), Evidence(key, steps[0], steps[-1]))


def _z(before: Window, after: Window) -> float:
    difference, error = after.mean - before.mean, math.hypot(before.error, after.error)
    if math.isclose(after.mean, before.mean, rel_tol=1e-6, abs_tol=1e-9):  # rounding of the same value over and over
        return 0.0
    return difference / error if error else math.copysign(math.inf, difference)
