"""Sampling from a `CausalLM` in this process: shared prefill, one KV cache for the batch, finished rows leave it.

Dimensions: N rows of a batch, T positions, V vocabulary.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.model.kv_cache import KVCache
from pipeline.model.transformer import CausalLM
from pipeline.rollout.records import Completion, StopReason
from pipeline.rollout.sampling import draw, uniforms

PREFILL_TOKENS = 2048
"""Padded prompt positions of one forward; bounds the activations of a prefill."""
COMPACT_FRAC = 0.25
"""Share of finished rows at which the batch is rebuilt without them: copying the cache costs one or two decode steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What `Completion.memory` holds: a row of a cache, which has read all ids of `context`."""

    context: tuple[int, ...]
    cache: KVCache
    row: int


@dataclass(slots=True)
class _Row:
    """A row that is being generated.

    `limit` is the most ids it may get, `memory` what was read of the prompt before.
    """

    prompt: tuple[int, ...]
    key: int
    limit: int
    completion: Completion
    memory: Memory | None = None
    finished: bool = False

    @property
    def unread(self) -> tuple[int, ...]:
        """The prompt behind what `memory` has read."""
        return self.prompt[len(self.memory.context) :] if self.memory else self.prompt

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
            max_rows: Most rows decoded together, >= 1; more are generated in turns.
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
        greedy: bool = False,
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
        previous = previous or [None] * len(prompts)
        if not len(prompts) == len(keys) == len(limits) == len(previous):
            counts = f"{len(prompts)} prompts, {len(keys)} keys, {len(limits)} limits, {len(previous)} previous completions"
            raise ValueError(f"{counts}: must be equally many")
        if temperature <= 0 or min(limits, default=1) < 1 or not all(len(prompt) for prompt in prompts):
            raise ValueError("generate: temperature must be > 0, max_new_tokens >= 1, and no prompt empty")
        rows = [
            _Row(tuple(prompt), key, limit, Completion([], [], StopReason.LENGTH), before.memory if before else None)
            for prompt, key, limit, before in zip(prompts, keys, limits, previous, strict=True)
        ]
        for row in rows:
            if row.memory and (not row.unread or row.prompt[: len(row.memory.context)] != row.memory.context):
                raise ValueError("generate: a prompt must begin with its previous completion's context and add to it")
        # neighbours of equal length waste no padding, and equal prompts lie side by side
        ordered = sorted(rows, key=lambda row: (row.memory is not None, len(row.prompt), row.prompt))
        with self._inference():
            for start in range(0, len(ordered), self._max_rows):
                self._decode(ordered[start : start + self._max_rows], temperature, greedy=greedy, remember=remember)
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

    def _decode(self, rows: list[_Row], temperature: float, *, greedy: bool, remember: bool) -> None:
        """Fills the completions of at most `max_rows` rows, ordered so that equal prompts are neighbours."""
        cache, logits = self._prefill(rows)
        stream = None if greedy else uniforms([row.key for row in rows], max(row.limit for row in rows)).to(self._device)
        for position in itertools.count():
            ids, logprobs = draw(logits, temperature, None if stream is None else stream[:, position])
            for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
                if not row.finished:
                    row.append(token, logprob, is_stop=token in self._stop_ids)
            going = [index for index, row in enumerate(rows) if not row.finished]
            leave = not going or len(rows) - len(going) >= COMPACT_FRAC * len(rows)
            if leave and remember:
                self._remember(rows, cache)
            if not going:
                return
            if leave:
                kept = torch.tensor(going, device=self._device)
                rows, cache, ids = [rows[index] for index in going], cache.select(kept), ids[kept]
                stream = None if stream is None else stream[kept]
            hidden = self._model.hidden(ids[:, None], cache=cache)
            # a finished row stands still, so that it never outgrows the cache
            cache.advance(torch.tensor([not row.finished for row in rows], device=self._device))
            logits = self._model.head(hidden[:, -1])

    def _remember(self, rows: Sequence[_Row], cache: KVCache) -> None:
        """Gives the finished rows of a batch what the next turn can build on; their last id was sampled but never read."""
        finished = {index: (*row.prompt, *row.completion.ids[:-1]) for index, row in enumerate(rows) if row.finished}
        numbers = torch.tensor(list(finished), device=self._device)
        own = KVCache.gather([cache], [numbers], max(map(len, finished.values())))
        for place, (index, context) in enumerate(finished.items()):
            rows[index].completion.memory = Memory(context, own, place)

    def _prefill(self, rows: list[_Row]) -> tuple[KVCache, Tensor]:
        """A cache of every row's prompt, and the logits [N, V] after it; each distinct new prompt is read once."""
        capacity = max(len(row.prompt) + row.limit for row in rows)
        KVCache.check_capacity(self._model.config, capacity)
        # rows that remember follow those that do not
        groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.memory or row.prompt)]
        caches, sources, logits = [], [], []
        for part in _micro_batches([group[0] for group in groups]):
            width = max(len(row.unread) for row in part)
            cache = self._recall([row.memory for row in part], width)
            padded = [[*row.unread, *[self._pad_id] * (width - len(row.unread))] for row in part]
            hidden = self._model.hidden(torch.tensor(padded, device=self._device), cache=cache)
            lengths = torch.tensor([len(row.unread) for row in part], device=self._device)
            cache.advance(lengths)
            numbers = torch.arange(len(part), device=self._device)
            copies = torch.tensor([len(group) for group in groups[: len(part)]], device=self._device)
            groups = groups[len(part) :]
            caches.append(cache)
            sources.append(numbers.repeat_interleave(copies))
            logits.append(self._model.head(hidden[numbers, lengths - 1])[sources[-1]])
        return KVCache.gather(caches, sources, capacity), torch.cat(logits)

    def _recall(self, memories: Sequence[Memory | None], new: int) -> KVCache:
        """A cache of what the rows, all or none of which remember, have read, with room for `new` more positions each."""
        known = [memory for memory in memories if memory is not None]
        if not known:
            return KVCache.allocate(self._model, len(memories), new)
        rows = torch.tensor([memory.row for memory in known], device=self._device).split(1)
        return KVCache.gather([memory.cache for memory in known], rows, max(len(memory.context) for memory in known) + new)


def _micro_batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Neighbours that all remember or all do not, of at most PREFILL_TOKENS unread padded positions (or one longer row)."""
    part: list[_Row] = []
    width = 0
    for row in rows:
        width = max(width, len(row.unread))
        if part and ((len(part) + 1) * width > PREFILL_TOKENS or (row.memory is None) != (part[0].memory is None)):
            yield part
            part, width = [], len(row.unread)
        part.append(row)
    yield part
