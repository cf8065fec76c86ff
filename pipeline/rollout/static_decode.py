"""Decoding with static shapes, some ids of all rows at a time: a GPU replays one CUDA graph per id, the host waits per burst."""

from collections import deque
from collections.abc import Collection, Sequence

import torch

from pipeline.model.kv_cache import KVBlock
from pipeline.model.transformer import CausalLM
from pipeline.rollout.decoding_copy import decoding_copy
from pipeline.rollout.rows import BLOCK_PADDING, Row, in_blocks, read_prompts, readers, written_by_prefill
from pipeline.rollout.static_batch import StaticBatch

BURST = 8
"""Ids per row between two looks of the host; a row that has ended decodes on for nothing until then."""
VISIBLE_STEP = 128
"""Attention reads a multiple of so many positions: few shapes to capture, little read for nothing."""
MIN_WIDTH = 8
"""Fewest slots of a step; fewer rows take no less time."""
JOIN_FRAC = 0.125
"""Waiting rows join when so much of the slots is free: reading prompts holds up all others."""


class StaticDecoder:
    """Draws in slots that rows leave and waiting rows join at the end of a burst. Shapes and graphs outlive a call.

    The batch has `max_rows` slots or as many as there are rows, each as long as the longest row may become; when half of them are
    empty, a step is taken over half of them. The model is a dense one: experts choose tokens, and that decides shapes.
    """

    def __init__(
        self,
        model: CausalLM,
        stop_ids: Collection[int],
        pad_id: int,
        max_rows: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        """See `TorchRolloutEngine`; weights are copied at the start of each call."""
        if model.config.use_moe:
            raise ValueError("static shapes need a dense model: which experts a token goes to decides the shapes of a mixture")
        self._source = model
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._max_rows = max_rows
        self._autocast_dtype = autocast_dtype
        self._model: CausalLM | None = None
        self._batch: StaticBatch | None = None

    def decode(self, rows: Sequence[Row], temperature: float, *, remember: bool) -> None:
        """Fills the completions."""
        if not rows:
            return
        model = self._present_weights()
        batch = self._open_batch(model, rows)
        batch.begin(temperature)
        padding = BLOCK_PADDING[model.lm_head.weight.device.type]
        waiting = deque(row for block in in_blocks(rows, self._max_rows, padding) for row in block)
        running: dict[int, Row] = {}  # by slot
        while waiting or running:
            free = [slot for slot in range(batch.slots) if slot not in running]
            if waiting and len(free) >= min(len(waiting), max(1, int(batch.slots * JOIN_FRAC))):
                fresh = [waiting.popleft() for _ in range(min(len(waiting), len(free)))]
                for block in in_blocks(fresh, len(fresh), padding):
                    slots, free = free[: len(block)], free[len(block) :]
                    self._join(model, batch, block, slots)
                    running.update(zip(slots, block, strict=True))
            width = _compact(batch, running)
            self._burst(batch, running, width)
            for slot, row in list(running.items()):
                if row.finished:
                    if remember:
                        row.remember(batch.read(slot, row.num_read))
                    del running[slot]

    def _present_weights(self) -> CausalLM:
        """A copy of the model as it is now; it stays the same object, with tensors at the same addresses."""
        if self._model is None:
            self._model = decoding_copy(self._source, self._autocast_dtype)
        self._model.load_state_dict(self._source.state_dict())
        return self._model

    def _open_batch(self, model: CausalLM, rows: Sequence[Row]) -> StaticBatch:
        """The batch of the call before, or a larger one where it is too small for these rows."""
        slots = min(self._max_rows, len(rows))
        longest = max(len(row.prompt) + row.limit for row in rows)
        capacity = min(_round_up(longest, VISIBLE_STEP), model.config.max_position_embeddings)
        if self._batch is not None:
            if self._batch.slots >= slots and self._batch.capacity >= capacity:
                return self._batch
            slots, capacity = max(slots, self._batch.slots), max(capacity, self._batch.capacity)
            self._batch = None  # its memory is needed for the next
        self._batch = StaticBatch(model, slots, capacity)
        return self._batch

    def _join(self, model: CausalLM, batch: StaticBatch, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Reads prompts, equal ones once, and puts the rows into slots."""
        first, sources = readers(rows)
        longest = max(len(row.prompt) for row in first)
        block = KVBlock.allocate(model, len(first), longest, written=written_by_prefill(first))
        logits = read_prompts(model, first, block, pad_id=self._pad_id)
        batch.join(rows, slots, sources, block, logits)

    def _burst(self, batch: StaticBatch, running: dict[int, Row], width: int) -> None:
        """Draws some ids for every row; what lies behind a row's end is dropped."""
        steps = min(BURST, max(row.missing for row in running.values()))
        reached = max(row.num_read for row in running.values()) + steps
        drawn = batch.burst(width, min(_round_up(reached, VISIBLE_STEP), batch.capacity), steps)
        for slot, row in running.items():
            known = 1 if row.completion.ids else 0  # the id that a row joined with was drawn, but not looked at
            for token, logprob in zip(*(values[slot][known:] for values in drawn), strict=True):
                row.append(token, logprob, is_stop=token in self._stop_ids)
                if row.finished:
                    break


def _compact(batch: StaticBatch, running: dict[int, Row]) -> int:
    """Moves rows to the first slots as far as fewer slots will then do; returns how many do."""
    width = min(max(MIN_WIDTH, 1 << (len(running) - 1).bit_length()), batch.slots)
    outside = [slot for slot in running if slot >= width]
    free = [slot for slot in range(width) if slot not in running][: len(outside)]
    if outside:
        batch.move(outside, free)
        for source, target in zip(outside, free, strict=True):
            running[target] = running.pop(source)
    return width


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
