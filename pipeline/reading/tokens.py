"""Samples as token ids, to find the token in which runs part.

What ppo, grpo and agent sampled lies in their run folders as ids; of other samples there is the text, whose ids are those that
the tokenizer of the runs gives. A policy may spell a text otherwise than the tokenizer: only the former shows it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from pipeline.digests import digest
from pipeline.errors import DataError
from pipeline.lineage.causes import cached_file
from pipeline.reading.samples import Part, Parting, Row, common_prefix, text_of
from pipeline.reading.sides import Side
from pipeline.text.tokenizer import CONTROL_TOKENS, TOKENIZER_FILE, Tokenizer
from pipeline.tracking.records import Record
from pipeline.tracking.rollouts import read_ids

FOLDER = "data/tokenizer"
CACHED_STEPS = 64
_CONTROL = re.compile(f"({'|'.join(re.escape(text) for text, _ in CONTROL_TOKENS)})")

Ids = list[int]


def part_by_token(root: Path, sides: Sequence[Side]) -> Part | None:
    """What finds the first differing token of the sides' rows; None where they have no tokenizer in common, or it is gone."""
    tokenizer = _common_tokenizer(root, sides)
    if tokenizer is None:
        return None
    sampled = [_Sampled(side.record, tokenizer) for side in sides]

    def part(rows: Sequence[Row]) -> Parting | None:
        kept = [each.ids_of(row) for each, row in zip(sampled, rows, strict=True)]
        texts = [text_of(row) for row in rows]
        known = [ids for ids in kept if ids is not None]
        return _part(tokenizer, texts, known if len(known) == len(rows) else [ids_of_text(tokenizer, text) for text in texts])

    return part


def _part(tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Ids]) -> Parting | None:
    same = common_prefix(ids)
    if all(len(each) == same for each in ids):
        return None
    before = tokenizer.decode_all(ids[0][:same])  # may end within a character, which is then none of the texts'
    return Parting(common_prefix([before, *texts]), same + 1, tuple(tokenizer.decode_all(each[same : same + 1]) for each in ids))


def ids_of_text(tokenizer: Tokenizer, text: str) -> Ids:
    """The ids of a text as tables show it, with control tokens spelled out."""
    parts = enumerate(_CONTROL.split(text))  # every second one is a control token
    return [id_ for at, part in parts for id_ in ([tokenizer.control_id(part)] if at % 2 else tokenizer.encode_text(part))]


def _common_tokenizer(root: Path, sides: Sequence[Side]) -> Tokenizer | None:
    """The one that all sides read, from the workspace or DVC's cache."""
    read = {side.inputs.get(FOLDER) for side in sides}
    wanted = read.pop() if len(read) == 1 else None
    if wanted is None:
        return None
    if (root / FOLDER).is_dir() and digest(root / FOLDER) == wanted:
        return Tokenizer(root / FOLDER / TOKENIZER_FILE)
    listing = cached_file(root, wanted)
    files = json.loads(listing.read_text(encoding="utf-8")) if listing.is_file() else []
    cached = [cached_file(root, entry["md5"]) for entry in files if entry["relpath"] == TOKENIZER_FILE]
    return next((Tokenizer(path) for path in cached if path.is_file()), None)


class _Sampled:
    """The ids that one run sampled, as far as it kept them."""

    def __init__(self, record: Record | None, tokenizer: Tokenizer) -> None:
        self._record, self._tokenizer = record, tokenizer
        self._of_step = lru_cache(CACHED_STEPS)(self._read)

    def ids_of(self, row: Row) -> Ids | None:
        """Those of a row of the run's table: a trajectory with its prompt and its text."""
        answers = self._of_step(row["step"]).get(row.get("prompt"), ())
        return next((ids for ids in answers if self._tokenizer.decode_all(ids) == row.get("completion")), None)

    def _read(self, step: int) -> Mapping[object, list[Ids]]:
        """The ids behind each prompt, by its text; nothing where no rollouts were kept, or the file is damaged."""
        found: dict[object, list[Ids]] = {}
        path = self._record.folder.rollout(step) if self._record is not None else None
        if path is not None and path.exists():
            with suppress(DataError):
                for prompt, ids in self._by_prompt(path):
                    found.setdefault(prompt, []).extend(ids)
        return found

    def _by_prompt(self, path: Path) -> Iterator[tuple[str, list[Ids]]]:
        groups: dict[tuple[int, ...], list[Ids]] = {}
        for prompt, ids in read_ids(path):
            groups.setdefault(tuple(prompt), []).append(ids)
        return ((self._tokenizer.decode_all(prompt), ids) for prompt, ids in groups.items())
