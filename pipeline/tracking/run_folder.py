"""The scratch folder of one run, `.runs/<stage>/<key>/<n>/`, and the key that decides which run may resume from it.

Processes talk through these files alone:

| file | written by | holds |
| --- | --- | --- |
| run.json | trainer, at each start | who this run is: name, params, tags, attempt |
| metrics.jsonl, samples.jsonl | trainer, appended | the truth about what happened |
| rollouts/STEP.npz | trainer, at each step of a stage that samples | every trajectory of the step, by its key |
| state-STEP.pt, state-STEP.json | trainer, at each save | resumable state; its checksum, and those of the files above |
| progress.json | trainer, when its steps begin | how many there are, and when it began with them |
| guard.json | trainer | by check, the latest finding of `runtime.guard` |
| exit.json | trainer, at its end | exit code, reason, time, digests of what it made; absent while it runs and after SIGKILL |
| lock | trainer | held while it lives |
| system.jsonl | feeder, appended | load of the machine: CPU, memory, disk, GPUs |
| checkpoint.json | feeder | path and digest of what the run made, as DVC recorded it |
| gone.json | `pipeline gc` | up to which step it has removed samples, and the store that had them |
| feeder.json, feeder.lock, feeder.log | feeder, replay | the MLflow run, and whether it has everything |
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.terminal import say
from pipeline.tracking.shapes import fault_of_object, loads

_OURS = re.compile(
    r"(run|progress|exit|guard|feeder|checkpoint|gone)\.json(\.tmp)?|(metrics|samples|system)\.jsonl|state-.*\.tmp"
    r"|(feeder\.)?lock|feeder\.log"
)
_NUMBER = re.compile(r"[1-9][0-9]*")
_STATE = re.compile(r"state-(\d{8})\.json")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run's files."""

    path: Path

    @property
    def recipe(self) -> str:
        """The run key: what a save must have been made with."""
        return self.path.parent.name

    @property
    def root(self) -> Path:
        """The repository; for the run of an experiment too, whose `.runs` is that of the workspace."""
        return self.path.parents[3]

    @property
    def stage(self) -> str:
        return self.path.parents[1].name

    @property
    def about(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def system(self) -> Path:
        return self.path / "system.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.json"

    @property
    def guard(self) -> Path:
        return self.path / "guard.json"

    @property
    def gone(self) -> Path:
        return self.path / "gone.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def feeder_lock(self) -> Path:
        return self.path / "feeder.lock"

    @property
    def feeder_log(self) -> Path:
        return self.path / "feeder.log"

    @property
    def feeder_note(self) -> Path:
        return self.path / "feeder.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollout(self, step: int) -> Path:
        return self.rollouts / f"{step:08d}.npz"

    def state(self, step: int) -> Path:
        return self.path / f"state-{step:08d}.pt"

    def commit(self, step: int) -> Path:
        return self.path / f"state-{step:08d}.json"

    def commits(self) -> list[int]:
        """Steps of the saves, newest first."""
        found = (_STATE.fullmatch(path.name) for path in self.path.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)


def open_run_folder(runs: Path, stage: str, key: str, *, recorded: bool = True) -> RunFolder:
    """The newest unfinished folder of this recipe, or a new one.

    Args:
        runs: the folder of all runs.
        stage: the stage's name.
        key: see `run_key`.
        recorded: whether DVC knows the results of this recipe; where it does not, a finished run with a save is gone on with.

    Raises:
        PipelineError: a file lies where a folder must be, a folder where a file must be, or permission is missing.
    """
    recipe = runs / stage / key
    try:
        recipe.mkdir(parents=True, exist_ok=True)
        taken = {int(path.name): path for path in recipe.iterdir() if _NUMBER.fullmatch(path.name)}
        newest = max((number for number, path in taken.items() if path.is_dir()), default=0)
        if newest:
            folder = RunFolder(taken[newest])
            if read_json(folder.exit).get("code") != 0 or (not recorded and folder.commits()):
                _check_files(folder)
                return folder
        folder = RunFolder(recipe / str(max(taken, default=0) + 1))
        folder.path.mkdir()
        for parent in (recipe, recipe.parent, runs):  # else a power cut could take the folder with all its synced files
            _sync_folder(parent)
        return folder
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise PipelineError(
            f"{error.filename}: {error.strerror}, but runs are kept in folders there; make way for them"
        ) from None


def _check_files(folder: RunFolder) -> None:
    for path in folder.path.iterdir():
        if _OURS.fullmatch(path.name) and path.is_dir():
            raise PipelineError(f"{path}: is a folder where the run keeps a file; remove or rename it")


def run_key(stage: str, params: Mapping[str, Any], digests: Mapping[str, str], code: str | None) -> str:
    """16 hex digits that identify a recipe: stage, params, input digests, code. Nothing of the machine or of `runtime`."""
    recipe = {"stage": stage, "params": params, "inputs": digests, "code": code}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def cut_record(folder: RunFolder) -> str | None:
    """What is missing of the metrics of a run that has finished; None where they are whole, or nobody noted how long they are."""
    noted = read_json(folder.exit, warn=False).get("metrics_bytes", 0)
    there = folder.metrics.stat().st_size if folder.metrics.exists() else 0
    return f"{folder.metrics}: ends before the run did, {there} of {noted} bytes are left" if there < noted else None


def read_json(path: Path, *, warn: bool = True) -> dict[str, Any]:
    """A file's JSON object, or an empty one when there is no file, or (with a warning on stderr) none that can be read.

    One that is not as `pipeline.tracking.shapes` has it for a file of this name cannot be read, either.
    """
    try:
        value = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        if not isinstance(value, dict):
            reason = f"holds a {type(value).__name__}, not an object"
        elif (fault := fault_of_object(path.name, value)) is not None:
            reason = fault
        else:
            return value
    if warn:
        say(f"{path}: unreadable, counts as absent ({reason})")
    return {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file atomically; a reader sees the old content or the new, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named(temporary), temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, allow_nan=False, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    replace(temporary, path)


def replace(temporary: Path, path: Path) -> None:
    """Renames over `path` and makes the rename itself durable."""
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Puts the file's name into an `OSError` that has none: writing to an open file does not say to which."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
