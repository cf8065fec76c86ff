"""The files of a stage that DVC hashes: `metrics/<stage>.json` and `plots/<stage>.csv`. No clock may decide a byte of them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.terminal import say

MAX_POINTS = 500


def is_clocked(key: str) -> bool:
    """Whether a clock or the machine decides this metric: times, memory and speeds."""
    return key.startswith(("time/", "memory/", "system/")) or key.endswith("_per_s")


def write_metrics(path: Path, summary: Mapping[str, float]) -> None:
    """Writes final values as flat, sorted JSON of finite numbers with six significant digits.

    Clocked keys are left out. A value that is not finite is left out with a warning on stderr.
    """
    values: dict[str, float] = {}
    for key in sorted(summary):
        if is_clocked(key):
            continue
        value = summary[key]
        if not math.isfinite(value):
            say(f"{path}: {key} is {value}, left out")
            continue
        values[key] = value if isinstance(value, int) else float(f"{value:.6g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_curve(path: Path, metrics: Path, *, every: int, keys: Sequence[str] | None = None) -> None:
    """Writes the curves of a run as CSV: a column `step`, then one column per key.

    A point stands at every multiple of `every` steps and at the last step, and is the mean of what was logged since the
    point before; with more than 500 points `every` is multiplied by the smallest whole number that suffices. A cell is
    empty where nothing finite was logged.

    Args:
        path: the CSV file.
        metrics: the run's metrics.jsonl.
        every: steps between points.
        keys: columns; all that no clock decides when left out.
    """
    lines = list(_read_lines(metrics))
    last = max((line["step"] for line in lines), default=0)
    every *= max(1, math.ceil(math.ceil(last / every) / MAX_POINTS))
    columns = sorted({key for line in lines for key in line["metrics"] if not is_clocked(key)}) if keys is None else list(keys)
    windows: dict[int, dict[str, list[float]]] = {}
    for line in lines:
        point = min(math.ceil(line["step"] / every) * every, last)
        window = windows.setdefault(point, {})
        for key, value in line["metrics"].items():
            if value is not None:
                window.setdefault(key, []).append(value)
    rows = [",".join(["step", *columns])]
    for point in sorted(windows):
        cells = (windows[point].get(key) for key in columns)
        rows.append(",".join([str(point), *(f"{math.fsum(cell) / len(cell):.6g}" if cell else "" for cell in cells)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
