"""What `python -m pipeline gc` says and does: everything that grows, bounded, without a byte that a rerun or a resume needs."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.cache import remove_unused, unused_in_cache, why_left_alone
from pipeline.lineage.cache_users import COPIES
from pipeline.tracking.discarded import discarded
from pipeline.tracking.leftovers import Leftover, Limits, leftovers
from pipeline.tracking.store import tracking_uri

UNITS = ("B", "kB", "MB", "GB", "TB")


def collect(root: Path, limits: Limits, *, remove: bool) -> Iterator[str]:
    """Lines of a table: what may go, how much of it, and why; then the total. With `remove` it goes.

    Raises:
        ParamsError: `root` is none: below it neither runs nor copies would be found, but DVC's cache would.
        PipelineError: DVC's cache is in use, or a commit cannot be read, and nothing is removed then; or a file cannot be
            removed, and what the lines before have named is gone.
    """
    if not (root / "dvc.yaml").exists():
        raise ParamsError(f"{root}: no dvc.yaml; give the command at the root of the repository")
    links: Counter[tuple[int, int]] = Counter()
    sizes = [(leftover, freed_by(leftover.paths, links)) for leftover in _all(root, limits)]
    yield _row("what", "number", "bytes", "why")
    for leftover, size in sizes:
        try:
            if remove and leftover.paths:
                leftover.remove()
        except OSError as error:
            raise PipelineError(
                f"{error.filename}: {error.strerror}; gc ended there, remove it yourself or make it removable"
            ) from None
        yield _row(leftover.what, str(len(leftover.paths)), shown(size), leftover.why)
    total = shown(sum(size for _, size in sizes))
    yield _row("total", "", total, "removed" if remove else "nothing removed yet: `python -m pipeline gc --yes` does it")


def _all(root: Path, limits: Limits) -> Iterator[Leftover]:
    found = leftovers(root, limits)
    gone = {path for leftover in found for path in leftover.paths}
    yield from found
    yield from discarded(root, tracking_uri(root))
    copies = _copies(root)
    shared = why_left_alone(root)
    yield Leftover(
        "DVC's cache",
        f"left alone: {shared}" if shared else "in no commit, branch, stash, reflog, experiment or workspace",
        [] if shared else unused_in_cache(root, [copy for copy in copies if copy.parent not in gone]),
        lambda: remove_unused(root, _copies(root)),  # those that are there then: one may have come, or come into use again
    )


def _copies(root: Path) -> list[Path]:
    """Workspaces of experiments, which share DVC's cache: ours, and those of `dvc exp run` with --temp or from the queue."""
    return [path.parent for folder in COPIES for depth in ("*", "*/*") for path in (root / folder).glob(f"{depth}/.dvc")]


def freed_by(paths: list[Path], links: Counter[tuple[int, int]]) -> int:
    """Bytes that removing these files and folders frees.

    Args:
        paths: of which some may be gone.
        links: of files with several links (DVC's cache and what it links to), how many were counted before: the last one frees.
    """
    size = 0
    for path in paths:
        for file in [path] if not path.is_dir() else [Path(folder, name) for folder, _, names in os.walk(path) for name in names]:
            with suppress(FileNotFoundError):
                about = file.lstat()
                if not stat.S_ISLNK(about.st_mode):
                    links[about.st_dev, about.st_ino] += 1
                    size += about.st_size if links[about.st_dev, about.st_ino] == about.st_nlink else 0
    return size


def shown(size: int) -> str:
    """A number of bytes for people: `12.3 MB`; exact below 1000."""
    value, unit = float(size), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{size} B"


def _row(what: str, number: str, size: str, why: str) -> str:
    return f"{what:<34} {number:>7} {size:>10}  {why}"
