"""Append-only JSON lines: what a stage measured and generated."""

import json
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.tracking.run_folder import named


def now_s() -> float:
    """Unix time in seconds, to the millisecond: what MLflow stores."""
    return round(time.time(), 3)


def checksum(path: Path, size: int | None = None) -> int:
    """CRC-32 of a file, or of its first `size` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is shorter.
    """
    crc32, left = 0, path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0:
            chunk = file.read(min(left, 1 << 20))
            if not chunk:
                raise ValueError(f"{path.name} ends {left} bytes too early")
            crc32, left = zlib.crc32(chunk, crc32), left - len(chunk)
    return crc32


class JsonLines:
    """A strict JSON-lines file that is appended to, and cut back to a known size when a run resumes.

    Args:
        path: the file; made when absent.
        size: bytes to keep of what is there, at most all (a longer one would append NULs); `newest_save` sees to it.

    Attributes:
        crc32: of all bytes of the file.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(size)
        self.crc32 = checksum(path, size)

    def append(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Writes one line per value with one system call; infinities and NaN become null."""
        lines = (json.dumps(_strict(value), ensure_ascii=False, allow_nan=False) + "\n" for value in values)
        # A lone surrogate in generated text becomes its JSON escape.
        self._write("".join(lines).encode("utf-8", errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with named(self._path):
            while view:
                view = view[self._file.write(view) :]
        self.crc32 = zlib.crc32(data, self.crc32)

    def sync(self) -> int:
        """Makes all lines durable; the file's size in bytes."""
        with named(self._path):
            os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


class Recorder:
    """`metrics.jsonl` and `samples.jsonl` of one run."""

    def __init__(self, metrics: JsonLines, samples: JsonLines) -> None:
        self._metrics = metrics
        self._samples = samples

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends `{step, time_s, metrics}`; time_s is Unix time. Values that are not finite are written as null."""
        values = {key: float(value) for key, value in metrics.items()}
        self._metrics.append([{"step": step, "time_s": now_s(), "metrics": values}])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends one line per row (plain JSON values), with the step in front."""
        self._samples.append([{"step": step, **row} for row in rows])

    def sync(self) -> dict[str, int]:
        """Makes everything logged so far durable; the sizes of both files in bytes, and their checksums."""
        return {
            "metrics_bytes": self._metrics.sync(),
            "metrics_crc32": self._metrics.crc32,
            "samples_bytes": self._samples.sync(),
            "samples_crc32": self._samples.crc32,
        }

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
