"""Lock files and run folders joined: which run made what a lock file records, and which lock file records what a run made."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.lineage.history import (
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
from pipeline.tracking.run_folder import RunFolder, read_json


def run_that_made(made: Made, runs: Path) -> RunFolder | None:
    """The newest finished run of this recipe that `runs` still has. Equal recipes give equal bytes, whichever run it was."""
    found = []
    for path in (runs / made.stage).glob("*/*/run.json"):
        folder = RunFolder(path.parent)
        about = read_json(folder.about)
        if _made_this(about, made) and read_json(folder.exit).get("code") == 0:
            found.append((about.get("started_s", 0.0), folder))
    return max(found, key=lambda each: each[0])[1] if found else None


def inputs_of(about: Mapping[str, Any]) -> dict[str, str]:
    """Digest by path of what a run read, the hash of its code included.

    Args:
        about: its run.json.
    """
    return input_digests(about.get("tags", {}))


def recorded(root: Path, stage: str, about: Mapping[str, Any]) -> Lock | None:
    """The lock file that records what a run made: the workspace's, its experiment's or a commit's.

    Args:
        root: the repository.
        stage: of the run.
        about: its run.json.

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
        if lock is not None and _made_this(about, lock.stages[stage]):
            return lock
    return None


def _commits(root: Path, about: Mapping[str, Any]) -> Iterator[str | None]:
    yield None
    name = about.get("tags", {}).get("dvc.experiment")
    if name and (commit := experiment_commit(root, name)):
        yield commit
    yield from commits_with_lock(root)


def _made_this(about: Mapping[str, Any], made: Made) -> bool:
    """Whether the run had these parameters and inputs, whatever its code was; one whose run.json cannot be read had none."""
    read = {path: inputs_of(about).get(path) for path in made.deps}
    return read == made.deps and params_of(about) == made.params


def params_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a run by full key.

    Args:
        about: its run.json.
    """
    return dict(flat_params(about.get("params", {})))
