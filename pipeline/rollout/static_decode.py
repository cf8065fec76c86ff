"""Decoding with static shapes, some ids of all rows at a time: a GPU replays one CUDA graph per id, the host waits per burst."""

from collections.abc import Collection, Sequence

from pipeline.model.config import ModelConfig
from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.rollout.rows import BLOCK_PADDING, Queue, Row, in_blocks, read_prompts, readers, written_by_prefill
from pipeline.rollout.static_batch import StaticBatch

BURST = 8
"""Ids per row between two looks of the host; a row that has ended decodes on for nothing until then."""
VISIBLE_STEP = 128
"""Attention reads a multiple of so many positions: few shapes to capture, little read for nothing."""
MIN_WIDTH = 8
"""Fewest slots of a step; fewer rows take no less time."""


class StaticDecoder:
    """Draws in slots that rows leave and waiting rows join at the end of a burst. Shapes and graphs outlive a call.

    The batch has `max_rows` slots or as many as there are rows, each as long as the longest row may become; when half of them are
    empty, a step is taken over half of them. The model is a dense one: experts choose tokens, and that decides shapes.
    """

    def __init__(self, stop_ids: Collection[int], pad_id: int, max_rows: int) -> None:
        """See `TorchRolloutEngine`."""
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._max_rows = max_rows
        self._batch: StaticBatch | None = None

    def decode(self, model: InferenceModel, rows: Sequence[Row], temperature: float) -> None:
        """Fills the completions.

        Args:
            model: the same object at every call.
            rows: what is to be completed.
            temperature: see `RolloutEngine.generate`.
        """
        if not rows:
            return
        batch = self._open_batch(model, rows)
        batch.begin(temperature)
        padding = BLOCK_PADDING[model.device.type]
        slots = min(self._max_rows, len(rows))  # no more, or the bytes of a call would depend on calls before
        queue = Queue(rows, slots)
        running: dict[int, Row] = {}  # by slot
        while running or queue:
            taken = queue.take(len(running))
            if not running and not taken:
                continue  # no finished row had a next turn
            batch = self._with_room(batch, taken)
            free = [slot for slot in range(slots) if slot not in running]
            for block in in_blocks(taken, padding):
                places, free = free[: len(block)], free[len(block) :]
                self._join(model, batch, block, places)
                running.update(zip(places, block, strict=True))
            width = _compact(batch, running, slots)
            self._burst(batch, running, width)
            for slot, row in list(running.items()):
                if row.finished:
                    if row.continuation is not None:
                        row.remember(batch.read(slot, row.num_read))
                        queue.follow(row)
                    del running[slot]

    def _open_batch(self, model: InferenceModel, rows: Sequence[Row]) -> StaticBatch:
        """The batch of the call before, or a larger one where it is too small for these rows."""
        slots, capacity = min(self._max_rows, len(rows)), _capacity(rows, model.config)
        if self._batch is not None:
            if self._batch.slots >= slots and self._batch.capacity >= capacity:
                return self._batch
            slots, capacity = max(slots, self._batch.slots), max(capacity, self._batch.capacity)
            self._batch = None  # its memory is needed for the next
        self._batch = StaticBatch(model, slots, capacity)
        return self._batch

    def _with_room(self, batch: StaticBatch, rows: Sequence[Row]) -> StaticBatch:
        """The batch, or a copy with longer slots where one of the rows, a later turn, does not fit."""
        capacity = _capacity(rows, batch.model.config)
        if capacity > batch.capacity:
            batch = self._batch = batch.lengthened(capacity)
        return batch

    def _join(self, model: InferenceModel, batch: StaticBatch, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Reads prompts, equal ones once, and puts the rows into slots."""
        first, sources = readers(rows)
        longest = max(len(row.prompt) for row in first)
        block = KVBlock.allocate(model, len(first), longest, written=written_by_prefill(first))
        logits = read_prompts(model, first, block, pad_id=self._pad_id)
        batch.join(rows, slots, sources, block, logits)

    def _burst(self, batch: StaticBatch, running: dict[int, Row], width: int) -> None:
        """Draws some ids for every row; what lies behind a row's end is dropped."""
        steps = min(BURST, max(row.missing for row in running.values()))
        # a row's own end, not the slot's, for slots are as long as calls before have made them
        reached = max(min(row.num_read + steps, len(row.prompt) + row.limit) for row in running.values())
        drawn = batch.burst(width, min(_round_up(reached, VISIBLE_STEP), batch.capacity), steps)
        for slot, row in running.items():
            known = 1 if row.completion.ids else 0  # the id that a row joined with was drawn, but not looked at
            for token, logprob in zip(*(values[slot][known:] for values in drawn), strict=True):
                row.append(token, logprob, is_stop=token in self._stop_ids)
                if row.finished:
                    break


def _compact(batch: StaticBatch, running: dict[int, Row], slots: int) -> int:
    """Moves rows to the first of the slots in use as far as fewer slots will then do; returns how many do."""
    width = min(max(MIN_WIDTH, 1 << (len(running) - 1).bit_length()), slots)
    outside = [slot for slot in running if slot >= width]
    free = [slot for slot in range(width) if slot not in running][: len(outside)]
    if outside:
        batch.move(outside, free)
        for source, target in zip(outside, free, strict=True):
            running[target] = running.pop(source)
    return width


def _capacity(rows: Sequence[Row], config: ModelConfig) -> int:
    """How many positions the longest of the rows may take, rounded up."""
    longest = max((len(row.prompt) + row.limit for row in rows), default=0)
    KVBlock.check_capacity(config, longest)
    return min(_round_up(longest, VISIBLE_STEP), config.max_position_embeddings)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
