"""Batches of encoded rows: zero-copy views of memory-mapped Arrow files, spliced, shifted once and padded.

Dimensions: B sequences, T positions. `batch(epoch, index)` is a function of the seed and its arguments: which rows, in which
order, with which augmentation. So nothing needs saving to resume, and skipping costs nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data.draws import permutation, uniforms
from pipeline.data.labels import IGNORED_LABEL
from pipeline.errors import DataError
from pipeline.params.schema import Chat
from pipeline.text.chat import ChatEncoder
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import Tokenizer

POOL_BATCHES = 64

Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded sequences, shifted: position t of `labels` is the token after position t of `input_ids`.

    Attributes:
        input_ids: [B, T] int64, padded with the pad id.
        labels: [B, T] int64, -100 where nothing is trained (padding too).
        num_trained: how many labels are not -100.
        rows: B row numbers (from 0) in the encoded file.
        row_bytes: per row the UTF-8 bytes of the text behind its labels, before augmentation: the unit of bits per byte.
        written: of chats as stored, which labels a model must really write; None where nobody asks.
    """

    input_ids: Tensor
    labels: Tensor
    num_trained: int
    rows: list[int]
    row_bytes: list[int]
    written: "Written | None" = None

    @property
    def num_bytes(self) -> int:
        """Sum of `row_bytes`."""
        return sum(self.row_bytes)

    def part(self, rank: int, size: int) -> "Batch | None":
        """Every `size`-th row from number `rank` on, as wide as the whole; None where there is none."""
        rows, labels = self.rows[rank::size], self.labels[rank::size]
        if not rows:
            return None
        return Batch(self.input_ids[rank::size], labels, _count_trained(labels), rows, self.row_bytes[rank::size])


@dataclass(frozen=True, slots=True)
class Written:
    """`labels` [B, T] without those that a generation prompt gives (`ChatEncoder.written`), and the bytes of their text."""

    labels: Tensor
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PairBatch:
    """n preference pairs as 2n sequences, as in `Batch`: 0..n-1 are the chosen, n..2n-1 the rejected ones, in the same order.

    Attributes:
        input_ids: [2n, T] int64.
        labels: [2n, T] int64.
        num_trained: how many labels are not -100.
        rows: n row numbers (from 0) in the encoded file.
        dropped: per pair, whether its empty think blocks were left out.
        split: name of the encoded file, `train` or `held_out`.
    """

    input_ids: Tensor
    labels: Tensor
    num_trained: int
    rows: list[int]
    dropped: list[bool]
    split: str

    @property
    def num_pairs(self) -> int:
        """n."""
        return len(self.rows)

    def part(self, rank: int, size: int) -> "PairBatch | None":
        """Every `size`-th pair from number `rank` on, as wide as the whole; None where there is none."""
        rows = self.rows[rank::size]
        if not rows:
            return None
        input_ids, labels = (
            torch.cat([side[rank::size] for side in tensor.chunk(2)]) for tensor in (self.input_ids, self.labels)
        )
        return PairBatch(input_ids, labels, _count_trained(labels), rows, self.dropped[rank::size], self.split)


