"""Keys and values of a growing batch of sequences: preallocated, written in place, one length per row.

Dimensions: B rows, S capacity, T new positions, K key/value heads, D head width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig

if TYPE_CHECKING:
    from pipeline.model.transformer import CausalLM


class KVCache:
    """The attention memory of `CausalLM.hidden(input_ids, cache=...)`.

    A forward writes T new positions behind each row's own length; it does not move the lengths. `advance` does, by as many
    positions per row as are to be kept: rows of one forward may be right-padded, and what lies behind a row's length is
    invisible and overwritten by the next forward.

    Attributes:
        lengths: [B] int64, visible positions per row.
        capacity: S, the most positions a row may hold.
        max_length: the largest of `lengths`, as a number.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor) -> None:
        """Takes per-layer tensors [B, K, S + 1, D] and lengths [B]; `allocate` makes them."""
        self._keys = keys
        self._values = values
        self.lengths = lengths
        self.capacity = keys[0].shape[2] - 1
        self.max_length = int(lengths.max()) if len(lengths) else 0
        self._rows = torch.arange(len(lengths), device=lengths.device)[:, None]

    @classmethod
    def allocate(cls, model: "CausalLM", batch: int, capacity: int) -> Self:
        """An empty cache on the model's device, in the type of its activations (autocast included).

        Raises:
            ParamsError: `capacity` exceeds model.max_position_embeddings.
        """
        config = model.config
        cls.check_capacity(config, capacity)
        weight = model.lm_head.weight
        device = weight.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        shape = (batch, config.num_key_value_heads, capacity + 1, config.head_dim)
        # Zeros, because a masked position still enters the weighted sum of values as 0 * value, and 0 * NaN is NaN.
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        return cls(keys, values, torch.zeros(batch, dtype=torch.int64, device=device))

    @staticmethod
    def check_capacity(config: ModelConfig, capacity: int) -> None:
        """Raises ParamsError where `capacity` positions are more than the model has."""
        if capacity > config.max_position_embeddings:
            raise ParamsError(
                f"model.max_position_embeddings={config.max_position_embeddings}: must be >= {capacity}, "
                "the longest sequence that is to be generated; raise it, or lower max_prompt_len or max_new_tokens"
            )

    def __len__(self) -> int:
        """B, the number of rows."""
        return len(self.lengths)

    def positions(self, num_new: int) -> Tensor:
        """Position of each of the next `num_new` tokens of every row, [B, T].

        What would lie beyond the capacity goes to a spare slot that nothing attends to: the longest row of a batch needs no
        room for padding. `advance` refuses to make it visible.
        """
        positions = self.lengths[:, None] + torch.arange(num_new, device=self.lengths.device)
        return positions if self.max_length + num_new <= self.capacity else positions.clamp(max=self.capacity)

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, T, K, D] at `positions` [B, T]; returns those of all used positions, [B, K, S', D] each."""
        self._keys[layer][self._rows, :, positions] = keys
        self._values[layer][self._rows, :, positions] = values
        used = min(self.max_length + keys.shape[1], self.capacity)
        return self._keys[layer][:, :, :used], self._values[layer][:, :, :used]

    def advance(self, num_new: int | Tensor) -> None:
        """Makes the first `num_new` ([B] or one number for all rows) positions of the last forward visible.

        Raises:
            ValueError: a row would exceed the capacity.
        """
        lengths = self.lengths + num_new
        max_length = self.max_length + num_new if isinstance(num_new, int) else int(lengths.max()) if len(lengths) else 0
        if max_length > self.capacity:
            raise ValueError(f"KVCache.advance: a row of {max_length} positions exceeds the capacity of {self.capacity}")
        self.lengths, self.max_length = lengths, max_length

    def select(self, rows: Tensor) -> "KVCache":
        """A new cache of the given rows ([N] int64), which may be dropped, reordered or repeated; this one stays as it is."""
        return self.gather([self], [rows], self.capacity)

    @classmethod
    def gather(cls, caches: Sequence["KVCache"], rows: Sequence[Tensor], capacity: int) -> "KVCache":
        """A new cache of `capacity` positions that holds rows of several caches of one model.

        Args:
            caches: where the rows are; they stay as they are.
            rows: per cache the row numbers to take ([N] int64), which may be dropped, reordered or repeated.
            capacity: at least the length of every row taken.
        """
        layers = range(len(caches[0]._keys))
        return cls(
            [_gather([cache._keys[layer] for cache in caches], caches, rows, capacity) for layer in layers],
            [_gather([cache._values[layer] for cache in caches], caches, rows, capacity) for layer in layers],
            torch.cat([cache.lengths[taken] for cache, taken in zip(caches, rows, strict=True)]),
        )


def _gather(tensors: list[Tensor], caches: Sequence[KVCache], rows: Sequence[Tensor], capacity: int) -> Tensor:
    """The used positions of the rows taken, and zeros behind them."""
    _, heads, _, head_dim = tensors[0].shape
    gathered = tensors[0].new_empty((sum(map(len, rows)), heads, capacity + 1, head_dim))
    places = gathered.split([len(taken) for taken in rows])
    for tensor, cache, taken, place in zip(tensors, caches, rows, places, strict=True):
        used = min(cache.max_length, capacity)
        place[:, :, :used] = tensor[:, :, :used].index_select(0, taken)
        place[:, :, used:] = 0
    return gathered
