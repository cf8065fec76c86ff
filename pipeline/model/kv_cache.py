"""Keys and values of a growing batch of sequences: preallocated, written in place, one length per row.

Dimensions: B rows, N slots, S capacity, T new positions, K key/value heads, D head width.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig

if TYPE_CHECKING:
    from pipeline.model.inference import InferenceModel


class KVBlock:
    """Rows of similar length in one tensor: attention reads all of them as far as the longest is used.

    Rows stand in the first slots. The order of rows means nothing, so a row that leaves is replaced by the last one.

    Attributes:
        states: [layers, 2 (keys, values), N, K, S + 1, D].
        lengths: visible positions of each row, those of its prefix included.
        prefixes: rows of another block with which rows of this one begin, or None where every row has all of its positions
            here. Attention reads a prefix once for all rows that share it.
        sources: with prefixes, which of them each row begins with.
    """

    def __init__(
        self, states: Tensor, lengths: list[int], prefixes: "KVBlock | None" = None, sources: Sequence[int] = ()
    ) -> None:
        self.states = states
        self.lengths = lengths
        self.prefixes = prefixes
        self.sources = list(sources)
        self._sharing: _Sharing | None = None

    @classmethod
    def allocate(cls, model: "InferenceModel", slots: int, capacity: int, *, written: int = 0) -> Self:
        """Empty rows in all slots, on the model's device, in the type of its products.

        Args:
            model: whose keys and values are kept.
            slots: N.
            capacity: S, the most positions a row may hold.
            written: how many positions every row gets before any of them is attended to behind its length.

        Raises:
            ParamsError: `capacity` exceeds model.max_position_embeddings.
        """
        cls.check_capacity(model.config, capacity)
        states = _empty_states(model, slots, capacity)
        # Zeros, because a masked position still enters the weighted sum of values as 0 * value, and 0 * NaN is NaN.
        states[..., written:, :].zero_()
        return cls(states, [0] * slots)

    @classmethod
    def behind(cls, prefixes: "KVBlock", sources: Sequence[int], model: "InferenceModel", capacity: int) -> Self:
        """A row for each of `sources`, which goes on from that row of `prefixes` by at most `capacity` positions."""
        lengths = [prefixes.lengths[source] for source in sources]
        return cls(_empty_states(model, len(sources), capacity).zero_(), lengths, prefixes, sources)

    @staticmethod
    def check_capacity(config: ModelConfig, capacity: int) -> None:
        """Raises ParamsError where `capacity` positions are more than the model has."""
        if capacity > config.max_position_embeddings:
            raise ParamsError(
                f"model.max_position_embeddings={config.max_position_embeddings}: must be >= {capacity}, "
                "the longest sequence that is to be generated; raise it, or lower max_prompt_len or max_new_tokens"
            )

    @staticmethod
    def bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
        """What the keys and values of one position of one row take in all layers."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.lengths)

    @property
    def slots(self) -> int:
        """N, the most rows."""
        return self.states.shape[2]

    @property
    def capacity(self) -> int:
        """S, the most positions of a row that lie here."""
        return self.states.shape[4] - 1

    @property
    def max_length(self) -> int:
        """The longest row's length."""
        return max(self.lengths, default=0)

    @property
    def starts(self) -> list[int]:
        """For each row the position that is its first one here."""
        if self.prefixes is None:
            return [0] * len(self)
        return [self.prefixes.lengths[source] for source in self.sources]

    @property
    def saved(self) -> int:
        """How many positions attention need not read because rows share a prefix."""
        if self.prefixes is None:
            return 0
        return sum(self.starts) - sum(self.prefixes.lengths[source] for source in set(self.sources))

    def read(self, row: int) -> Tensor:
        """The visible positions of a row, [layers, 2, K, length, D]; a view, where the row has no prefix."""
        if self.prefixes is None:
            return self._own(row)
        return torch.cat((self.prefixes.read(self.sources[row]), self._own(row)), dim=3)

    def place(self, row: int, states: Tensor) -> None:
        """Makes what `read` gave of another row (of any block of the model) the content of this one, which has no prefix."""
        self.lengths[row] = states.shape[3]
        self.states[:, :, row, :, : states.shape[3]] = states

    def part(self, start: int, stop: int) -> "KVBlock":
        """Rows start..stop-1 as a block that shares their positions, but not their lengths; without prefixes."""
        return KVBlock(self.states[:, :, start:stop], self.lengths[start:stop])

    def keep(self, going: Sequence[bool]) -> list[int]:
        """Drops the other rows, and prefixes that none is left of; returns for each row that is left the number that it had."""
        numbers = list(range(len(self)))
        self._sharing = None
        for row in reversed(numbers):
            if not going[row]:
                last = len(self) - 1
                if row != last:
                    self._move(last, row)
                    numbers[row] = numbers[last]
                self.lengths.pop()
                del self.sources[last:]
                numbers.pop()
        if self.prefixes is not None:
            begun = set(self.sources)
            kept = self.prefixes.keep([number in begun for number in range(len(self.prefixes))])
            places = {number: place for place, number in enumerate(kept)}
            self.sources = [places[source] for source in self.sources]
        return numbers

    def fit(self) -> None:
        """Gives up the slots that no row stands in."""
        if len(self) < self.slots:
            self.states = self.states[:, :, : len(self)].clone()
        if self.prefixes is not None:
            self.prefixes.fit()

    def absorb(self, other: "KVBlock") -> None:
        """Appends the rows of another block, for which there must be slots; this one has no prefixes."""
        for row in range(len(other)):
            self.lengths.append(0)
            self.place(len(self) - 1, other.read(row))

    def sharing(self) -> "_Sharing | None":
        """What a forward needs of the prefixes; made again when rows have left."""
        if self._sharing is None and self.prefixes is not None:
            self._sharing = _Sharing(self.prefixes, self.sources)
        return self._sharing

    def part_with_prefixes(self) -> None:
        """Gives every row all of its positions here."""
        rows = [self.read(row) for row in range(len(self))]
        capacity = max(self.starts) + self.capacity
        states = self.states.new_zeros(
            (*self.states.shape[:2], len(rows), self.states.shape[3], capacity + 1, self.states.shape[5])
        )
        self.states, self.prefixes, self.sources = states, None, []
        for row, content in enumerate(rows):
            self.place(row, content)

    def _own(self, row: int) -> Tensor:
        return self.states[:, :, row, :, : self.lengths[row] - self.starts[row]]

    def _move(self, source: int, target: int) -> None:
        own = self._own(source)
        self.states[:, :, target, :, : own.shape[3]] = own
        self.lengths[target] = self.lengths[source]
        if self.prefixes is not None:
            self.sources[target] = self.sources[source]


