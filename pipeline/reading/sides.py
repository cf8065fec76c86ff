"""What can be compared: runs, stages, experiments and files, each found by name and brought to one form."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError
from pipeline.lineage.history import Lock, Made, experiment_commit, flat_params, lock_at
from pipeline.lineage.runs import inputs_of, recorded, run_that_made
from pipeline.lineage.whence import JUDGE, Step, evaluation_of, whence
from pipeline.tracking.records import Record, find_runs, run_at
from pipeline.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class Side:
    """One of the things compared: what a stage made once.

    Attributes:
        given: the name it was asked for by.
        title: of its run; else the given name.
        place: the run folder, or where its lock file is when there is no folder any more.
        stage: that made it.
        params: by full key.
        upstream: the same of the stages before it; None where no dvc.lock records the run.
        inputs: digest by path of what the stage read.
        outputs: digest by path of what it made; empty before its end.
        record: its run; None once the folder is gone.
        evaluation: what `eval` measured of it, with intervals; empty where it did not.
        notes: what the reader should know about the choice.
        judge: the stage that measured `evaluation`.
    """

    given: str
    title: str
    place: str
    stage: str
    params: Mapping[str, Any]
    upstream: Mapping[str, Any] | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    record: Record | None
    evaluation: Mapping[str, float]
    notes: Sequence[str] = ()
    judge: Made | None = None

    def equals(self, other: "Side") -> bool:
        """Whether both are one run, or made the same bytes."""
        made = (self.stage, self.outputs) == (other.stage, other.outputs) and bool(self.outputs)
        return made or (self.record is not None and self.record == other.record)


def find_sides(root: Path, home: Path, names: Sequence[str], stage: str | None = None) -> list[Side]:
    """The things that are meant.

    Args:
        root: the repository.
        home: the folder with `.runs`.
        names: each a run folder, a stage (what the workspace's dvc.lock has of it, else its newest run), an MLflow run id, a DVC
            experiment, or a file that a stage wrote.
        stage: whose run is meant of experiments; else that of the other things, else the first whose parameters were changed.

    Raises:
        ParamsError: a name is none of these, or an experiment has no such stage.
        DataError: a file that no dvc.lock knows.
    """
    sides: dict[int, Side] = {}
    experiments: dict[int, Lock] = {}
    for index, name in enumerate(names):
        commit = experiment_commit(root, name)
        lock = lock_at(root, commit) if commit else None
        if lock is not None:
            experiments[index] = lock
        else:
            sides[index] = _file(root, home, name) if _is_file(root, home, name) else _named(root, home, name)
    wanted = stage or next((side.stage for side in sides.values()), None)
    for index, lock in experiments.items():
        sides[index] = _experiment(root, home, names[index], lock, wanted)
        wanted = wanted or sides[index].stage
    return [sides[index] for index in range(len(names))]


def _named(root: Path, home: Path, name: str) -> Side:
    lock = lock_at(root, None)
    made = lock.stages.get(name) if lock is not None else None
    if lock is None or made is None:
        note = f"{name}: not in the workspace's dvc.lock; this is its newest run"
        side = _run(root, home, name)
        return replace(side, notes=[note]) if name == side.stage else side
    folder = run_that_made(made, home / ".runs")
    return _recorded(root, name, lock, made, Record(folder) if folder else None)


def _run(root: Path, home: Path, name: str) -> Side:
    try:
        (folder,) = find_runs(home, [name])
    except ParamsError:
        raise ParamsError(
            f"{name}: no run folder, no stage that has run here, no MLflow run of one, no DVC experiment and no file; "
            "`ls -d .runs/*/*/*` and `dvc exp list` show what there is"
        ) from None
    record = Record(folder)
    # One with its bytes; else one with its recipe, which says what stood before it.
    made_this, of_recipe = (recorded(root, record.stage, record.about, outputs) for outputs in (record.outputs, None))
    lock = made_this or of_recipe
    if lock is not None:
        return _recorded(root, name, lock, lock.stages[record.stage], record)
    params, inputs = dict(flat_params(record.params)), inputs_of(record.about)
    return Side(name, record.name, _place(root, record), record.stage, params, None, inputs, record.outputs, record, {})


def _is_file(root: Path, home: Path, name: str) -> bool:
    path = root / name
    try:
        return bool(name) and path.exists() and run_at(path) is None and not _has_run(home, name)
    except (OSError, ValueError):  # too long a name, or a NUL
        return False


def _file(root: Path, home: Path, name: str) -> Side:
    origin = whence(root / name, root, home / ".runs")
    made = origin.steps[-1]
    record = Record(RunFolder(root / made.run.folder)) if made.run else None
    return Side(
        given=name,
        title=record.name if record else name,
        place=_place(root, record) if record else origin.path,
        stage=made.stage,
        params=made.params,
        upstream=_params(origin.steps[:-1]),
        inputs=inputs_of(record.about) if record else made.inputs,
        outputs=made.outs,
        record=record,
        evaluation=origin.evaluation,
        judge=origin.judge,
    )


def _experiment(root: Path, home: Path, name: str, lock: Lock, wanted: str | None) -> Side:
    notes: list[str] = []
    if wanted is None:
        changed = [stage for stage in _changed(lock, lock_at(root, f"{lock.commit}^")) if _has_run(home, stage)]
        if not changed:
            raise ParamsError(f"{name}: no stage with a run has other parameters in this experiment; say whose with --stage")
        wanted, *others = changed
        notes += [f"{name} also changes {', '.join(others)}; --stage compares these"] if others else []
    if wanted not in lock.stages:
        raise ParamsError(f"{name}: the experiment has no stage {wanted}; it has {', '.join(lock.stages)}")
    made = lock.stages[wanted]
    folder = run_that_made(made, home / ".runs")
    return _recorded(root, name, lock, made, Record(folder) if folder else None, notes)


def _has_run(home: Path, stage: str) -> bool:
    return any((home / ".runs" / stage).glob("*/*/run.json"))


def _changed(lock: Lock, before: Lock | None) -> Iterator[str]:
    """The stages whose parameters are not what they were, in the order of dvc.lock."""
    for stage, made in lock.stages.items():
        if before is None or stage not in before.stages or before.stages[stage].params != made.params:
            yield stage


def _recorded(root: Path, name: str, lock: Lock, made: Made, record: Record | None, notes: Sequence[str] = ()) -> Side:
    return Side(
        given=name,
        title=record.name if record else name,
        place=_place(root, record) if record else f"commit {lock.commit}"[:14] if lock.commit else "dvc.lock",
        stage=made.stage,
        params=made.params,
        upstream=_params(lock.ancestry(made)[:-1]),
        inputs=inputs_of(record.about) if record else made.inputs,
        outputs=record.outputs if record else made.outs,
        record=record,
        evaluation=evaluation_of(root, lock, made) if record is None or record.outputs == made.outs else {},
        notes=notes,
        judge=lock.stages.get(JUDGE),
    )


def _params(steps: Iterable[Made | Step]) -> dict[str, Any]:
    return {key: value for step in steps for key, value in step.params.items()}


def _place(root: Path, record: Record) -> str:
    path = record.folder.path
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
