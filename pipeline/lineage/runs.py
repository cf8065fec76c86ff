"""Lock files and run folders joined: which run made what a lock file records, and which lock file records what a run made."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.lineage.history import (
    CODE,
    LOCK,
    Lock,
    Made,
    commits_with_lock,
    entry_in,
    experiment_commit,
    file_at,
    flat_params,
    lock_at,
)
from pipeline.tracking.description import input_digests
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder


def runs_that_made(made: Made, runs: Path) -> list[RunFolder]:
    """The finished runs that `runs` still has of what wrote exactly these bytes, of the same inputs and parameters.

    Those of the very code that the lock file names come first, then the newest: a change of code that changes no byte may have
    been taken over without a run.
    """
    found = []
    for path in (runs / made.stage).glob("*/*/exit.json"):
        record = Record(RunFolder(path.parent))
        if record.finished and record.outputs == made.outs and _is_of(record.about, made):
            same_code = inputs_of(record.about).get(f"{CODE}{made.stage}.json") == made.code
            found.append(((same_code, record.started_s), record.folder))
    return [folder for _, folder in sorted(found, key=lambda each: each[0], reverse=True)]


def run_that_made(made: Made, runs: Path) -> RunFolder | None:
    """The first of `runs_that_made`."""
    return next(iter(runs_that_made(made, runs)), None)


def inputs_of(about: Mapping[str, Any]) -> dict[str, str]:
    """Digest by path of what a run read, the hash of its code included.

    Args:
        about: its run.json.
    """
    return input_digests(about.get("tags", {}))


def recorded(root: Path, stage: str, about: Mapping[str, Any], outputs: Mapping[str, str] | None = None) -> Lock | None:
    """The lock file that records a run's recipe: the workspace's, its experiment's or a commit's.

    Args:
        root: the repository.
        stage: of the run.
        about: its run.json.
        outputs: digest by path of what the run made, for the lock file that records these bytes; None for any bytes.

    Returns:
        None for a run that failed, that was never committed, or whose commit is gone.
    """
    inputs, seen = inputs_of(about), set()
    for commit in _commits(root, about):
        entry = entry_in(file_at(root, commit, LOCK) or "", stage)
        if entry in seen or not entry or not all(digest in entry for digest in inputs.values()):
            continue
        seen.add(entry)
        lock = lock_at(root, commit)
        if lock is not None and _is_of(about, made := lock.stages[stage]) and outputs in (None, made.outs):
            return lock
    return None


def _commits(root: Path, about: Mapping[str, Any]) -> Iterator[str | None]:
    yield None
    name = about.get("tags", {}).get("dvc.experiment")
    if name and (commit := experiment_commit(root, name)):
        yield commit
    yield from commits_with_lock(root)


def _is_of(about: Mapping[str, Any], made: Made) -> bool:
    """Whether the run had these parameters and inputs, whatever its code was; one whose run.json cannot be read had none."""
    read = {path: inputs_of(about).get(path) for path in made.deps}
    return read == made.deps and params_of(about) == made.params


def params_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a run by full key.

    Args:
        about: its run.json.
    """
    return dict(flat_params(about.get("params", {})))
