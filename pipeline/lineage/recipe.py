"""Whether a workspace is still what a run was made with: its code and the bytes of its inputs."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.digests import digests
from pipeline.errors import DataError
from pipeline.lineage.causes import code_causes, dep_causes
from pipeline.lineage.code_hash import CodeBase, code_text
from pipeline.lineage.declaration import declaration
from pipeline.lineage.runs import inputs_of, recorded
from pipeline.params import Params

SHOWN_CAUSES = 3


def check_recipe(root: Path, home: Path, stage: str, about: Mapping[str, Any], params: Params) -> None:
    """Nothing where code and inputs are those of a run. Code is read as it lies here, whatever `data/code` has.

    Args:
        root: the repository.
        home: where its `.runs` are.
        stage: of the run.
        about: its run.json.
        params: with which it ran; they may name inputs.

    Raises:
        DataError: in one line, what differs, and how to get it back.
    """
    code = f"data/code/{stage}.json"
    read, now = inputs_of(about), code_text(CodeBase(root), stage)
    old_code = read.pop(code, None)
    causes = list(_input_causes(root, home, read, declaration(stage, params, dvc_file=root / "dvc.yaml").deps))
    edited = old_code is not None and hashlib.md5(now.encode(), usedforsecurity=False).hexdigest() != old_code
    if old_code is not None and edited:
        causes += code_causes(root, old_code, json.loads(now))
    if causes:
        more = [f"{len(causes) - SHOWN_CAUSES} more"] if len(causes) > SHOWN_CAUSES else []
        differs = "; ".join([*causes[:SHOWN_CAUSES], *more])
        raise DataError(f"{stage}: differs from what the run was made with: {differs}; {_way_back(root, stage, about, edited)}")


def _input_causes(root: Path, home: Path, read: Mapping[str, str], deps: list[str]) -> Iterator[str]:
    gone = [path for path in deps if not (root / path).exists()]
    yield from (f"{path} is not there" for path in gone)
    known = {path: digest for path, digest in read.items() if path not in gone}
    yield from dep_causes(root, home, known, digests(root, [path for path in deps if path not in gone]))


def _way_back(root: Path, stage: str, about: Mapping[str, Any], edited: bool) -> str:
    """The commands that bring code and inputs back: from the commit that records the run, else from the one it ran at."""
    lock, tags = recorded(root, stage, about), about.get("tags", {})
    if lock is not None and lock.commit is None and not edited:
        return "`dvc checkout` brings it back"
    commit = lock.commit if lock is not None and lock.commit else tags.get("git.commit")
    if commit is None:
        return "no commit of it is known"
    lost = tags.get("git.dirty") == "true" and (lock is None or lock.commit is None)
    rest = ", but not the edits that were never committed" if lost else ""
    return f"`git checkout {commit[:12]} && dvc checkout` brings it back{rest}"
