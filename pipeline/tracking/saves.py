"""Resumable states in a run folder: complete or invisible.

A save counts once its sidecar exists, which is written last and names the state's checksum (torch's own reader does not
check one) and the sizes of the records, which must be there and readable. A full disk or a kill therefore leaves the save
before it as the newest.
"""

import json
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from pipeline.tracking.run_folder import RunFolder, read_json, replace, write_json


class _ChecksumWriter:
    """What `torch.save` needs of a file, with a running CRC-32 over the bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_save(folder: RunFolder, step: int, state: Mapping[str, Any], sizes: Mapping[str, int], keep: int) -> None:
    """Writes the state of `step` and removes all but the newest `keep` saves.

    Args:
        folder: the run.
        step: optimizer steps done.
        state: tensors, plain values, and dicts, lists and tuples of them.
        sizes: `metrics_bytes` and `samples_bytes` that belong to this step.
        keep: saves to keep, at least 1.

    Raises:
        TypeError: the state holds something else, which could be written but not safely loaded again.
    """
    import torch  # heavy, and stages without saves never need it

    _check_loadable(state, "state")
    path = folder.state(step)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            writer = _ChecksumWriter(file)
            torch.save(dict(state), cast(IO[bytes], writer))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder.commit(step).unlink(missing_ok=True)
    replace(temporary, path)
    write_json(folder.commit(step), {"step": step, "crc32": writer.crc32, **sizes})
    for old in folder.commits()[keep:]:
        discard(folder, old)


def _check_loadable(value: Any, place: str) -> None:
    import torch

    if isinstance(value, dict):
        for key, item in value.items():
            _check_loadable(item, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_loadable(item, f"{place}[{index}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in (int, float, bool, str, bytes, type(None)):
        raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__name__}; states hold tensors and plain values")


def newest_save(folder: RunFolder) -> dict[str, Any] | None:
    """The sidecar of the newest intact save; newer ones that are torn, or whose records are, go with a warning on stderr."""
    for leftover in folder.path.glob("state-*.tmp"):  # the feeder renames temporary files of its own at any time
        leftover.unlink(missing_ok=True)
    for step in folder.commits():
        try:
            commit = read_json(folder.commit(step))
            intact = (
                _crc32(folder.state(step)) == commit["crc32"]
                and _holds_lines(folder.metrics, commit["metrics_bytes"])
                and _holds_lines(folder.samples, commit["samples_bytes"])
            )
        except (OSError, ValueError, KeyError):
            intact = False
        if intact:
            return commit
        print(f"{folder.state(step)}: damaged, skipped; going back to the save before it", file=sys.stderr, flush=True)
        discard(folder, step)
    return None


def read_save(folder: RunFolder, step: int) -> dict[str, Any]:
    """The state that `write_save` was given, on the CPU."""
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


def discard(folder: RunFolder, step: int) -> None:
    """Removes one save, its sidecar first."""
    folder.commit(step).unlink(missing_ok=True)
    folder.state(step).unlink(missing_ok=True)


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _holds_lines(path: Path, size: int) -> bool:
    """Whether the first `size` bytes are there and are whole lines of JSON.

    Raises:
        OSError: the file is absent.
        ValueError: a line is not JSON.
    """
    left = size
    with path.open("rb") as file:
        while left > 0 and (line := file.readline(left)).endswith(b"\n"):
            json.loads(line)
            left -= len(line)
    return left == 0
