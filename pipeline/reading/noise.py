"""Whether runs differ by more than their seeds do: runs of one recipe that differ in seeds alone show the spread of a metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from pipeline.lineage.runs import inputs_of
from pipeline.lineage.spread import outside
from pipeline.reading.measured import finals
from pipeline.tracking.description import flatten
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder

Verdict = Literal["inside", "outside", "unknown", "same recipe"]


@dataclass(frozen=True)
class Repeats:
    """The finished runs of one recipe, one per seed.

    Attributes:
        recipe: what they have in common.
        runs: the runs.
        values: final values by metric, one per run that has it.
        seeds: those of the run that was asked for.
        finished: whether that one has.
    """

    recipe: Any
    runs: tuple[Record, ...]
    values: Mapping[str, list[float]]
    seeds: tuple[tuple[str, str], ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation of a metric over seeds."""

    mean: float
    std: float
    seeds: int


def repeats_of(record: Record, home: Path) -> Repeats:
    """All runs in the store with the record's recipe but for `*.seed`: params, inputs and code.

    A run that has not finished stands alone: its level is not yet comparable.

    Args:
        record: a run.
        home: the folder with `.runs`.
    """
    recipe, own = _recipe(record)
    by_seed = {own: record}
    for path in sorted((home / ".runs" / record.stage).glob("*/*/run.json")) if record.finished else ():
        other = Record(RunFolder(path.parent))
        shared, seeds = _recipe(other)
        if shared == recipe and seeds != own and other.finished:
            by_seed[seeds] = other
    values: dict[str, list[float]] = {}
    for run in by_seed.values():
        for key, value in finals(run).items():
            values.setdefault(key, []).append(value)
    return Repeats(recipe, tuple(by_seed.values()), values, own, record.finished)


def _recipe(record: Record) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """What a run's seeds do not touch, and its seeds."""
    params = flatten(record.params)
    seeds = tuple(sorted((key, value) for key, value in params.items() if key.endswith(".seed")))
    rest = {key: value for key, value in params.items() if not key.endswith(".seed")}
    return (record.stage, rest, inputs_of(record.about)), seeds


def spread(values: Sequence[float]) -> Spread | None:
    """None for a single value, which has no spread."""
    return Spread(fmean(values), stdev(values), len(values)) if len(values) > 1 else None


def verdict(left: Repeats | None, right: Repeats | None, key: str) -> Verdict:
    """Whether the difference of two runs in a metric is one that other seeds of the same recipes could make.

    By `pipeline.lineage.spread`, over the recipes that have several seeds; one is enough.
    """
    if left is None or right is None:
        return "unknown"
    if left.recipe == right.recipe:
        return "same recipe"
    found = outside(left.values.get(key, []), right.values.get(key, []))
    return "unknown" if found is None else "outside" if found else "inside"
