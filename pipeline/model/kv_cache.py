"""Keys and values of a growing batch of sequences, in blocks of similar length, and what one forward pass reads of them.

Dimensions: B rows, T new positions, K key/value heads, D head width.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.model.kv_block import KVBlock, Prefixes, visible_mask

MOVED = 8
"""Blocks are moved into new memory to become one as long as that has so many times what a step may read for nothing."""


class Span(NamedTuple):
    """What one forward reads of one block.

    Attributes:
        rows: the block's rows in the batch.
        keys: [rows, K, S', D], of all positions in use, the new ones included; those of prefixes left out.
        values: as `keys`.
        mask: [rows, 1, T, S'], added to the scores, -inf where a query does not see a key; None where the T positions are the
            first of every row and causal attention within them is all there is.
        prefixes: what rows begin with, where that lies elsewhere; T is 1 then.
    """

    rows: slice
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    prefixes: Prefixes | None = None


class KVCache:
    """The attention memory of `InferenceModel.hidden(input_ids, cache)`: the rows of its blocks, one behind the other.

    A forward writes T new positions behind each row's own length; it does not move the lengths. `advance` does, by as many
    positions per row as are to be kept: rows of one forward may be right-padded, and what lies behind a row's length is
    invisible and overwritten by the next forward. Lengths are known to the host alone, so nothing waits for the device.
    """

    def __init__(self, blocks: Iterable[KVBlock] = ()) -> None:
        self.blocks = list(blocks)

    def __len__(self) -> int:
        """B, the number of rows."""
        return sum(map(len, self.blocks))

    @property
    def slots(self) -> int:
        """For how many rows memory is held."""
        return sum(block.slots for block in self.blocks)

    @property
    def lengths(self) -> list[int]:
        """Visible positions per row."""
        return [length for block in self.blocks for length in block.lengths]

    def read(self, row: int) -> Tensor:
        """See `KVBlock.read`."""
        for block in self.blocks:
            if row < len(block):
                return block.read(row)
            row -= len(block)
        raise IndexError(f"KVCache.read: no such row among {len(self)}")

    def open(self, num_new: int) -> "CacheForward":
        """What a forward of `num_new` positions per row needs."""
        return CacheForward(self.blocks, num_new)

    def advance(self, num_new: int | Sequence[int]) -> None:
        """Makes the first `num_new` (per row, or one number for all rows) positions of the last forward visible.

        Raises:
            ValueError: a row would exceed its block's capacity.
        """
        steps = iter([num_new] * len(self) if isinstance(num_new, int) else num_new)
        lengths = [[length + next(steps) for length in block.lengths] for block in self.blocks]
        for block, after in zip(self.blocks, lengths, strict=True):
            own = max((length - start for length, start in zip(after, block.starts, strict=True)), default=0)
            if own > block.capacity:
                raise ValueError(f"KVCache.advance: a row of {own} positions exceeds the capacity of {block.capacity}")
        for block, after in zip(self.blocks, lengths, strict=True):
            block.lengths = after

    def fit(self) -> None:
        """Gives up the slots that no row stands in."""
        for block in self.blocks:
            block.fit()

    def keep(self, going: Sequence[bool], *, padding: int) -> list[int]:
        """Drops the other rows and joins blocks that became small; returns for each row left the number that it had.

        Args:
            going: per row whether it stays.
            padding: two blocks become one if the rows of one are shorter by at most so many positions in all: what attention
                reads for nothing then costs less than the operations of another block. A block whose rows save no more than
                that by sharing prefixes parts with them.
        """
        left: list[tuple[KVBlock, list[int]]] = []
        start = 0
        for block in self.blocks:
            stop = start + len(block)
            numbers = [start + row for row in block.keep(going[start:stop])]
            start = stop
            if not len(block):
                continue
            if block.prefixes is not None and block.saved <= padding:
                block.part_with_prefixes()
            if left and _belong_together(left[-1][0], block, padding):
                earlier, its_numbers = left.pop()
                block.absorb(earlier)
                numbers += its_numbers
            left.append((block, numbers))
        self.blocks = [block for block, _ in left]
        return [number for _, numbers in left for number in numbers]


def _belong_together(earlier: KVBlock, later: KVBlock, padding: int) -> bool:
    """Whether two blocks are so near in length, and moving their rows is so cheap, that they should be one."""
    if earlier.prefixes is not None or later.prefixes is not None:
        return False
    shorter, longer = sorted((earlier, later), key=lambda block: block.max_length)
    if len(shorter) * (longer.max_length - shorter.max_length) > padding:
        return False
    needed = (len(earlier) + len(later)) * max(earlier.capacity, later.capacity)
    return later.has_room_for(earlier) or needed <= MOVED * padding


class CacheForward:
    """One forward over the rows of a cache: where its T positions go, and what they see.

    Attributes:
        positions: [B, T] int64, the position of each new token. What would lie beyond a block's capacity goes to a spare slot
            that nothing attends to: the longest row of a block needs no room for padding, and `advance` refuses to make it
            visible.
    """

    def __init__(self, blocks: Sequence[KVBlock], num_new: int) -> None:
        rows = [
            (length, start, block.capacity) for block in blocks for length, start in zip(block.lengths, block.starts, strict=True)
        ]
        lengths, starts, capacities = torch.tensor(rows).view(-1, 3, 1).unbind(1)
        places = torch.minimum(lengths - starts + torch.arange(num_new), capacities)
        self.positions, places = torch.stack((starts + places, places)).to(blocks[0].states.device)
        self._plans = []
        first = 0
        for block in blocks:
            span = slice(first, first + len(block))
            first = span.stop
            self._plans.append(_Plan(block, span, places[span]))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[Span]:
        """Stores keys and values [B, T, K, D]; yields what the queries of each block's rows attend to."""
        for plan in self._plans:
            yield plan.write(layer, keys[plan.rows], values[plan.rows])


class _Plan:
    """The part of a `CacheForward` that concerns one block; `places` [rows, T] is where its new positions go."""

    def __init__(self, block: KVBlock, rows: slice, places: Tensor) -> None:
        num_new, own = places.shape[1], [length - start for length, start in zip(block.lengths, block.starts, strict=True)]
        longest = max(own)
        self.rows = rows
        self._states = block.states[:, :, : len(block)]
        self._used = min(longest + num_new, block.capacity)
        self._places = places
        self._numbers = torch.arange(len(block), device=places.device)[:, None]
        # rows of one length are written as one slice
        self._start = longest if min(own) == longest and longest + num_new <= block.capacity else None
        self._mask = visible_mask(places[:, None, :, None], self._used, block.states.dtype) if block.max_length else None
        self._sharing = block.sharing()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> Span:
        own = self._states[layer]
        for mine, new in zip(own.unbind(), (keys, values), strict=True):
            if self._start is None:
                mine[self._numbers, :, self._places] = new
            else:
                mine[:, :, self._start : self._used] = new.transpose(1, 2)
        used_keys, used_values = own[..., : self._used, :].unbind()
        return Span(self.rows, used_keys, used_values, self._mask, self._sharing.of_layer(layer) if self._sharing else None)
