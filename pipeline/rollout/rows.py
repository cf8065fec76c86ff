"""Rows that are being generated, those that wait, and the reading of prompts: equal ones once, similar ones together.

Dimensions: N rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import KVCache
from pipeline.rollout.records import Completion, Continuation, StopReason

PREFILL_TOKENS = 2048
"""Padded prompt positions of one forward; bounds the activations of a prefill."""
BLOCK_PADDING = {"cpu": 1024, "cuda": 65536}
"""Positions that attention may read for nothing in one block of rows, per device: about what another block's operations cost."""
JOIN_FRAC = 0.125
"""Rows join when they are so many of those that are being decoded: reading their prompts holds up all others."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Keys and values of all ids of `context`, as `KVBlock.read` gives them: what a next turn need not read again."""

    context: tuple[int, ...]
    states: Tensor


@dataclass(slots=True, eq=False)
class Row:
    """A row that is being generated.

    Attributes:
        prompt, key, greedy: see `RolloutEngine.generate`.
        limit: the most ids it may get.
        announce: what is called with the completion at its end.
        memory: what was read of the prompt before; given up once it stands in a block.
        completion: what it has got so far.
        noise: a random number per id, where the host deals them out.
        finished: whether it has its last id.
        continuation: what `announce` has returned.
    """

    prompt: tuple[int, ...]
    key: int
    limit: int
    greedy: bool
    announce: Callable[[Completion], Continuation | None]
    memory: Memory | None = None
    completion: Completion = field(default_factory=lambda: Completion([], [], StopReason.LENGTH))
    noise: list[float] = field(default_factory=list)
    finished: bool = False
    continuation: Continuation | None = None

    @property
    def known(self) -> int:
        """How many ids of the prompt were read before."""
        return len(self.memory.context) if self.memory else 0

    @property
    def unread(self) -> tuple[int, ...]:
        """The prompt behind what `memory` has read."""
        return self.prompt[self.known :]

    @property
    def context(self) -> tuple[int, ...]:
        """What the model has read of a row when an id is drawn; the last id is read afterwards."""
        return (*self.prompt, *self.completion.ids[:-1])

    @property
    def num_read(self) -> int:
        """The length of `context`."""
        return len(self.prompt) + max(0, len(self.completion.ids) - 1)

    @property
    def missing(self) -> int:
        """How many more ids it may get."""
        return self.limit - len(self.completion.ids)

    def append(self, token: int, logprob: float, *, is_stop: bool) -> None:
        """Adds an id that was drawn; the row is finished with a stop id, or when it has as many as it may get."""
        self.completion.ids.append(token)
        self.completion.logprobs.append(logprob)
        if is_stop:
            self.completion.stop = StopReason.EOS
        self.finished = is_stop or not self.missing
        if self.finished:
            self.continuation = self.announce(self.completion)

    def remember(self, states: Tensor) -> None:
        """Keeps a copy of the keys and values of `context` for the next turn."""
        self.memory = Memory(self.context, states.clone(memory_format=torch.contiguous_format))

    def next_turn(self) -> "Row | None":
        """The row that goes on from this one, which is finished, and takes its memory over; None where nothing follows.

        Raises:
            ValueError: the next prompt does not go on from where this row has ended.
        """
        memory, self.memory = self.memory, None
        turn = self.continuation and self.continuation()
        if turn is None:
            return None
        prompt, before = tuple(turn.prompt), (*self.prompt, *self.completion.ids)
        if prompt[: len(before)] != before or len(prompt) == len(before) or turn.max_new_tokens < 1:
            raise ValueError("generate: a next turn must begin with its prompt and completion and add to them")
        return Row(prompt, turn.key, turn.max_new_tokens, self.greedy, self.announce, memory)


