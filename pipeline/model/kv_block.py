"""Keys and values of rows that are attended to together: preallocated, written in place, one length per row.

Dimensions: N slots, S capacity, K key/value heads, D head width; P prefixes, G rows at most that share one.
"""

from collections.abc import Sequence
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
        self._sharing: Sharing | None = None

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

    def has_room_for(self, other: "KVBlock") -> bool:
        """Whether the rows of another block have slots here, long enough ones."""
        return len(self) + len(other) <= self.slots and other.capacity <= self.capacity

    def absorb(self, other: "KVBlock") -> None:
        """Appends the rows of another block; neither has prefixes."""
        if not self.has_room_for(other):
            self._move_all(len(self) + len(other), max(self.capacity, other.capacity))
        for row in range(len(other)):
            self.lengths.append(0)
            self.place(len(self) - 1, other.read(row))

    def sharing(self) -> "Sharing | None":
        """What a forward needs of the prefixes; made again when rows have left."""
        if self._sharing is None and self.prefixes is not None:
            self._sharing = Sharing(self.prefixes, self.sources)
        return self._sharing

    def part_with_prefixes(self) -> None:
        """Gives every row all of its positions here."""
        self._move_all(len(self), max(self.starts) + self.capacity)

    def _move_all(self, slots: int, capacity: int) -> None:
        """Moves the rows with all of their positions into new memory."""
        rows = [self.read(row) for row in range(len(self))]
        num_layers, both, _, num_kv_heads, _, head_dim = self.states.shape
        self.states = self.states.new_zeros((num_layers, both, slots, num_kv_heads, capacity + 1, head_dim))
        self.prefixes, self.sources = None, []
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
        mask: [P, 1, 1, S''], added to the scores.
        rows: [P, G], the rows that begin with each prefix, filled up with any row.
        places: [rows], where each row stands in the flattened `rows`.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    rows: Tensor
    places: Tensor


class Sharing:
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
        last = torch.tensor([length - 1 for length in prefixes.lengths], device=device)
        self._mask = visible_mask(last[:, None, None, None], self._used, prefixes.states.dtype)

    def of_layer(self, layer: int) -> Prefixes:
        keys, values = self._states[layer][..., : self._used, :].unbind()
        return Prefixes(keys, values, self._mask, self._rows, self._places)


def visible_mask(last: Tensor, used: int, dtype: torch.dtype) -> Tensor:
    """0 for positions up to `last` [..., 1] and -inf for those behind, [..., used]."""
    hidden = torch.arange(used, device=last.device) > last
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, -torch.inf)
