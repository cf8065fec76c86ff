"""What models cost: time, tokens and energy of every stage, summed along a lineage, and what the last rebuild saved."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import ParamsError
from pipeline.lineage.history import Made, lock_at
from pipeline.lineage.runs import run_that_made
from pipeline.reading.words import count, duration
from pipeline.tracking.records import Record, all_runs
from pipeline.tracking.run_folder import read_json
from pipeline.tracking.usage import SECONDS, total

TOKENS = "train/tokens_seen"
Column = tuple[str, Callable[[float], str]]
SHOWN: dict[str, Column] = {
    SECONDS: ("time", duration),
    "cpu_s": ("processor time", duration),
    "device_s": ("GPU time", duration),
    "tokens": ("tokens", count),
    "energy_j": ("energy", lambda joules: f"{joules / 3.6e6:.3g} kWh"),
}
"""Heading and words of every figure."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage of a lineage used.

    Attributes:
        stage: its name.
        used: `seconds`, `cpu_s`, `device_s`, `energy_j`, `tokens`, as far as they are known.
        ended_s: when, Unix time; None where no record is left.
        skipped: whether the last rebuild found it made, so that this was saved.
        run: its run folder; None for a stage without runs, or where it is gone.
    """

    stage: str
    used: Mapping[str, float]
    ended_s: float | None
    skipped: bool
    run: str | None


@dataclass(frozen=True, slots=True)
class Bill:
    """What a lineage cost.

    Attributes:
        target: the stage that it leads to; None for all stages.
        stages: parents first.
        total: their sum.
        saved: the same of those that the last rebuild skipped.
        elsewhere: what other runs of these stages used: failed ones, and those of other parameters.
        others: how many these are.
    """

    target: str | None
    stages: list[Cost]
    total: Mapping[str, float]
    saved: Mapping[str, float]
    elsewhere: Mapping[str, float]
    others: int


def bill(root: Path, home: Path, target: str | None = None) -> Bill:
    """What the stages that led to `target` used when they made what dvc.lock records.

    Args:
        root: the repository.
        home: where `.runs` is.
        target: a stage; None for all stages.

    Raises:
        ParamsError: dvc.lock has no results, or none of the target.
    """
    lock = lock_at(root, None)
    made = [stage for stage in lock.stages if stage != "code"] if lock is not None else []
    if lock is None or not made:
        raise ParamsError("dvc.lock: holds no results yet; `dvc repro` makes them")
    if target is not None and target not in lock.stages:
        raise ParamsError(f"{target}: dvc.lock has no results of it; it has {', '.join(made)}")
    last = [target] if target is not None else made
    chosen = {made.stage: made for name in last for made in lock.ancestry(lock.stages[name])}
    records = {stage: _record(made, home) for stage, made in chosen.items()}
    began = _last_rebuild([record for record in records.values() if record is not None])
    costs = [_cost(stage, record, home, began) for stage, record in records.items()]
    known = {record.folder.path for record in records.values() if record is not None}
    others = [Record(folder) for folder in all_runs(home) if folder.stage in chosen and folder.path not in known]
    return Bill(
        target=target,
        stages=costs,
        total=total(*(cost.used for cost in costs)),
        saved=total(*(cost.used for cost in costs if cost.skipped)),
        elsewhere=total(*(_used(record) for record in others)),
        others=len(others),
    )


def _record(made: Made, home: Path) -> Record | None:
    folder = run_that_made(made, home / ".runs")
    return Record(folder) if folder is not None else None


def _last_rebuild(records: Sequence[Record]) -> float:
    """When the rebuild began that made the newest of the runs; its own start for a run that no rebuild started."""
    if not records:
        return 0.0
    newest = max(records, key=lambda record: record.started_s)
    return float((newest.about.get("rebuild") or {}).get("started_s", newest.started_s))


def _cost(stage: str, record: Record | None, home: Path, began: float) -> Cost:
    if record is not None:
        used, ended, run = _used(record), record.ended_s, str(record.folder.path.relative_to(home))
    else:  # what a stage without runs leaves is of its last start, which need not be the one that dvc.lock records
        end = read_json(home / ".runs" / stage / "exit.json")
        used, ended, run = end.get("used", {}), end.get("time_s"), None
    return Cost(stage, used, ended, ended is not None and ended < began, run)


def _used(record: Record) -> dict[str, float]:
    tokens = record.metrics.get(TOKENS)
    return record.used | ({"tokens": tokens.last} if tokens is not None else {})


def as_json(costs: Bill) -> str:
    """Everything, for programs."""
    return json.dumps(asdict(costs), ensure_ascii=False, allow_nan=False, indent=2)


def as_text(costs: Bill) -> Iterator[str]:
    """A line per stage, their sum, and what is behind it; a column for what nobody measured is left out."""
    columns = {name: SHOWN[name] for name in SHOWN if name in costs.total}
    if not columns:
        yield "no record of these stages is left in .runs: they were made elsewhere, or before their time was kept"
        return
    yield f"{'stage':<18}" + "".join(f"{name:>16}" for name, _ in columns.values())
    for cost in costs.stages:
        yield f"{cost.stage:<18}" + _row(cost.used, columns) + ("  skipped by the last rebuild" if cost.skipped else "")
    yield f"{'sum':<18}" + _row(costs.total, columns)
    if unknown := [cost.stage for cost in costs.stages if SECONDS not in cost.used]:
        yield f"not in the sum, as nobody knows their time (made elsewhere, or their record is gone): {', '.join(unknown)}"
    if SECONDS in costs.saved:
        yield f"the last rebuild skipped what had taken {duration(costs.saved[SECONDS])}"
    if costs.others:
        yield f"{costs.others} other runs of these stages (unfinished, or of other parameters): {_words(costs.elsewhere)}"


def _row(used: Mapping[str, float], columns: Mapping[str, Column]) -> str:
    return "".join(f"{show(used[name]) if name in used else '-':>16}" for name, (_, show) in columns.items())


def _words(used: Mapping[str, float]) -> str:
    return ", ".join(f"{show(used[name])} {title}" for name, (title, show) in SHOWN.items() if name in used)
