"""Resumable states in a run folder: complete or invisible.

A save counts once its sidecar exists, which is written last. It names the recipe, the step, the state's checksum (torch's own
reader does not check one), and the size and checksum of the records that belong to it. A full disk or a kill therefore leaves
the save before it as the newest, and what somebody edited, mixed up or copied here from another run is not gone on with.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pipeline.supervise import is_held
from pipeline.terminal import say
from pipeline.tracking.recorder import checksum
from pipeline.tracking.run_folder import RunFolder, named, read_json, replace, write_json

if TYPE_CHECKING:
    from torch import Tensor

RECORDS = ("metrics", "samples")
NO_RECORDS = {f"{name}_{what}": 0 for name in RECORDS for what in ("bytes", "crc32")}


class _ChecksumWriter:
    """What `torch.save` needs of a file, with a running CRC-32 over the bytes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self.crc32 = 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        with named(self._path):  # here: torch turns the error into one of its own, which says nothing of the disk
            return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_save(
    folder: RunFolder,
    step: int,
    state: Mapping[str, Any],
    records: Mapping[str, int],
    *,
    keep: int,
    stays: bool = False,
    replays: bool = False,
) -> bool:
    """Writes the state of `step` and removes older saves as `prune` does.

    A state with a NaN or an infinity is not written: nothing good comes of it, and it would push out the last good one.

    Args:
        folder: the run.
        step: optimizer steps done.
        state: tensors, plain values, and dicts, lists and tuples of them.
        records: bytes and checksums of the records up to this step, as `Recorder.sync` gives them.
        keep: saves to keep, at least 1.
        stays: whether it is kept beyond them, for good.
        replays: whether it is so until another run of the stage has finished: steps are replayed from it.

    Returns:
        Whether the state was written.

    Raises:
        TypeError: the state holds something else, which could be written but not safely loaded again.
    """
    import torch  # heavy, and stages without saves never need it

    path = folder.state(step)
    if broken := [place for place, tensor in _tensors(state, "state") if not _is_finite(tensor)]:
        say(f"{path}: not saved, {broken[0]} is not finite; saves before it stay")
        return False
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named(temporary), temporary.open("wb") as file:
            writer = _ChecksumWriter(file, temporary)
            torch.save(dict(state), cast(IO[bytes], writer))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder.commit(step).unlink(missing_ok=True)
    replace(temporary, path)
    about = {
        "step": step,
        "recipe": folder.recipe,
        "crc32": writer.crc32,
        **NO_RECORDS,
        **records,
        "stays": stays,
        "replays": replays,
    }
    write_json(folder.commit(step), about)
    prune(folder, keep)
    return True


def prune(folder: RunFolder, keep: int, *, replays: bool = True) -> None:
    """Removes all saves but the newest `keep`, those that were written to stay and, with `replays`, those for replays."""
    for step in folder.commits()[keep:]:
        if not stays(folder, step, replays=replays):
            # the sidecar first: without it there is no save
            folder.commit(step).unlink(missing_ok=True)
            folder.state(step).unlink(missing_ok=True)


def stays(folder: RunFolder, step: int, *, replays: bool = True) -> bool:
    """Whether a save was written to stay when the run has finished or, with `replays`, for replays."""
    about = read_json(folder.commit(step))
    return about.get("stays") is True or (replays and about.get("replays") is True)


def prune_finished(stage_folder: Path, finished: RunFolder) -> None:
    """Leaves those saves of a stage's finished runs that stay; of the run that has just `finished` also the last one, and those
    for replays, which would fill the disk if every run kept them.

    DVC takes over what a run made after its process has ended; until then the last save can make it again. A workspace runs a
    stage anew when DVC has done so. Runs that ended while this one was at work are those of other workspaces, whose DVC may be
    about to; the next run that begins takes care of them.
    """
    begun_s = read_json(finished.about).get("attempt_s", 0.0)  # damaged: of the other runs none is older
    for folder in [RunFolder(path.parent) for path in stage_folder.glob("*/*/exit.json")]:
        end = read_json(folder.exit)
        if folder == finished:
            prune(folder, 1)
        elif end.get("code") == 0 and end["time_s"] < begun_s and not is_held(folder.lock):
            prune(folder, 0, replays=False)
    for leftover in finished.path.glob("state-*.damaged"):
        if leftover.is_file():
            leftover.unlink()


