"""Rows that are being generated, and the reading of their prompts: equal ones once, similar ones together.

Dimensions: N rows, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.model.kv_cache import KVBlock, KVCache
from pipeline.model.transformer import CausalLM
from pipeline.rollout.records import Completion, StopReason

PREFILL_TOKENS = 2048
"""Padded prompt positions of one forward; bounds the activations of a prefill."""
BLOCK_PADDING = {"cpu": 1024, "cuda": 65536}
"""Positions that attention may read for nothing in one block of rows, per device: about what another block's operations cost."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What `Completion.memory` holds: keys and values of all ids of `context`, as `KVBlock.read` gives them."""

    context: tuple[int, ...]
    states: Tensor


@dataclass(slots=True, eq=False)
class Row:
    """A row that is being generated.

    `limit` is the most ids it may get, `memory` what was read of the prompt before, `announce` what is called with the
    completion at its end, `noise` a random number per id, where the host deals them out.
    """

    prompt: tuple[int, ...]
    key: int
    limit: int
    greedy: bool
    memory: Memory | None
    announce: Callable[[Completion], object] | None = None
    completion: Completion = field(default_factory=lambda: Completion([], [], StopReason.LENGTH))
    noise: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def known(self) -> int:
        """How many ids of the prompt were read before."""
        return len(self.memory.context) if self.memory else 0

    @property
    def unread(self) -> tuple[int, ...]:
        """The prompt behind what `memory` has read."""
        return self.prompt[self.known :]

    @property
    def source(self) -> tuple[int, tuple[int, ...]]:
        """Equal for rows that need be read only once."""
        return id(self.memory), self.prompt

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
        if self.finished and self.announce is not None:
            self.announce(self.completion)

    def remember(self, states: Tensor) -> None:
        """Keeps a copy of the keys and values of `context` for the next turn."""
        self.completion.memory = Memory(self.context, states.clone(memory_format=torch.contiguous_format))


def in_blocks(rows: Sequence[Row], max_rows: int, padding: int) -> Iterator[list[Row]]:
    """Rows for one block each: similar in length, equal prompts side by side, and all or none with a memory."""
    block: list[Row] = []
    padded = 0
    for row in sorted(rows, key=lambda row: (row.memory is not None, len(row.prompt), row.prompt)):
        padded += len(block) * (len(row.prompt) - len(block[-1].prompt)) if block else 0
        if block and (len(block) == max_rows or padded > padding or (row.memory is None) != (block[0].memory is None)):
            yield block
            block, padded = [], 0
        block.append(row)
    if block:
        yield block


def readers(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """The first row of every prompt and memory, which is to be read, and for each row the number of the one that it shares."""
    first: dict[tuple[int, tuple[int, ...]], Row] = {}
    for row in rows:
        first.setdefault(row.source, row)
    numbers = {source: number for number, source in enumerate(first)}
    return list(first.values()), [numbers[row.source] for row in rows]


def read_prompts(model: CausalLM, rows: Sequence[Row], block: KVBlock, *, pad_id: int) -> Tensor:
    """Fills the first slots of a block with the rows' prompts; logits [N, V] after them."""
    logits = []
    start = 0
    for part in _micro_batches(rows):
        logits.append(_read(model, part, block, start, pad_id))
        start += len(part)
    return torch.cat(logits)


def written_by_prefill(rows: Sequence[Row]) -> int:
    """How many positions each of the rows' slots gets before any of them is attended to, see `KVBlock.allocate`."""
    return min(row.known or len(row.prompt) for row in rows)


def _read(model: CausalLM, rows: Sequence[Row], block: KVBlock, start: int, pad_id: int) -> Tensor:
    """Fills the slots of a block from `start` on with the rows' prompts; logits [N, V] after them."""
    device = block.states.device
    for place, row in enumerate(rows, start):
        if row.memory:
            block.place(place, row.memory.states)
    width = max(len(row.unread) for row in rows)
    padded = [[*row.unread, *[pad_id] * (width - len(row.unread))] for row in rows]
    part = block.part(start, start + len(rows))
    hidden = model.hidden(torch.tensor(padded, device=device), cache=KVCache([part]))
    block.lengths[start : start + len(rows)] = [len(row.prompt) for row in rows]
    last = torch.tensor([len(row.unread) - 1 for row in rows], device=device)
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
