"""The code that runs is the code that DVC records: what this process has imported, against `data/code/<stage>.json`.

That file is written once, by the first stage of a `dvc repro`; the command of a late stage starts hours later, and imports what
lies on disk by then. So a stage imports all the code that its hash is of, compares, and runs what it has in memory: edits from
then on are nothing to it.
"""

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.lineage.code_hash import ROOTS, CodeBase, code_text

HERE = Path(__file__).parents[2]
SHOWN = 3


def _stamps() -> dict[Path, tuple[int, int, int]]:
    """What tells an edit of a file of this code base: inode, size, and the time of its last change, which nobody can set."""
    found = {}
    for path in (path for top in ROOTS for path in (HERE / top).rglob("*") if "__pycache__" not in path.parts):
        with suppress(FileNotFoundError):  # an editor's own, gone again
            status = path.stat()
            found[path] = status.st_ino, status.st_size, status.st_ctime_ns
    return found


def _forget_stale_bytecode() -> None:
    """Removes bytecode older than its source: Python takes it for new where second and size of an edited file are the same."""
    for path, (_, _, changed_ns) in AT_START.items():
        if path.suffix == ".py":
            compiled = Path(cache_from_source(os.fspath(path)))
            with suppress(FileNotFoundError, PermissionError):  # there is none, or this is no place for edits
                if compiled.stat().st_mtime_ns <= changed_ns:
                    compiled.unlink()


AT_START = _stamps()
"""Of all files of this code base; `stages/__init__` imports this module before anything that decides a result."""
_forget_stale_bytecode()


def check_code(stage: str, root: Path) -> None:
    """Imports what the stage's code hash is of, and compares with the file that DVC records.

    Args:
        stage: its name, such as `encode@dpo`. A process that does not run its script is left alone.
        root: the repository.

    Raises:
        PipelineError: the code was edited since the file was written, or while this process started.
    """
    script = stage.partition("@")[0]
    entry, recorded = f"stages.{script}", root / f"data/code/{script}.json"
    running = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    if running != entry or not recorded.exists():
        return
    code = CodeBase(HERE)
    modules = code.closure(entry)
    for name in sorted(modules - {entry}):
        import_module(name)
    text, now = code_text(code, script), _stamps()
    names = json.loads(text)
    files = [code.paths[name] if name in code.paths else HERE / name for name in names]
    if any(now.get(path) != AT_START.get(path) for path in files):
        raise PipelineError(f"its code was edited while it started; give the same command again, or `dvc repro {stage}`")
    if text != (was := recorded.read_text(encoding="utf-8")):
        before = json.loads(was)
        differ = [name for name in {**names, **before} if names.get(name) != before.get(name)]
        more = [f"{len(differ) - SHOWN} more"] if len(differ) > SHOWN else []
        raise PipelineError(
            f"{', '.join([*differ[:SHOWN], *more])}: not the code that DVC would record, {recorded.relative_to(root)}; "
            f"`dvc repro {stage}` records the code as it is now and runs it"
        )