class SupervisedBatches:
    """Batches of an encoded text or chat set (pretrain, full_sft, lora)."""

    def __init__(
        self,
        path: Path,
        *,
        batch_size: int,
        seed: int,
        tokenizer: Tokenizer,
        system_prompt_frac: float = 0.0,
        drop_empty_think_frac: float = 0.0,
    ) -> None:
        """Maps the file; no row is read yet.

        Args:
            path: a file that `encode_set` wrote.
            batch_size: B; the last batch of an epoch's plan may be smaller.
            seed: with the epoch it decides order and augmentation.
            tokenizer: the one that encoded the file.
            system_prompt_frac: chance per row and epoch that a chat that may take one gets a system prompt in front.
            drop_empty_think_frac: chance per row and epoch that all empty think blocks of a chat are left out.
        """
        self._table = _read_table(path)
        self._ids = _Ragged(self._table["ids"])
        self._num_bytes = self._table["num_bytes"].to_numpy()
        self._chats = "trained" in self._table.column_names
        if self._chats:
            self._trained = _Ragged(self._table["trained"])
            self._empty_thinks = _Ragged(self._table["empty_thinks"])
            self._takes_system = self._table["takes_system"].to_numpy()
            self._written = _Ragged(self._table["written"])
            self._written_bytes = self._table["written_bytes"].to_numpy()
            encoder = ChatEncoder(tokenizer)
            self._system_prompts = [np.asarray(encoder.encode_system(prompt), np.int32) for prompt in SYSTEM_PROMPTS]
            self._think_lengths = self._empty_thinks.span_lengths()
        self._seed, self._pad_id = seed, tokenizer.pad_id
        self._system_prompt_frac, self._drop_empty_think_frac = system_prompt_frac, drop_empty_think_frac
        self._plan = _Plan(len(self._ids.lengths), batch_size, seed)
        self._draws: tuple[int, Ints, Ints] | None = None
        self.batches_per_epoch = self._plan.batches_per_epoch

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` (0 <= index < batches_per_epoch) of an epoch: the same whenever it is asked for."""
        if not self._chats:
            rows = self._plan.rows(epoch, index, lambda: self._ids.lengths)
            return self._make(rows, [self._plain(row) for row in rows])
        if self._draws is None or self._draws[0] != epoch:
            size = len(self._ids.lengths)
            self._draws = epoch, self._draw_systems(epoch, size), _draw(self._seed, epoch, self._drop_empty_think_frac, size)
        _, systems, drops = self._draws
        rows = self._plan.rows(epoch, index, lambda: self._augmented_lengths(systems, drops))
        return self._make(rows, [self._augmented(row, systems[row], bool(drops[row])) for row in rows])

    def in_order(self) -> Iterator[Batch]:
        """Every row once, shortest first, as stored, of chats with what is `written`: for validation."""
        for rows in self._plan.cut(np.argsort(self._ids.lengths, kind="stable")):
            batch = self._make(rows, [self._plain(row) for row in rows])
            if self._chats:
                _, labels, _ = _shift_and_pad([(self._ids[row], self._written[row]) for row in rows], self._pad_id)
                batch = replace(batch, written=Written(labels, int(self._written_bytes[rows].sum())))
            yield batch

    def _draw_systems(self, epoch: int, size: int) -> Ints:
        """[rows] index of the system prompt to put in front, -1 for none."""
        given = self._takes_system & (uniforms(self._seed, epoch, "system", size) < self._system_prompt_frac)
        choice = (uniforms(self._seed, epoch, "which system", size) * len(SYSTEM_PROMPTS)).astype(np.int64)
        return np.where(given, choice, -1)

    def _plain(self, row: int) -> tuple[Ints, Ints]:
        ids = self._ids[row]
        return ids, self._trained[row] if self._chats else np.ones(len(ids), np.uint8)

    def _augmented(self, row: int, system: int, drop_empty_thinks: bool) -> tuple[Ints, Ints]:
        ids, trained = self._plain(row)
        if drop_empty_thinks:
            ids, trained = _without_spans(ids, trained, self._empty_thinks[row])
        if system >= 0:
            prompt = self._system_prompts[system]
            ids, trained = np.concatenate([prompt, ids]), np.concatenate([np.zeros(len(prompt), np.uint8), trained])
        return ids, trained

    def _augmented_lengths(self, systems: Ints, drops: Ints) -> Ints:
        """[rows] ids of each row with what an epoch puts in front of it and leaves out."""
        added = np.array([*map(len, self._system_prompts), 0])[systems]  # -1 is the last
        return self._ids.lengths + added - np.where(drops, self._think_lengths, 0)

    def _make(self, rows: Ints, sequences: Sequence[tuple[Ints, Ints]]) -> Batch:
        input_ids, labels, num_trained = _shift_and_pad(sequences, self._pad_id)
        return Batch(input_ids, labels, num_trained, rows.tolist(), self._num_bytes[rows].tolist())


def chat_batches(path: Path, settings: Chat, tokenizer: Tokenizer) -> SupervisedBatches:
    """Batches of an encoded chat set with the augmentation of its stage's settings."""
    return SupervisedBatches(
        path,
        batch_size=settings.batch_size,
        seed=settings.seed,
        tokenizer=tokenizer,
        system_prompt_frac=settings.system_prompt_frac,
        drop_empty_think_frac=settings.drop_empty_think_frac,
    )


class PairBatches:
    """Batches of an encoded preference set (dpo, reward)."""

    def __init__(
        self, path: Path, *, batch_size: int, seed: int, tokenizer: Tokenizer, drop_empty_think_frac: float = 0.0
    ) -> None:
        """As `SupervisedBatches`, with `batch_size` counting pairs and one think-block decision for both sides of a pair."""
        self._table = _read_table(path)
        self.split = path.stem
        self._sides = [
            tuple(_Ragged(self._table[f"{side}_{name}"]) for name in ("ids", "trained", "empty_thinks"))
            for side in ("chosen", "rejected")
        ]
        self._seed, self._pad_id = seed, tokenizer.pad_id
        self._encoder, self._judged = ChatEncoder(tokenizer), False
        self._drop_empty_think_frac = drop_empty_think_frac
        self._lengths = np.maximum(*(ids.lengths for ids, _, _ in self._sides))
        self._plan = _Plan(len(self._lengths), batch_size, seed)
        self._draws: tuple[int, Ints] | None = None
        self.batches_per_epoch = self._plan.batches_per_epoch

    def batch(self, epoch: int, index: int) -> PairBatch:
        """Batch `index` (0 <= index < batches_per_epoch) of an epoch: the same whenever it is asked for."""
        if self._draws is None or self._draws[0] != epoch:
            self._draws = epoch, _draw(self._seed, epoch, self._drop_empty_think_frac, self._table.num_rows)
        return self._make(self._plan.rows(epoch, index, lambda: self._lengths), self._draws[1])

    def judged(self) -> "PairBatches":
        """The same pairs in the form that reward models read, see `ChatEncoder.judged`."""
        judged = copy(self)
        judged._judged = True
        return judged

    @property
    def num_rows(self) -> int:
        """Pairs in the file."""
        return int(self._table.num_rows)

    def in_order(self) -> Iterator[PairBatch]:
        """Every pair once, shortest first, as stored: for validation."""
        return self._each(np.arange(self.num_rows), dropped=False)

    def of_epochs(self, epochs: int) -> Iterator[PairBatch]:
        """Every pair once in each form that any of the epochs gives it, as stored or without empty think blocks."""
        drops = np.zeros((2, self.num_rows), dtype=bool)  # as stored and without, whether an epoch gives a pair so
        varies = 0 < self._drop_empty_think_frac < 1
        for epoch in range(epochs if varies else min(epochs, 1)):
            dropped = _draw(self._seed, epoch, self._drop_empty_think_frac, self.num_rows)
            drops |= np.stack([~dropped, dropped])
            if drops.all():  # later epochs, of which there may be a million, give nothing new
                break
        for without, given in enumerate(drops):
            yield from self._each(np.flatnonzero(given), dropped=bool(without))

    def _each(self, rows: Ints, *, dropped: bool) -> Iterator[PairBatch]:
        order = rows[np.argsort(self._lengths[rows], kind="stable")]
        for part in self._plan.cut(order):
            yield self._make(part, np.full(self.num_rows, dropped))

    def _make(self, rows: Ints, drops: Ints) -> PairBatch:
        sequences = [
            self._sequence(ids[row], trained[row], empty_thinks[row], bool(drops[row]))
            for ids, trained, empty_thinks in self._sides
            for row in rows
        ]
        return PairBatch(*_shift_and_pad(sequences, self._pad_id), rows.tolist(), drops[rows].tolist(), self.split)

    def _sequence(self, ids: Ints, trained: Ints, empty_thinks: Ints, dropped: bool) -> tuple[Ints, Ints]:
        if self._judged:
            kept, flags = self._encoder.judged(ids.tolist(), trained.tolist())
            return np.asarray(kept), np.asarray(flags)
        return _without_spans(ids, trained, empty_thinks) if dropped else (ids, trained)


class _Ragged:
    """A list column as numpy views, one per row, of the mapped file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._offsets = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._first_rows = np.cumsum([0, *map(len, chunks)])
        self.lengths: Ints = np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def __getitem__(self, row: int) -> Ints:
        chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        start, end = self._offsets[chunk][row - self._first_rows[chunk] :][:2]
        view: Ints = self._values[chunk][start:end]
        return view

    def span_lengths(self) -> Ints:
        """Per row the sum of the lengths of its [start, end) ranges, which lie flattened in it."""
        parts = zip(self._values, self._offsets, strict=True)
        ranges = np.concatenate([values[offsets[0] : offsets[-1]] for values, offsets in parts]).reshape(-1, 2)
        sums = np.cumsum(np.concatenate([[0], ranges[:, 1] - ranges[:, 0]]))
        ends = np.cumsum(self.lengths) // 2
        return sums[ends] - sums[ends - self.lengths // 2]


class _Plan:
    """Which rows make up which batch: similar lengths together, everything else at random."""

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._epoch: tuple[int, list[Ints]] | None = None
        self.batches_per_epoch = -(-size // batch_size)

    def rows(self, epoch: int, index: int, lengths: Callable[[], Ints]) -> Ints:
        """Row numbers of a batch; `lengths` gives the [rows] lengths in this epoch, asked for once per epoch."""
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of {self.batches_per_epoch}")
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch, lengths())
        return self._epoch[1][index]

    def cut(self, order: Ints) -> list[Ints]:
        """Rows in batches, in this order."""
        return np.split(order, range(self._batch_size, len(order), self._batch_size)) if len(order) else []

    def _shuffled(self, epoch: int, lengths: Ints) -> list[Ints]:
        order = permutation(self._seed, epoch, "rows", self._size)
        pools = np.arange(self._size) // (self._batch_size * POOL_BATCHES)
        batches = self.cut(order[np.lexsort((lengths[order], pools))])
        return [batches[index] for index in permutation(self._seed, epoch, "batches", len(batches))]


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file; `dvc repro` writes it")
    with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
        table = reader.read_all()
    if not table.num_rows:
        raise DataError(f"{path}: holds no rows")
    return table


def _draw(seed: int, epoch: int, drop_frac: float, size: int) -> Ints:
    """[rows] True where a row's empty think blocks are left out in this epoch."""
    return uniforms(seed, epoch, "empty think", size) < drop_frac


def _without_spans(ids: Ints, trained: Ints, spans: Ints) -> tuple[Ints, Ints]:
    """Both arrays without the [start, end) ranges that `spans` holds flattened."""
    if not len(spans):
        return ids, trained
    kept = np.ones(len(ids), bool)
    for start, end in spans.reshape(-1, 2):
        kept[start:end] = False
    return ids[kept], trained[kept]


def _count_trained(labels: Tensor) -> int:
    return int((labels != IGNORED_LABEL).sum())


def _shift_and_pad(sequences: Sequence[tuple[Ints, Ints]], pad_id: int) -> tuple[Tensor, Tensor, int]:
    """input_ids [B, T] and labels [B, T] of (ids, trained) sequences, and how many labels are trained."""
    lengths = [len(ids) - 1 for ids, _ in sequences]
    input_ids = np.full((len(sequences), max(lengths)), pad_id, np.int64)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    for index, ((ids, trained), length) in enumerate(zip(sequences, lengths, strict=True)):
        input_ids[index, :length] = ids[:-1]
        labels[index, :length] = np.where(trained[1:], ids[1:], IGNORED_LABEL)
    shifted = torch.from_numpy(labels)
    return torch.from_numpy(input_ids), shifted, _count_trained(shifted)
