"""How to get back what DVC has recorded, where a file is gone or has other bytes.

DVC believes its cache: it takes a read-only object for what its name says, copies a rotten one into the workspace without a word,
and calls the result up to date. So what to do depends on the object's own bytes, which are read here.
"""

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.digests import digest
from pipeline.errors import DataError, PipelineError
from pipeline.lineage.declaration import read_lock
from pipeline.lineage.plan import faults_of_dvc


def remedies(root: Path, paths: Iterable[str | Path]) -> Iterator[str]:
    """A line for every path that is not as `root/dvc.lock` has it: what to run.

    Args:
        root: the repository.
        paths: files and folders, relative to it; those that no stage writes are left out.

    Outside of a DVC repository there is nothing to run, and no line.
    """
    if not (root / ".dvc").is_dir():
        return
    made = {path: (stage, md5) for stage, locked in read_lock(root / "dvc.lock").items() for path, md5 in locked.outs.items()}
    for path in map(str, paths):
        stage, md5 = made.get(path, ("", ""))
        if stage and _digest(root / path) != md5:
            yield f"{path}: not the bytes that dvc.lock has of stage {stage}; {_remedy(root, path, stage, md5)}"


def _remedy(root: Path, path: str, stage: str, md5: str) -> str:
    try:
        with faults_of_dvc(root):
            bad = list(_bad_objects(root, md5))
    except PipelineError as error:
        return f"DVC cannot bring them back: {error}"
    gone = shlex.join(["rm", "-rf", path, *(str(each.relative_to(root) if each.is_relative_to(root) else each) for each in bad)])
    if not bad:
        return f"`{gone} && dvc checkout {stage}` brings them back"
    return (
        f"DVC's cache has lost them, too: `{gone}`, then `dvc fetch {stage} && dvc checkout {stage}` where a remote has them, "
        f"or else `dvc repro {stage}`, which makes them anew"
    )


def _bad_objects(root: Path, md5: str) -> Iterator[Path]:
    """Files of the cache that hold, or should hold, a part of the recorded bytes, and are missing or have others."""
    from dvc.repo import Repo

    with Repo(root) as repo:
        place = repo.cache.local.oid_to_path
        whole = Path(place(md5))
        if _digest(whole) != md5.removesuffix(".dir"):
            yield whole
        elif md5.endswith(".dir"):
            parts = {entry["md5"]: Path(place(entry["md5"])) for entry in json.loads(whole.read_bytes())}
            yield from (part for wanted, part in parts.items() if _digest(part) != wanted)


def _digest(path: Path) -> str | None:
    try:
        return digest(path)
    except (DataError, OSError):  # gone, or unreadable
        return None