class Queue:
    """Rows that are to be read: those that have waited from the start, and the next turns of those that have finished."""

    def __init__(self, rows: Sequence[Row], max_rows: int) -> None:
        """Orders the rows, similar prompts side by side.

        Args:
            rows: those of the first turn.
            max_rows: most rows that are decoded together.
        """
        self._rows = deque(sorted(rows, key=lambda row: (len(row.prompt), row.prompt)))
        self._finished: list[Row] = []
        self._max_rows = max_rows

    def __len__(self) -> int:
        """How many rows are to be read, or may be followed by one that is."""
        return len(self._rows) + len(self._finished)

    def follow(self, row: Row) -> None:
        """Has a finished row, which has remembered what was read, followed by its next turn."""
        self._finished.append(row)

    def take(self, running: int) -> list[Row]:
        """Rows that join now: all that there is room for beside so many, or none while too few could; next turns come first.

        Whether they join depends on numbers of rows alone, never on how soon a tool has answered: rows that share a batch
        share their rounding.
        """
        room = min(self._max_rows - running, len(self))
        if room < max(1, JOIN_FRAC * running):
            return []
        # first, because what they have read before takes memory
        self._rows.extendleft(filter(None, [row.next_turn() for row in reversed(self._finished)]))
        self._finished.clear()
        return [self._rows.popleft() for _ in range(min(room, len(self._rows)))]


def in_blocks(rows: Sequence[Row], padding: int) -> Iterator[list[Row]]:
    """Rows for one block each: similar in length, equal prompts side by side, and all or none with a memory.

    Args:
        rows: in any order.
        padding: how many positions of a block attention may read for nothing.
    """
    block: list[Row] = []
    padded = saved = distinct = 0
    for row in sorted(rows, key=lambda row: (row.memory is not None, len(row.prompt), row.prompt)):
        if block:
            # a prompt that is shared is padded once
            padded += (distinct if saved > padding else len(block)) * (len(row.prompt) - len(block[-1].prompt))
            if padded > padding or (row.memory is None) != (block[0].memory is None):
                yield block
                block, padded, saved, distinct = [], 0, 0, 0
        if block and row.prompt == block[-1].prompt:
            saved += len(row.prompt)
        else:
            distinct += 1
        block.append(row)
    if block:
        yield block


def saved_by_sharing(rows: Sequence[Row]) -> int:
    """How many positions attention need not read where rows share their prompts."""
    prompts = [row.prompt for row in rows]
    return sum(map(len, prompts)) - sum(map(len, set(prompts)))


def readers(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """The first row of every prompt, which is to be read, and for each row the number of the one whose prompt it shares.

    Whoever is not to be read gives up its memory: equal ids have equal keys and values, up to rounding.
    """
    first: dict[tuple[int, ...], Row] = {}
    for row in rows:
        if first.setdefault(row.prompt, row) is not row:
            row.memory = None
    numbers = {prompt: number for number, prompt in enumerate(first)}
    return list(first.values()), [numbers[row.prompt] for row in rows]


def read_prompts(model: InferenceModel, rows: Sequence[Row], block: KVBlock, *, pad_id: int) -> Tensor:
    """Fills the first slots of a block with the rows' prompts, memories included; logits [N, V] after them."""
    logits = []
    start = 0
    for part in _micro_batches(rows):
        logits.append(_read(model, part, block, start, pad_id))
        start += len(part)
    return torch.cat(logits)


def written_by_prefill(rows: Sequence[Row]) -> int:
    """How many positions each of the rows' slots gets before any of them is attended to, see `KVBlock.allocate`."""
    return min(row.known or len(row.prompt) for row in rows)


def _read(model: InferenceModel, rows: Sequence[Row], block: KVBlock, start: int, pad_id: int) -> Tensor:
    """Fills the slots of a block from `start` on with the rows' prompts; logits [N, V] after them."""
    device = block.states.device
    unread = [row.unread for row in rows]
    for place, row in enumerate(rows, start):
        if row.memory:
            block.place(place, row.memory.states)
            row.memory = None
    width = max(map(len, unread))
    padded = [[*ids, *[pad_id] * (width - len(ids))] for ids in unread]
    part = block.part(start, start + len(rows))
    hidden = model.hidden(torch.tensor(padded, device=device), KVCache([part]))
    block.lengths[start : start + len(rows)] = [len(row.prompt) for row in rows]
    last = torch.tensor([len(ids) - 1 for ids in unread], device=device)
    return model.head(hidden[torch.arange(len(rows), device=device), last])


def _micro_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Neighbours of at most PREFILL_TOKENS unread padded positions (or one longer row)."""
    part: list[Row] = []
    width = 0
    for row in rows:
        width = max(width, len(row.unread))
        if part and (len(part) + 1) * width > PREFILL_TOKENS:
            yield part
            part, width = [], len(row.unread)
        part.append(row)
    yield part