def _empty_states(model: "InferenceModel", slots: int, capacity: int) -> Tensor:
    config = model.config
    shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, capacity + 1, config.head_dim)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


class Prefixes(NamedTuple):
    """What the rows of a span begin with; P prefixes, G rows at most that share one, S'' positions of the longest.

    Attributes:
        keys: [P, K, S'', D].
        values: as `keys`.
        mask: [rows, 1, 1, S''], added to the scores.
        rows: [P, G], the rows that begin with each prefix, filled up with any row.
        places: [rows], where each row stands in the flattened `rows`.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    rows: Tensor
    places: Tensor


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
            padding: a block goes into the free slots of the next one if its rows are shorter by at most so many positions in
                all: what attention reads for nothing then costs less than the operations of another block. A block whose rows
                save no more than that by sharing prefixes parts with them.
        """
        left: list[tuple[KVBlock, list[int]]] = []
        start = 0
        for block in self.blocks:
            stop = start + len(block)
            numbers = [start + row for row in block.keep(going[start:stop])]
            start = stop
            if block.prefixes is not None and len(block) and block.saved <= padding:
                block.part_with_prefixes()
            if left and _fits(left[-1][0], block, padding):
                smaller, its_numbers = left.pop()
                block.absorb(smaller)
                numbers += its_numbers
            if len(block):
                left.append((block, numbers))
        self.blocks = [block for block, _ in left]
        return [number for _, numbers in left for number in numbers]


def _fits(block: KVBlock, other: KVBlock, padding: int) -> bool:
    """Whether the rows of `block` have room in `other`, and `other` is so near in length that they should move there."""
    wasted = len(block) * (other.max_length - block.max_length)
    if block.prefixes is not None or other.prefixes is not None:
        return False
    return len(block) + len(other) <= other.slots and block.capacity <= other.capacity and 0 <= wasted <= padding


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
        self._mask = _mask(places[:, None, :, None], self._used, block.states.dtype) if block.max_length else None
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


class _Sharing:
    """Which of a block's rows begin with which prefix, and what of the prefixes is read."""

    def __init__(self, prefixes: KVBlock, sources: Sequence[int]) -> None:
        device = prefixes.states.device
        sharing: list[list[int]] = [[] for _ in range(len(prefixes))]
        for row, source in enumerate(sources):
            sharing[source].append(row)
        width = max(map(len, sharing))
        places = {row: number * width + place for number, rows in enumerate(sharing) for place, row in enumerate(rows)}
        self._rows = torch.tensor([rows + [0] * (width - len(rows)) for rows in sharing], device=device)
        self._places = torch.tensor([places[row] for row in range(len(sources))], device=device)
        self._used = prefixes.max_length
        self._states = prefixes.states[:, :, : len(prefixes)]
        last = torch.tensor([prefixes.lengths[source] - 1 for source in sources], device=device)
        self._mask = _mask(last[:, None, None, None], self._used, prefixes.states.dtype)

    def of_layer(self, layer: int) -> Prefixes:
        keys, values = self._states[layer][..., : self._used, :].unbind()
        return Prefixes(keys, values, self._mask, self._rows, self._places)


def _mask(last: Tensor, used: int, dtype: torch.dtype) -> Tensor:
    """0 for positions up to `last` [..., 1] and -inf for those behind, [..., used]."""
    hidden = torch.arange(used, device=last.device) > last
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, -torch.inf)
