"""What below `.runs` is of no more use: to no rerun, no resume and no reader of the records.

Whole folders are moved into `.runs/.gc` under their locks, which takes no time, and removed from there. A trainer that chose such
a folder just before finds it gone and makes a new one (`supervise.hold`).
"""

import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import HeldError
from pipeline.lineage.declaration import Locked, read_lock
from pipeline.supervise import hold, is_held
from pipeline.tracking.records import last_changed
from pipeline.tracking.run_folder import RunFolder, read_json, run_key, write_json
from pipeline.tracking.saves import stays
from pipeline.tracking.shapes import read_samples

DAY_S = 86400.0
KEEP_DAYS = 14.0
"""How long unfinished runs and caches stay after their last use when nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What stays.

    Attributes:
        runs: finished runs of each stage that keep their samples, rollouts, logs, and the saves that were written to stay.
        age_s: what somebody may come back to stays this long after its last use: unfinished runs, the last save of one whose
            results DVC does not have, experiments' copies, caches, output logs.
        keep_records: whether finished runs beyond `runs` keep metrics.jsonl, run.json and exit.json. Those that made what a
            dvc.lock names keep them in any case.
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
    unfinished = list(abandoned(folders, limits.age_s))
    copies = [path.parent for path in runs.glob("experiments/*/lock") if _is_old(path.parent, limits.age_s)]
    locks = [read_lock(path) for path in (root / "dvc.lock", *runs.glob("experiments/*/workspace/dvc.lock"))]
    days = f"unused for {limits.age_s / DAY_S:g} days"
    beyond = f"beyond the newest {limits.runs} of each stage"
    found = [
        _saves(finished, surplus, locks, limits),
        _files("caches of eval and dpo", f"{days}; made again where needed", _caches(runs, limits.age_s)),
        _files("output logs", days, [path for path in runs.glob("*/output.log") if _is_old(path, limits.age_s)]),
        _folders(runs, "abandoned runs", f"unfinished, {days}, not the newest of its stage", unfinished, _is_abandoned(limits)),
        _folders(runs, "experiments' copies", f"{days}, no process holds them", copies, lambda path: _is_old(path, limits.age_s)),
    ]
    elsewhere, kept = _proven(root, surplus)
    if limits.keep_records:
        found.append(_bulk(elsewhere, f"{beyond}; MLflow has them{kept}"))
        paths = [folder.rollouts for folder in surplus if folder.rollouts.is_dir()]
        found.append(_files("rollouts of finished runs", f"{beyond}; their steps cannot be replayed then", paths))
    else:
        whole = [folder.path for folder in elsewhere if not _is_recorded(folder, locks)]
        why = f"{beyond}, and not what dvc.lock names{kept}"
        found.append(_folders(runs, "finished runs", why, whole, lambda path: _is_finished(RunFolder(path))))
    trash = list((runs / ".gc").glob("*"))
    return [*found, Leftover("removed before", "an earlier gc was interrupted", trash, lambda: remove_paths(trash))]


def _is_finished(folder: RunFolder) -> bool:
    return bool(read_json(folder.exit).get("code") == 0)


def _last_use(path: Path) -> float:
    """Of a file, or of a folder's own files: Unix time."""
    files = [entry for entry in path.iterdir() if not entry.is_dir()] if path.is_dir() else [path]
    return max(map(last_changed, files), default=last_changed(path))


def _is_old(path: Path, age_s: float) -> bool:
    return _last_use(path) < time.time() - age_s


def _surplus(finished: Iterable[RunFolder], keep: int) -> Iterator[RunFolder]:
    by_stage: dict[str, list[RunFolder]] = {}
    for folder in sorted(finished, key=lambda folder: last_changed(folder.about), reverse=True):
        by_stage.setdefault(folder.stage, []).append(folder)
    for stage in by_stage.values():
        yield from stage[keep:]


