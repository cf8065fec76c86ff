"""What a stage runs with is what DVC is going to record of it, or the stage refuses.

DVC reads a stage's parameters and inputs once more when its command has ended, but resolves the paths among its inputs when
`dvc` starts, long before the command of a late stage does. Whoever edits in between must not get new names for old results.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import PipelineError
from pipeline.lineage.declaration import Declaration, declaration, declared_names, value_at
from pipeline.params import parse_params
from pipeline.yaml_files import read_yaml

LOCK_READ_S = 5.0
"""How long a file that DVC writes in place may be half of one."""


@contextmanager
def undisturbed(stage: str, root: Path, used: Declaration | None) -> Iterator[None]:
    """Refuses to begin with other inputs than DVC's, and refuses what a stage made while parameters or inputs were edited.

    Args:
        stage: its name, such as `encode@dpo`; one that dvc.yaml does not have is nothing to DVC.
        root: the repository.
        used: what the script has read already; None for one that reads no parameters.

    Raises:
        PipelineError: `used`, or the paths that DVC resolved, are not what dvc.yaml and params.yaml say at the start of the
            block; or a value that dvc.yaml lists, or a file's time or size, is not at its end what it was then.
    """
    name, _, item = stage.partition("@")
    dvc_file, params_file = root / "dvc.yaml", root / "params.yaml"
    if not dvc_file.exists() or name not in read_yaml(dvc_file)["stages"]:
        yield
        return
    tree = read_yaml(params_file) if params_file.exists() else {}
    deps, keys = declared_names(name, item, tree, dvc_file)
    if used is not None and used != declaration(name, parse_params(tree), item, dvc_file=dvc_file):
        raise PipelineError("params.yaml or dvc.yaml: edited while the stage started; give the same command again")
    _agree_with_dvc(root, deps)

    def look(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _or_none(tree, key) for key in keys} | {dep: list(_stamps(root / dep)) for dep in deps}

    before = look(tree)
    yield
    after = look(read_yaml(params_file) if keys else {})
    if changed := [what for what in before if before[what] != after[what]]:
        raise PipelineError(
            f"{', '.join(changed)}: changed while the stage ran, and DVC would record the new with what the old made; "
            "put back the old, or give the same command for the new"
        )


def _agree_with_dvc(root: Path, deps: list[str]) -> None:
    """Compares the inputs that dvc.yaml and params.yaml name now with those that the `dvc` above resolved when it started.

    Raises:
        PipelineError: they differ: dvc.lock would name files that were not read.
    """
    resolved = _resolved_by_dvc(root)
    if resolved is None:
        return
    named = {os.path.relpath(root / dep, root) for dep in deps}  # also of those that are absolute
    new, gone = named - resolved, set[str]()
    if len(named) < len(deps):  # two keys are null: one of them may have named a file, and what stands for it is there
        gone = {path for path in resolved - named if path.startswith(f"external{os.sep}")}
    if new or gone:
        now, then = (", ".join(sorted(paths)) or "none of it" for paths in (new, gone or resolved - named - {"params.yaml"}))
        raise PipelineError(
            f"params.yaml or dvc.yaml was edited since `dvc` started: the stage would read {now}, and dvc.lock would say {then}; "
            "give the same command again (or, where that does not help and no `dvc` runs, remove .dvc/tmp/rwlock)"
        )


def _resolved_by_dvc(root: Path) -> set[str] | None:
    """What the `dvc` process above reads at this moment, relative to `root`; None where the stage was started without one.

    DVC keeps the files that its processes are at work on in `rwlock`: path -> process. Outputs count as read and as written.
    What a killed `dvc` left there may count, too, where this one has its number, as in a container.
    """
    above = {process.pid for process in psutil.Process().parents()}
    entries = _rwlock(root / ".dvc/tmp/rwlock")
    read = {path for path, readers in entries.get("read", {}).items() if above & {reader["pid"] for reader in readers}}
    inputs = read - {path for path, writer in entries.get("write", {}).items() if writer["pid"] in above}
    return {os.path.relpath(path, root) for path in inputs} if read else None


def _rwlock(path: Path) -> dict[str, Any]:
    """What it holds; DVC's processes write it in place, for each other too."""
    deadline = time.monotonic() + LOCK_READ_S
    while True:
        try:
            entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return entries
        except FileNotFoundError:
            return {}
        except json.JSONDecodeError:
            if time.monotonic() > deadline:
                raise PipelineError(f"{path}: not readable, and it says what `dvc` records; is the disk full?") from None
            time.sleep(0.02)


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    """Path, time and size of a file, or of all files below a folder that DVC looks at."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            with suppress(FileNotFoundError):
                status = file.stat()
                yield str(file), status.st_mtime_ns, status.st_size


def _or_none(tree: Mapping[str, Any], key: str) -> Any:
    try:
        return value_at(tree, key.split("."))
    except (KeyError, TypeError):
        return None
