"""Which rows of a source changed: a checksum per line, kept from the time when a stage read it.

Sources are the user's files, which no cache has; these checksums are all that is left of an older version. 4 bytes per line.
"""

import os
import zlib
from array import array
from pathlib import Path

from pipeline.digests import digest
from pipeline.tracking.home import home

KEPT = 3


def remember_rows(source: Path) -> None:
    """Keeps a checksum per line of a file that a stage has read here, and those of a few versions before it."""
    name = digest(source)
    kept = _folder(source, home(Path.cwd())) / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_name(f".{name}.{os.getpid()}")
    temporary.write_bytes(_checksums(source).tobytes())
    temporary.replace(kept)
    versions = sorted(kept.parent.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in versions[KEPT:]:
        old.unlink(missing_ok=True)


def changed_rows(source: Path, runs_home: Path, before: str) -> str | None:
    """What changed in a source since its version of digest `before`: `row 17`, `rows 17-20`, `3 rows added behind row 200`.

    Rows are counted from 1. What lies between the first and the last difference counts as changed. None where that version's
    checksums are not there, or the source is no file.
    """
    kept = _folder(source, runs_home) / before
    if not kept.is_file() or not source.is_file():
        return None
    old, new = array("I"), _checksums(source)
    old.frombytes(kept.read_bytes())
    if old == new:
        return None
    shorter = min(len(old), len(new))
    start = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    end = next((at for at in range(shorter - start) if old[-1 - at] != new[-1 - at]), shorter - start)
    gone, come = len(old) - end - start, len(new) - end - start
    if not gone:
        return f"{_number(come)} added behind row {start}"
    changed = f"row {start + 1}" if gone == 1 else f"rows {start + 1}-{start + gone}"
    if not come:
        return f"{changed} removed"
    return f"{changed} changed" if gone == come else f"{changed} became {_number(come)}"


def _number(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def _folder(source: Path, runs_home: Path) -> Path:
    """Of a source's versions; the name of a file is enough, because digests tell versions apart."""
    return runs_home / ".runs" / "rows" / source.name


def _checksums(source: Path) -> "array[int]":
    with source.open("rb") as file:
        return array("I", (zlib.crc32(line) for line in file))
