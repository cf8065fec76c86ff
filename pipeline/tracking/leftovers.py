"""What below `.runs` is of no more use: to no rerun, no resume and no reader of the records.

Whole folders are moved into `.runs/.gc` under their locks, which takes no time, and removed from there. A trainer that chose such
a folder just before finds it gone and makes a new one (`supervise.hold`).
"""

import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import HeldError
from pipeline.supervise import hold, is_held
from pipeline.tracking.run_folder import RunFolder, read_json

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What stays.

    Attributes:
        runs: finished runs of each stage that keep their samples and logs.
        age_s: unfinished runs, experiments' copies, caches and output logs stay this long after their last use.
        keep_records: whether finished runs beyond `runs` keep metrics.jsonl, run.json and exit.json.
    """

    runs: int
    age_s: float
    keep_records: bool


@dataclass(frozen=True, slots=True)
class Leftover:
    """One kind of thing that may go.

    Attributes:
        what: a name for it.
        why: the rule that lets it go.
        paths: files, and folders with all that is in them.
        remove: removes them; leaves what has come into use since.
    """

    what: str
    why: str
    paths: list[Path]
    remove: Callable[[], None]


def leftovers(root: Path, limits: Limits) -> list[Leftover]:
    """All kinds below `.runs`, those without any path included."""
    runs = root / ".runs"
    folders = [RunFolder(path.parent) for path in runs.glob("*/*/*/run.json")]
    finished = [folder for folder in folders if _is_finished(folder)]
    surplus = list(_surplus(finished, limits.runs))
    abandoned = list(_abandoned(folders, limits.age_s))
    copies = [path.parent for path in runs.glob("experiments/*/lock") if _is_old(path.parent, limits.age_s)]
    days = f"unused for {limits.age_s / DAY_S:g} days"
    beyond = f"beyond the newest {limits.runs} of each stage"
    found = [
        _files("saves of finished runs", "nothing resumes from them", _saves(finished)),
        _files("caches of eval and dpo", f"{days}; made again where needed", _caches(runs, limits.age_s)),
        _files("output logs", days, [path for path in runs.glob("*/output.log") if _is_old(path, limits.age_s)]),
        _folders(runs, "abandoned runs", f"unfinished, {days}, not the newest of its stage", abandoned, _is_abandoned(limits)),
        _folders(runs, "experiments' copies", f"{days}, no process holds them", copies, lambda path: _is_old(path, limits.age_s)),
    ]
    if limits.keep_records:
        found.append(_files("samples and logs of finished runs", f"{beyond}; MLflow has them", _bulk(surplus)))
    else:
        whole = [folder.path for folder in surplus]
        found.append(_folders(runs, "finished runs", beyond, whole, lambda path: _is_finished(RunFolder(path))))
    trash = list((runs / ".gc").glob("*"))
    return [*found, Leftover("removed before", "an earlier gc was interrupted", trash, lambda: remove_paths(trash))]


def _is_finished(folder: RunFolder) -> bool:
    return bool(read_json(folder.exit).get("code") == 0)


def _last_use(path: Path) -> float:
    """Of a file, or of a folder's own files: Unix time."""
    files = [path] if path.is_file() else [entry for entry in path.iterdir() if entry.is_file()]
    return max((file.stat().st_mtime for file in files), default=path.stat().st_mtime)


def _is_old(path: Path, age_s: float) -> bool:
    return _last_use(path) < time.time() - age_s


def _surplus(finished: Iterable[RunFolder], keep: int) -> Iterator[RunFolder]:
    by_stage: dict[str, list[RunFolder]] = {}
    for folder in sorted(finished, key=lambda folder: folder.about.stat().st_mtime, reverse=True):
        by_stage.setdefault(folder.stage, []).append(folder)
    for stage in by_stage.values():
        yield from stage[keep:]


def _abandoned(folders: Iterable[RunFolder], age_s: float) -> Iterator[Path]:
    newest: dict[str, RunFolder] = {}
    for folder in sorted(folders, key=lambda folder: folder.about.stat().st_mtime):
        newest[folder.stage] = folder
    for folder in folders:
        if folder != newest[folder.stage] and not _is_finished(folder) and _is_old(folder.path, age_s):
            yield folder.path


def _is_abandoned(limits: Limits) -> Callable[[Path], bool]:
    return lambda path: not _is_finished(RunFolder(path)) and _is_old(path, limits.age_s)


def _saves(finished: Iterable[RunFolder]) -> list[Path]:
    return [path for folder in finished for path in folder.path.glob("state-*")]


def _bulk(surplus: Iterable[RunFolder]) -> list[Path]:
    """Samples and load of runs that an MLflow store has wholly, and feeders' logs."""
    found = []
    for folder in surplus:
        noted, about = read_json(folder.feeder_note), read_json(folder.about)
        if noted.get("complete") == about["attempt"]:
            found += [path for path in (folder.samples, folder.system, folder.feeder_log) if path.exists()]
    return found


def _caches(runs: Path, age_s: float) -> list[Path]:
    files = [*runs.glob("eval/cache/*"), *runs.glob("dpo/reference/*")]
    return [path for path in files if path.is_file() and _is_old(path, age_s)]


def _files(what: str, why: str, paths: list[Path]) -> Leftover:
    return Leftover(what, why, paths, lambda: remove_paths(paths))


def _folders(runs: Path, what: str, why: str, paths: list[Path], still: Callable[[Path], bool]) -> Leftover:
    def remove() -> None:
        for path in paths:
            _retire(runs, path, still)

    return Leftover(what, why, [path for path in paths if not any(map(is_held, _locks(path)))], remove)


def _locks(path: Path) -> list[Path]:
    return [path / name for name in ("lock", "feeder.lock") if (path / name).exists()]


def _retire(runs: Path, path: Path, still: Callable[[Path], bool]) -> None:
    """Moves a folder away and removes it, unless it is no longer what it was or a process holds it."""
    retired = runs / ".gc" / uuid.uuid4().hex
    retired.parent.mkdir(exist_ok=True)
    try:
        if not still(path):
            return
        with ExitStack() as stack:
            for lock in _locks(path):
                stack.enter_context(hold(lock, wait=False))
            path.rename(retired)
    except (HeldError, FileNotFoundError):
        return
    remove_paths([retired])


def remove_paths(paths: Iterable[Path]) -> None:
    """Removes files, and folders with all that is in them; what is gone already is no fault."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
