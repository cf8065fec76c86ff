"""Sources to prepared sets: validated, normalised, held-out rows split off, stored as Parquet.

The split is a function of the seed and of what a row asks, never of its place in the file or of the set it is in: rows that
ask the same thing lie on one side, so no held-out question is also a training row, and a question held out of one set tends to
be held out of the others. What counts is what is trained on: of a chat every turn, so its first question decides, and no held-out
chat is the beginning of one that is trained on, or the other way round; of pairs, prompts and tasks the
last reply.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.prepared import MESSAGE_COLUMNS, ROWS_PER_GROUP, refuse_many_dropped, write_report
from pipeline.data.schema import SET_KINDS, Kind, Row, untrainable
from pipeline.data.sources import read_source
from pipeline.errors import DataError
from pipeline.params.schema import Data

_MESSAGES = pa.list_(
    pa.struct([("role", pa.string()), ("content", pa.string()), ("reasoning_content", pa.string()), ("tool_calls", pa.string())])
)
_COLUMNS: dict[Kind, list[tuple[str, pa.DataType]]] = {
    Kind.TEXT: [("text", pa.string())],
    Kind.CHAT: [("conversations", _MESSAGES), ("tools", pa.string())],
    Kind.PAIRS: [("chosen", _MESSAGES), ("rejected", _MESSAGES), ("tools", pa.string())],
    Kind.PROMPTS: [("conversations", _MESSAGES), ("tools", pa.string()), ("gt", pa.list_(pa.string()))],
    Kind.TASKS: [("conversations", _MESSAGES), ("tools", pa.string()), ("gt", pa.list_(pa.string()))],
}


def prepare(set_name: str, source: Path, out: Path, params: Data) -> dict[str, Any]:
    """Writes `train.parquet`, `held_out.parquet` and `report.json` into `out`; the report comes back.

    The bytes written depend on the source's rows, its path and `params` alone.

    Args:
        set_name: a key of `SET_KINDS`; it decides the shape of the rows.
        source: a JSONL file, or a recipe (`.yaml`) of the embedded world.
        out: the folder to write; created when absent.
        params: section `data` (the split and the largest share of untrainable rows).

    Raises:
        DataError: malformed rows, too many untrainable ones, or too few different prompts to hold any out.
    """
    kind = SET_KINDS[set_name]
    rows: list[Row] = []
    dropped: list[str] = []
    for row in read_source(source, set_name):
        reason = untrainable(row.value, kind)
        if reason:
            dropped.append(f"{source}:{row.line}: {reason}")
        else:
            rows.append(row)
    refuse_many_dropped(set_name, dropped, len(rows) + len(dropped), params.max_dropped_frac, "mend or remove them")
    held_out = _held_out([prompt_key(row.value, kind, params.seed) for row in rows], params, set_name)
    split_rows = {
        "train": [row for index, row in enumerate(rows) if index not in held_out],
        "held_out": [row for index, row in enumerate(rows) if index in held_out],
    }
    out.mkdir(parents=True, exist_ok=True)
    for split, chosen in split_rows.items():
        _write(out / f"{split}.parquet", chosen, kind)
    report = {
        "set": set_name,
        "source": source.as_posix(),
        "rows": len(rows) + len(dropped),
        **{split: len(chosen) for split, chosen in split_rows.items()},
        "thinking_moved": sum(row.thinking_moved for row in rows),
        "dropped": len(dropped),
        "dropped_rows": dropped,
    }
    write_report(out, report)
    return report


def prompt_key(value: dict[str, Any], kind: Kind, seed: int) -> bytes:
    """A 16-byte hash of the seed and of what the row asks: its text, a chat's first user message, or the last of others.

    System prompt, offered tools and earlier answers do not count: with them changed it is still the same question.
    """
    if kind is Kind.TEXT:
        asked = [value["text"]]
    else:
        messages = value["chosen" if kind is Kind.PAIRS else "conversations"]
        asked = [message["content"] for message in messages if message["role"] == "user"]
        asked = asked[:1] if kind is Kind.CHAT else asked[-1:]
    text = json.dumps([seed, *asked], ensure_ascii=False)
    return blake2b(text.encode("utf-8"), digest_size=16).digest()


def _held_out(keys: Sequence[bytes], params: Data, set_name: str) -> set[int]:
    """Row indices to hold out: whole groups of equal keys, in key order, filling the wanted count without exceeding it."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    wanted = min(params.held_out_max_rows, max(1, round(params.held_out_frac * len(keys))))
    held_out: set[int] = set()
    for _, group in sorted(groups.items()):
        if len(held_out) + len(group) <= wanted:
            held_out.update(group)
    if not held_out:
        held_out.update(groups[min(groups, key=lambda key: (len(groups[key]), key))])
    if len(held_out) > params.held_out_max_rows or len(held_out) == len(keys):
        raise DataError(
            f"{set_name}: {len(keys)} rows with {len(groups)} different prompts; at least one prompt must be held out "
            f"(at most data.held_out_max_rows={params.held_out_max_rows} rows) and one must be left to train on; add rows"
        )
    return held_out


def _write(path: Path, rows: Sequence[Row], kind: Kind) -> None:
    schema = pa.schema([("line", pa.int64()), *_COLUMNS[kind]])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(rows), ROWS_PER_GROUP):
            packed = [{"line": row.line, **_pack_row(row.value)} for row in rows[start : start + ROWS_PER_GROUP]]
            writer.write_batch(pa.RecordBatch.from_pylist(packed, schema=schema))


def _pack_row(value: dict[str, Any]) -> dict[str, Any]:
    packed = dict(value)
    for name in MESSAGE_COLUMNS:
        if name in packed:
            packed[name] = [_pack(message) for message in packed[name]]
    if packed.get("tools") is not None:
        packed["tools"] = json.dumps(packed["tools"], ensure_ascii=False)
    return packed


def _pack(message: dict[str, Any]) -> dict[str, Any]:
    """Calls become JSON text: Parquet structs cannot hold arguments of every shape in their own key order."""
    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": json.dumps(message["tool_calls"], ensure_ascii=False)}