def abandoned(folders: Iterable[RunFolder], age_s: float) -> Iterator[Path]:
    """Unfinished runs that nothing has touched for `age_s` seconds; the newest of a stage is none."""
    newest: dict[str, RunFolder] = {}
    for folder in sorted(folders, key=lambda folder: last_changed(folder.about)):
        newest[folder.stage] = folder
    for folder in folders:
        if folder != newest[folder.stage] and not _is_finished(folder) and _is_old(folder.path, age_s):
            yield folder.path


def _is_abandoned(limits: Limits) -> Callable[[Path], bool]:
    return lambda path: not _is_finished(RunFolder(path)) and _is_old(path, limits.age_s)


def _saves(
    finished: Iterable[RunFolder], surplus: Sequence[RunFolder], locks: Sequence[Mapping[str, Locked]], limits: Limits
) -> Leftover:
    """All that neither stay nor are the last one of a run whose results DVC does not have (yet) and may fail to take."""
    found: dict[RunFolder, list[Path]] = {}
    for folder in finished:
        steps = folder.commits()
        kept = [] if folder in surplus else [step for step in steps if stays(folder, step)]
        if steps and not _is_old(folder.commit(steps[0]), limits.age_s) and not _is_recorded(folder, locks):
            kept.append(steps[0])
        names = {path.name for step in kept for path in (folder.state(step), folder.commit(step))}
        found[folder] = [path for path in folder.path.glob("state-*") if path.name not in names]

    def remove() -> None:
        for folder, paths in found.items():
            with suppress(HeldError), hold(folder.lock, wait=False):
                if _is_finished(folder):  # else it has been taken up again
                    remove_paths(paths)

    paths = [path for of_run in found.values() for path in of_run]
    why = f"nothing resumes from them; those that stay only beyond the newest {limits.runs} of each stage"
    return Leftover("saves of finished runs", why, paths, remove)


def _is_recorded(folder: RunFolder, locks: Sequence[Mapping[str, Locked]]) -> bool:
    """Whether one of these dvc.lock has the results of the run's recipe."""
    params = read_json(folder.about).get("params")
    code_file = f"data/code/{folder.stage}.json"
    for made in filter(None, (locked.get(folder.stage) for locked in locks)):
        inputs = {path: digest for path, digest in made.digests.items() if path != code_file}
        if made.params == params and run_key(folder.stage, params, inputs, made.digests.get(code_file)) == folder.recipe:
            return True
    return False


def _proven(root: Path, surplus: Sequence[RunFolder]) -> tuple[list[RunFolder], str]:
    """The runs whose metrics and samples an MLflow store has at this moment; and a word on those of which it is not proven."""
    if not surplus:
        return [], ""
    from pipeline.tracking.proof import Stores  # imports MLflow

    stores = Stores(root)
    faults = {folder: stores.fault(folder, content=True) for folder in surplus}
    kept = [f"{folder.path.relative_to(root)}: {fault}" for folder, fault in faults.items() if fault]
    more = f", and {len(kept) - 1} more" if len(kept) > 1 else ""
    return [folder for folder, fault in faults.items() if fault is None], f"; kept, not proven: {kept[0]}{more}" if kept else ""


def _bulk(elsewhere: Iterable[RunFolder], why: str) -> Leftover:
    """Samples and load of runs that an MLflow store has wholly, and feeders' logs."""
    found = {
        folder: [path for path in (folder.samples, folder.system, folder.feeder_log) if path.exists()] for folder in elsewhere
    }

    def remove() -> None:
        for folder, paths in found.items():
            with suppress(HeldError), ExitStack() as stack:
                for lock in _locks(folder.path):
                    stack.enter_context(hold(lock, wait=False))
                steps = [row["step"] for row in read_samples(folder.samples)]
                if steps:
                    store = read_json(folder.feeder_note).get("tracking_uri", "")
                    write_json(folder.gone, {"step": steps[-1], "tracking_uri": store})
                remove_paths(paths)

    return Leftover("samples and logs of finished runs", why, [path for of_run in found.values() for path in of_run], remove)


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
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
