"""Decoding with shapes that follow the rows: one id per row and turn, read only as far as each block is used.

Dimensions: N rows of a batch, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import KVCache
from pipeline.rollout.rows import (
    BLOCK_PADDING,
    Queue,
    Row,
    in_blocks,
    read_prompts,
    readers,
    saved_by_sharing,
    written_by_prefill,
)
from pipeline.rollout.sampling import draw, uniforms
from pipeline.rollout.truncation import Truncation


@dataclass(frozen=True, slots=True)
class BlockDecoder:
    """Draws in one batch that rows leave and waiting rows join, on any device and with any model.

    The host knows every length and waits for every id, which costs a CPU nothing.

    Attributes:
        stop_ids, pad_id, max_rows, truncation: see `TorchRolloutEngine`.
    """

    stop_ids: Collection[int]
    pad_id: int
    max_rows: int
    truncation: Truncation | None = None

    def decode(self, model: InferenceModel, rows: Sequence[Row], temperature: float) -> None:
        """Fills the completions. Every turn of the loop draws one id for every row that is in the batch."""
        padding = BLOCK_PADDING[model.device.type]
        queue = Queue(rows, self.max_rows)
        batch: list[Row] = []
        cache = KVCache()
        while batch or queue:
            taken = queue.take(len(batch))
            if cache.slots + len(taken) > self.max_rows:
                cache.fit()
            joining, blocks, logits = self._read(model, taken, padding)
            # uploaded before the step is queued, so that it does not wait for it
            noise = self._noise([*batch, *joining], model.device)
            if batch:
                logits.insert(0, _step(model, batch, cache))
            batch += joining
            cache.blocks += blocks
            del blocks  # the cache alone decides how long they are held
            if not batch:
                continue  # no finished row had a next turn
            self._record(batch, *self._draw(batch, torch.cat(logits), temperature, noise))
            if not any(row.finished for row in batch):
                continue
            for index, row in enumerate(batch):
                if row.continuation is not None:
                    row.remember(cache.read(index))
                    queue.follow(row)
            batch = [batch[index] for index in cache.keep([not row.finished for row in batch], padding=padding)]

    def _noise(self, rows: Sequence[Row], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """What `draw` needs for the next id of every row."""
        sampled = [index for index, row in enumerate(rows) if not row.greedy]
        if not sampled:
            return None, None
        noise = [rows[index].noise[len(rows[index].completion.ids)] for index in sampled]
        uniform = torch.tensor(noise, dtype=torch.float64, device=device)
        return uniform, None if len(sampled) == len(rows) else torch.tensor(sampled, device=device)

    def _draw(
        self, rows: Sequence[Row], logits: Tensor, temperature: float, noise: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        if self.truncation is None:
            return draw(logits, temperature, *noise)
        seen = [(index, token) for index, row in enumerate(rows) for token in (*row.prompt, *row.completion.ids)]
        places, ids = torch.tensor(seen, device=logits.device).unbind(dim=1)
        mask = torch.zeros_like(logits, dtype=torch.bool).index_put((places, ids), torch.tensor(True, device=logits.device))
        return draw(self.truncation(logits / temperature, mask), 1.0, *noise)

    def _record(self, rows: Sequence[Row], ids: Tensor, logprobs: Tensor) -> None:
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.append(token, logprob, is_stop=token in self.stop_ids)

    def _read(self, model: InferenceModel, rows: Sequence[Row], padding: int) -> tuple[list[Row], list[KVBlock], list[Tensor]]:
        """The rows in another order, blocks of their prompts, and the logits after them."""
        joining: list[Row] = []
        blocks: list[KVBlock] = []
        logits: list[Tensor] = []
        for similar in in_blocks(rows, padding):
            fresh, block, last = self._prefill(model, similar)
            joining += fresh
            blocks.append(block)
            logits.append(last)
        return joining, blocks, logits

    def _prefill(self, model: InferenceModel, rows: Sequence[Row]) -> tuple[list[Row], KVBlock, Tensor]:
        """The rows in another order, a block of their prompts, and the logits [N, V] after them; equal ones are read once."""
        for row, noise in zip(rows, uniforms([row.key for row in rows], max(row.limit for row in rows)).tolist(), strict=True):
            row.noise = noise
        KVBlock.check_capacity(model.config, max(len(row.prompt) + row.limit for row in rows))
        first, sources = readers(rows)
        if model.shares_prefixes and saved_by_sharing(rows) > BLOCK_PADDING[model.device.type]:
            prefixes = KVBlock.allocate(
                model, len(first), max(len(row.prompt) for row in first), written=written_by_prefill(first)
            )
            logits = read_prompts(model, first, prefixes, pad_id=self.pad_id)
            block = KVBlock.behind(prefixes, sources, model, max(row.limit for row in rows))
            return list(rows), block, logits[torch.tensor(sources, device=model.device)]
        copies = [(row, source) for row, source in zip(rows, sources, strict=True) if row is not first[source]]
        capacity = max(len(row.prompt) + row.limit for row in rows)
        block = KVBlock.allocate(model, len(rows), capacity, written=written_by_prefill(rows))
        logits = read_prompts(model, first, block, pad_id=self.pad_id)
        for place, (_, source) in enumerate(copies, len(first)):
            block.place(place, block.read(source))
        order = torch.tensor([*range(len(first)), *(source for _, source in copies)], device=model.device)
        return [*first, *(row for row, _ in copies)], block, logits[order]


def _step(model: InferenceModel, rows: Sequence[Row], cache: KVCache) -> Tensor:
    """Reads the last id of every row; logits [N, V] of the next one."""
    ids = torch.tensor([row.completion.ids[-1:] for row in rows], device=model.device)
    hidden = model.hidden(ids, cache)
    cache.advance(1)
    return model.head(hidden[:, -1])
