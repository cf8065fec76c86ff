"""Prepared sets to token ids, once: uncompressed Arrow IPC streams that are memory-mapped when read.

Nothing random happens here. What the augmentations need (where removable think blocks lie, whether a system prompt may be put in
front) is stored beside the ids, and a batch splices.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from pipeline.data.prepared import SPLITS, iter_prepared, read_report, refuse_many_dropped, write_report
from pipeline.data.schema import SET_KINDS, Kind
from pipeline.text.chat import ChatEncoder, EncodedChat
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import Tokenizer

ROWS_PER_BATCH = 1024
SIDES = ("chosen", "rejected")

_CHAT_COLUMNS = [("ids", pa.list_(pa.int32())), ("trained", pa.list_(pa.uint8())), ("empty_thinks", pa.list_(pa.int32()))]
_COLUMNS: dict[Kind, list[tuple[str, pa.DataType]]] = {
    Kind.TEXT: [("ids", pa.list_(pa.int32())), ("num_bytes", pa.int64())],
    Kind.CHAT: [
        *_CHAT_COLUMNS,
        ("takes_system", pa.bool_()),
        ("num_bytes", pa.int64()),
        ("written", pa.list_(pa.uint8())),
        ("written_bytes", pa.int64()),
    ],
    Kind.PAIRS: [(f"{side}_{name}", type_) for side in SIDES for name, type_ in _CHAT_COLUMNS],
}

Columns = dict[str, Any]
T = TypeVar("T")


def encode_set(
    set_name: str, prepared: Path, out: Path, tokenizer: Tokenizer, *, max_seq_len: int, max_dropped_frac: float
) -> dict[str, Any]:
    """Writes `train.arrow`, `held_out.arrow` and `report.json` into `out`; the report comes back.

    Columns, by kind of set (lists are ragged, one entry per token unless said otherwise):
        text: line, ids, num_bytes. A document is bos + text + eos; one longer than `max_seq_len` is several rows (`windows`).
        chat: line, ids, trained (1 = the assistant wrote it), empty_thinks (flattened [start, end) of removable think blocks),
            takes_system (no system message, so no tools either), num_bytes (UTF-8 bytes of the trained text), written (1 = no
            generation prompt gives it, see `ChatEncoder.written`), written_bytes (of that text).
        pairs: line, and ids, trained, empty_thinks of each side, prefixed `chosen_` and `rejected_`. Trained is the last turn
            alone, in which the sides differ: what both say before it would cancel out in losses and stand in every sum.

    Chats and pairs that are longer than `max_seq_len` tokens (with the longest system prompt where one may be added), have no
    trained token, or are the same on both sides, are dropped and listed in the report; nothing is ever truncated.

    Args:
        set_name: pretrain, full_sft, lora or dpo.
        prepared: the folder that `prepare` wrote.
        out: the folder to write; created when absent.
        tokenizer: what turns text into ids.
        max_seq_len: the longest row in tokens, at least 2.
        max_dropped_frac: the largest share of dropped rows, in [0, 1].

    Raises:
        DataError: more rows dropped than allowed, or all rows of a split.
    """
    kind = SET_KINDS[set_name]
    prepared_report = read_report(prepared)
    source = prepared_report["source"]
    remedy = f"shorten or remove them, or raise {set_name}.max_seq_len"
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"set": set_name, "source": source, "max_seq_len": max_seq_len}
    dropped: list[str] = []
    for split in SPLITS:
        results = _encode_rows(kind, iter_prepared(prepared, split), tokenizer, max_seq_len)
        report[split], reasons = _write(out / f"{split}.arrow", kind, results, source)
        refuse_many_dropped(f"{set_name} ({split})", reasons, prepared_report[split], 1.0, remedy)
        dropped += reasons
    num_rows = sum(prepared_report[split] for split in SPLITS)
    refuse_many_dropped(set_name, dropped, num_rows, max_dropped_frac, remedy)
    report |= {"rows": num_rows, "dropped": len(dropped), "dropped_rows": dropped}
    write_report(out, report)
    return report


def windows(num_ids: int, max_seq_len: int) -> list[tuple[int, int]]:
    """The [start, end) of the rows that a document of `num_ids` tokens becomes: as few as possible, of nearly equal length.

    Neighbours share one token, the last label of one and the first input of the next, so that every token but the first is a
    label exactly once. Equal lengths leave no stump whose few labels would have almost no context.
    """
    num_labels = num_ids - 1
    parts = -(-num_labels // (max_seq_len - 1))
    bounds = [num_labels * part // parts for part in range(parts + 1)]
    return [(start, end + 1) for start, end in pairwise(bounds)]


def _encode_rows(
    kind: Kind, rows: Iterable[dict[str, Any]], tokenizer: Tokenizer, max_seq_len: int
) -> Iterator[tuple[int, Columns | str]]:
    """(line, columns of one encoded row) or (line, why the row is dropped)."""
    if kind is Kind.TEXT:
        for chunk in _chunks(rows):
            for row, ids in zip(chunk, tokenizer.encode_texts([row["text"] for row in chunk]), strict=True):
                document = [tokenizer.bos_id, *ids, tokenizer.eos_id]
                yield from ((row["line"], columns) for columns in _documents(document, row["text"], max_seq_len))
        return
    encoder = ChatEncoder(tokenizer)
    longest_system = max(len(encoder.encode_system(prompt)) for prompt in SYSTEM_PROMPTS)
    for chunk in _chunks(rows):
        if kind is Kind.PAIRS:
            chats = iter(encoder.encode_all([(row[side], row["tools"]) for row in chunk for side in SIDES]))
            yield from ((row["line"], _pair({side: next(chats) for side in SIDES}, max_seq_len)) for row in chunk)
        else:
            chats = iter(encoder.encode_all([(row["conversations"], row["tools"]) for row in chunk]))
            yield from ((row["line"], _chat(next(chats), encoder, tokenizer, row, max_seq_len, longest_system)) for row in chunk)


def _documents(ids: list[int], text: str, max_seq_len: int) -> Iterator[Columns]:
    num_bytes = len(text.encode("utf-8"))
    num_labels = len(ids) - 1
    for start, end in windows(len(ids), max_seq_len):
        # A window may end inside a character: bytes are shared out by labels, so that their sum over a document is exact.
        share = num_bytes * (end - 1) // num_labels - num_bytes * start // num_labels
        yield {"ids": ids[start:end], "num_bytes": share}


def _chat(
    chat: EncodedChat, encoder: ChatEncoder, tokenizer: Tokenizer, row: dict[str, Any], max_seq_len: int, longest_system: int
) -> Columns | str:
    takes_system = row["conversations"][0]["role"] != "system"  # which also means: no tools
    length = len(chat.ids) + longest_system * takes_system
    if length > max_seq_len:
        note = f" with a system prompt of {longest_system}" if takes_system else ""
        return f"{length} tokens{note} > max_seq_len={max_seq_len}"
    if not any(chat.trained[1:]):
        return "no trained token"
    written = encoder.written(chat)

    def num_bytes(flags: list[bool]) -> int:
        return len(tokenizer.decode([token for token, flag in zip(chat.ids, flags, strict=True) if flag]).encode("utf-8"))

    return _chat_columns(chat) | {
        "takes_system": takes_system,
        "num_bytes": num_bytes(chat.trained),
        "written": list(map(int, written)),
        "written_bytes": num_bytes(written),
    }


def _pair(chats: Mapping[str, EncodedChat], max_seq_len: int) -> Columns | str:
    for side, chat in chats.items():
        if len(chat.ids) > max_seq_len:
            return f"{side} has {len(chat.ids)} tokens > max_seq_len={max_seq_len}"
        if not any(chat.trained[1:]):
            return f"{side} has no trained token"
    if _without_empty_thinks(chats["chosen"]) == _without_empty_thinks(chats["rejected"]):
        return "chosen and rejected are the same tokens"
    last_turns = {side: replace(chat, trained=_last_turn(chat.trained)) for side, chat in chats.items()}
    return {f"{side}_{name}": value for side, chat in last_turns.items() for name, value in _chat_columns(chat).items()}


def _last_turn(trained: list[bool]) -> list[bool]:
    """The flags without those of earlier turns; a pair ends in the turn that differs."""
    behind_prompt = len(trained) - trained[::-1].index(False) if False in trained else 0
    return [False] * behind_prompt + trained[behind_prompt:]


def _chat_columns(chat: EncodedChat) -> Columns:
    return {
        "ids": chat.ids,
        "trained": list(map(int, chat.trained)),
        "empty_thinks": [bound for span in chat.empty_thinks for bound in span],
    }


def _without_empty_thinks(chat: EncodedChat) -> list[int]:
    removed = {position for start, end in chat.empty_thinks for position in range(start, end)}
    return [token for position, token in enumerate(chat.ids) if position not in removed]


def _write(path: Path, kind: Kind, results: Iterable[tuple[int, Columns | str]], source: str) -> tuple[int, list[str]]:
    """Streams the encoded rows to `path`; how many there were, and the dropped ones as `file:line: reason`."""
    schema = pa.schema([("line", pa.int64()), *_COLUMNS[kind]])
    num_rows, dropped = 0, []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for chunk in _chunks(results):
            encoded = []
            for line, result in chunk:
                if isinstance(result, str):
                    dropped.append(f"{source}:{line}: {result}")
                else:
                    encoded.append({"line": line, **result})
            writer.write_batch(pa.RecordBatch.from_pylist(encoded, schema=schema))
            num_rows += len(encoded)
    return num_rows, dropped


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, ROWS_PER_BATCH)):
        yield chunk
