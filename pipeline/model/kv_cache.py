"""Keys and values of a growing batch of sequences: preallocated, written in place, one length per row.

Dimensions: B rows, S capacity, T new positions, K key/value heads, D head width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from pipeline.errors import ParamsError

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
        if capacity > config.max_position_embeddings:
            raise ParamsError(
                f"model.max_position_embeddings={config.max_position_embeddings}: must be >= {capacity}, "
                "the longest sequence that is to be generated; raise it, or lower max_prompt_len or max_new_tokens"
            )
        weight = model.lm_head.weight
        device = weight.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        shape = (batch, config.num_key_value_heads, capacity + 1, config.head_dim)
        # Zeros, because a masked position still enters the weighted sum of values as 0 * value, and 0 * NaN is NaN.
        keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        return cls(keys, values, torch.zeros(batch, dtype=torch.int64, device=device))

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
        return KVCache(
            [self._copy(layer, rows) for layer in self._keys],
            [self._copy(layer, rows) for layer in self._values],
            self.lengths[rows],
        )

    @classmethod
    def concat(cls, caches: Sequence["KVCache"]) -> "KVCache":
        """A new cache of the rows of all caches, in order; they are of one model and one capacity."""
        layers = range(len(caches[0]._keys))
        return cls(
            [torch.cat([cache._keys[layer] for cache in caches]) for layer in layers],
            [torch.cat([cache._values[layer] for cache in caches]) for layer in layers],
            torch.cat([cache.lengths for cache in caches]),
        )

    def _copy(self, layer: Tensor, rows: Tensor) -> Tensor:
        copy = layer.new_zeros((len(rows), *layer.shape[1:]))
        copy[:, :, : self.max_length] = layer[:, :, : self.max_length].index_select(0, rows)
        return copy
