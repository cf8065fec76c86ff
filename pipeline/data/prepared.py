"""Reads prepared sets, and what the makers of prepared and encoded sets share: reports, and when to refuse too many drops."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.errors import DataError

SPLITS = ("train", "held_out")
ROWS_PER_GROUP = 4096
MESSAGE_COLUMNS = ("conversations", "chosen", "rejected")


def refuse_many_dropped(set_name: str, dropped: Sequence[str], total: int, max_dropped_frac: float, remedy: str) -> None:
    """Nothing when at most `max_dropped_frac` of `total` rows were dropped and one is left.

    Raises:
        DataError: how many of how many, the first reasons (`file:line: reason`), and the `remedy`; where some were left, to allow
            more is one, too.
    """
    first = "; ".join(dropped[:3]) + ("; ..." if len(dropped) > 3 else "")
    if len(dropped) == total:
        raise DataError(f"{set_name}: all {total} rows dropped; {first}; {remedy}")
    if len(dropped) > max_dropped_frac * total:
        allowed = f"allowed is data.max_dropped_frac={max_dropped_frac:g}"
        raise DataError(f"{set_name}: {len(dropped)} of {total} rows dropped, {allowed}; {first}; {remedy}, or raise that")


def write_report(out: Path, report: dict[str, Any]) -> None:
    """`report.json` in `out`, readable by people."""
    (out / "report.json").write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any]:
    """The `report.json` of a prepared or encoded set."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def read_prepared(folder: Path, split: str) -> list[dict[str, Any]]:
    """All rows of a split (`train` or `held_out`), as `iter_prepared` gives them."""
    return list(iter_prepared(folder, split))


def iter_prepared(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split in source order, in bounded memory, ready for `ChatEncoder`.

    Yields:
        text: `{line, text}`; chat and prompts: `{line, conversations, tools}`; pairs: `{line, chosen, rejected, tools}`;
        tasks: `{line, conversations, tools, gt}`.
        Messages hold only what was given, `tool_calls` is a list of `{name, arguments}`, `tools` a list or None.
    """
    with pq.ParquetFile(folder / f"{split}.parquet") as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            for row in batch.to_pylist():
                for name in MESSAGE_COLUMNS:
                    if name in row:
                        row[name] = [_unpack(message) for message in row[name]]
                if row.get("tools") is not None:
                    row["tools"] = json.loads(row["tools"])
                yield row


def _unpack(message: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in given:
        given["tool_calls"] = json.loads(given["tool_calls"])
    return given