def _tensors(value: Any, place: str) -> "Iterator[tuple[str, Tensor]]":
    """The tensors in `value` with where they stand; raises a `TypeError` for what could not be loaded again."""
    import torch

    if isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{place}[{index}]")
    elif isinstance(value, torch.Tensor):
        yield place, value
    elif type(value) not in (int, float, bool, str, bytes, type(None)):
        raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__name__}; states hold tensors and plain values")


def _is_finite(tensor: "Tensor") -> bool:
    """Without a copy: there may be no room for one."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(float(end)) for end in tensor.aminmax())


def resumption(folder: RunFolder) -> str:
    """What becomes of the work of a run that has ended before its end, in words that are true with and without a save."""
    saves = folder.commits()
    return f"the same command goes on after step {saves[0]}" if saves else "the same command begins anew: nothing was saved yet"


def newest_save(folder: RunFolder) -> dict[str, Any] | None:
    """The sidecar of the newest save that can be gone on with; newer ones are set aside with a warning each on stderr."""
    for leftover in folder.path.glob("state-*.tmp"):  # the feeder renames temporary files of its own at any time
        leftover.unlink(missing_ok=True)
    steps = folder.commits()
    for step, before in zip_longest(steps, steps[1:]):
        fault = fault_of(folder, step)
        if fault is None:
            return read_json(folder.commit(step))
        instead = "there is none before it" if before is None else f"going back to {folder.state(before).name}"
        say(f"{folder.state(step)}: skipped, {fault}; {instead}")
        for path in (folder.commit(step), folder.state(step)):
            if path.exists():
                path.rename(path.with_name(path.name + ".damaged"))
    return None


def fault_of(folder: RunFolder, step: int) -> str | None:
    """Why the save of `step` cannot be gone on with, or None."""
    names = ("step", "crc32", *NO_RECORDS)
    try:
        commit = json.loads(folder.commit(step).read_text(encoding="utf-8"))
        numbers = [commit.get(name) for name in names] if isinstance(commit, dict) else [None]
        if any(type(number) is not int or number < 0 for number in numbers):
            return f"{folder.commit(step).name} does not describe a save"
        if commit.get("recipe") != folder.recipe or commit["step"] != step:
            return "it belongs to another run or step"
        if checksum(folder.state(step)) != commit["crc32"]:
            return "its checksum is another one"
        for name, path in (("metrics", folder.metrics), ("samples", folder.samples)):
            if checksum(path, commit[f"{name}_bytes"]) != commit[f"{name}_crc32"]:
                return f"the records up to it are damaged ({path.name})"
    except (OSError, ValueError, RecursionError) as error:
        return f"it cannot be read ({error})"
    return None if _is_loadable(folder.state(step)) else "it is not a state"


def _is_loadable(path: Path) -> bool:
    """Whether the file holds tensors and plain values alone; they stay on the disk."""
    import torch

    from pipeline.checkpoint.files import UNREADABLE

    try:
        return isinstance(torch.load(path, map_location="cpu", weights_only=True, mmap=True), dict)
    except UNREADABLE:
        return False


def read_save(folder: RunFolder, step: int) -> dict[str, Any]:
    """The state that `write_save` was given, on the CPU; nothing but tensors and plain values is unpickled."""
    import torch

    return dict(torch.load(folder.state(step), map_location="cpu", weights_only=True))


def committed_sizes(folder: RunFolder) -> dict[str, int]:
    """Sizes of metrics.jsonl and samples.jsonl at the newest save: what no resume can take back.

    To be called from any process: a save that the trainer removes meanwhile, or a damaged one, counts as none.
    """
    sizes = {"metrics_bytes": 0, "samples_bytes": 0}
    for step in folder.commits():
        commit = read_json(folder.commit(step))
        if sizes.keys() <= commit.keys():
            return {name: commit[name] for name in sizes}
    return sizes
