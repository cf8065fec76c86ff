"""Sampling from a `CausalLM` in this process: shared prefill, one batch that rows leave and waiting rows join.

Dimensions: N rows of a batch, T positions, V vocabulary.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.model.kv_cache import KVBlock, KVCache
from pipeline.model.transformer import CausalLM
from pipeline.rollout.records import Completion, StopReason
from pipeline.rollout.sampling import draw, uniforms

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
class _Row:
    """A row that is being generated.

    `limit` is the most ids it may get, `memory` what was read of the prompt before, `noise` a random number per id.
    """

    prompt: tuple[int, ...]
    key: int
    limit: int
    greedy: bool
    memory: Memory | None
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

    def append(self, token: int, logprob: float, *, is_stop: bool) -> None:
        self.completion.ids.append(token)
        self.completion.logprobs.append(logprob)
        if is_stop:
            self.completion.stop = StopReason.EOS
        self.finished = is_stop or len(self.completion.ids) == self.limit


class TorchRolloutEngine:
    """A `RolloutEngine` over a model that others may train meanwhile: every call samples from its present weights.

    Rows of equal prompt are prefilled once, and a later turn of an episode reads only what is new in it. Logits are computed at
    last positions only, and logprobs are recorded from the logits that were sampled from. An id's random number depends on its
    row's key and position, so a row's text does not depend on its neighbours, up to near-ties of floating point.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        stop_ids: Iterable[int],
        pad_id: int,
        max_rows: int,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Keeps the model, copies nothing.

        Args:
            model: Run in evaluation mode and without gradients; its mode is restored after each call.
            stop_ids: Ids that end a completion; the one sampled is its last id.
            pad_id: Fills prompts to equal length. It can be sampled like any other id.
            max_rows: Most rows in memory together, >= 1; others wait until there is room.
            autocast_dtype: Mixed precision of the forward passes; None for the weights' own.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: must be >= 1")
        self._model = model
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._max_rows = max_rows
        self._autocast_dtype = autocast_dtype

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        greedy: bool | Sequence[bool] = False,
        previous: Sequence[Completion | None] | None = None,
        remember: bool = False,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: An empty prompt, a limit below 1, a temperature that is not positive, counts that differ, or a prompt
                that does not go on from where its previous completion ended.
            ParamsError: A prompt and its new tokens exceed the model's window.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        greedy = [greedy] * len(prompts) if isinstance(greedy, bool) else greedy
        previous = previous or [None] * len(prompts)
        if not len(prompts) == len(keys) == len(limits) == len(greedy) == len(previous):
            raise ValueError(
                f"{len(prompts)} prompts, {len(keys)} keys, {len(limits)} limits, {len(greedy)} greedy flags, "
                f"{len(previous)} previous completions: must be equally many"
            )
        if temperature <= 0 or min(limits, default=1) < 1 or not all(len(prompt) for prompt in prompts):
            raise ValueError("generate: temperature must be > 0, max_new_tokens >= 1, and no prompt empty")
        rows = [
            _Row(tuple(prompt), key, limit, flag, before.memory if before else None)
            for prompt, key, limit, flag, before in zip(prompts, keys, limits, greedy, previous, strict=True)
        ]
        for row in rows:
            if row.memory and (not row.unread or row.prompt[: row.known] != row.memory.context):
                raise ValueError("generate: a prompt must begin with its previous completion's context and add to it")
        KVBlock.check_capacity(self._model.config, max((len(row.prompt) + row.limit for row in rows), default=0))
        with self._inference():
            self._decode(rows, temperature, remember=remember)
        return [row.completion for row in rows]

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """Evaluation mode (no dropout: the sampling distribution is the one that is scored), no gradients, autocast."""
        device, dtype, was_training = self._device, self._autocast_dtype, self._model.training
        self._model.eval()
        try:
            with torch.inference_mode(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                yield
        finally:
            self._model.train(was_training)

    @property
    def _device(self) -> torch.device:
        return self._model.lm_head.weight.device

    def _decode(self, rows: Sequence[_Row], temperature: float, *, remember: bool) -> None:
        """Fills the completions. Every turn of the loop draws one id for every row that is in the batch."""
        padding = BLOCK_PADDING[self._device.type]
        waiting = deque(_blocks(rows, self._max_rows, padding))
        batch: list[_Row] = []
        cache = KVCache()
        while batch or waiting:
            joining: list[_Row] = []
            blocks: list[KVBlock] = []
            logits: list[Tensor] = []
            while waiting and cache.slots + len(joining) + len(waiting[0]) <= self._max_rows:
                fresh, block, last = self._prefill(waiting.popleft())
                joining += fresh
                blocks.append(block)
                logits.append(last)
            # uploaded before the step is queued, so that it does not wait for it
            noise = self._noise([*batch, *joining])
            if batch:
                logits.insert(0, self._step(batch, cache))
            batch += joining
            cache.blocks += blocks
            self._record(batch, *draw(torch.cat(logits), temperature, *noise))
            if remember:
                for index, row in enumerate(batch):
                    if row.finished:
                        states = cache.read(index).clone(memory_format=torch.contiguous_format)
                        row.completion.memory = Memory(row.context, states)
            if any(row.finished for row in batch):
                batch = [batch[index] for index in cache.keep([not row.finished for row in batch], padding=padding)]

    def _step(self, rows: Sequence[_Row], cache: KVCache) -> Tensor:
        """Reads the last id of every row; logits [N, V] of the next one."""
        ids = torch.tensor([row.completion.ids[-1:] for row in rows], device=self._device)
        hidden = self._model.hidden(ids, cache=cache)
        cache.advance(1)
        return self._model.head(hidden[:, -1])

    def _noise(self, rows: Sequence[_Row]) -> tuple[Tensor | None, Tensor | None]:
        """What `draw` needs for the next id of every row."""
        sampled = [index for index, row in enumerate(rows) if not row.greedy]
        if not sampled:
            return None, None
        noise = [rows[index].noise[len(rows[index].completion.ids)] for index in sampled]
        uniform = torch.tensor(noise, dtype=torch.float64, device=self._device)
        return uniform, None if len(sampled) == len(rows) else torch.tensor(sampled, device=self._device)

    def _record(self, rows: Sequence[_Row], ids: Tensor, logprobs: Tensor) -> None:
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.append(token, logprob, is_stop=token in self._stop_ids)

    def _prefill(self, rows: Sequence[_Row]) -> tuple[list[_Row], KVBlock, Tensor]:
        """The rows in another order, a block of their prompts, and the logits [N, V] after them; equal ones are read once."""
        for row, noise in zip(rows, uniforms([row.key for row in rows], max(row.limit for row in rows)).tolist(), strict=True):
            row.noise = noise
        readers: dict[tuple[int, tuple[int, ...]], _Row] = {}
        copies = [row for row in rows if readers.setdefault(row.source, row) is not row]
        places = {source: place for place, source in enumerate(readers)}
        block = KVBlock.allocate(
            self._model,
            len(rows),
            max(len(row.prompt) + row.limit for row in rows),
            written=min(row.known or len(row.prompt) for row in rows),
        )
        logits = []
        start = 0
        for part in _micro_batches(list(readers.values())):
            logits.append(self._read(part, block, start))
            start += len(part)
        sources = [places[row.source] for row in copies]
        for place, source in enumerate(sources, start):
            block.place(place, block.read(source))
        order = torch.tensor([*range(start), *sources], device=self._device)
        return [*readers.values(), *copies], block, torch.cat(logits)[order]

    def _read(self, rows: Sequence[_Row], block: KVBlock, start: int) -> Tensor:
        """Fills the slots of a block from `start` on with the rows' prompts; logits [N, V] after them."""
        for place, row in enumerate(rows, start):
            if row.memory:
                block.place(place, row.memory.states)
        width = max(len(row.unread) for row in rows)
        padded = [[*row.unread, *[self._pad_id] * (width - len(row.unread))] for row in rows]
        part = block.part(start, start + len(rows))
        hidden = self._model.hidden(torch.tensor(padded, device=self._device), cache=KVCache([part]))
        block.lengths[start : start + len(rows)] = [len(row.prompt) for row in rows]
        last = torch.tensor([len(row.unread) - 1 for row in rows], device=self._device)
        return self._model.head(hidden[torch.arange(len(rows), device=self._device), last])


def _blocks(rows: Sequence[_Row], max_rows: int, padding: int) -> Iterator[list[_Row]]:
    """Rows for one block each: similar in length, equal prompts side by side, and all or none with a memory."""
    block: list[_Row] = []
    padded = 0
    for row in sorted(rows, key=lambda row: (row.memory is not None, len(row.prompt), row.prompt)):
        padded += len(block) * (len(row.prompt) - len(block[-1].prompt)) if block else 0
        if block and (len(block) == max_rows or padded > padding or (row.memory is None) != (block[0].memory is None)):
            yield block
            block, padded = [], 0
        block.append(row)
    if block:
        yield block


def _micro_batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Neighbours of at most PREFILL_TOKENS unread padded positions (or one longer row)."""
    part: list[_Row] = []
    width = 0
    for row in rows:
        width = max(width, len(row.unread))
        if part and (len(part) + 1) * width > PREFILL_TOKENS:
            yield part
            part, width = [], len(row.unread)
        part.append(row)
    yield part
