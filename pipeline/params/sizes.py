"""What a model's shape weighs, before there is a model."""

from typing import Protocol


class Shape(Protocol):
    """What decides it: section `model`, or the configuration of a checkpoint."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def use_moe(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...


def num_parameters(shape: Shape, vocab_size: int) -> int:
    """Number of trainable parameters; the tied embedding and head count once."""
    width, head_dim = shape.hidden_size, shape.head_dim
    attention = 2 * width * head_dim * (shape.num_attention_heads + shape.num_key_value_heads) + 2 * head_dim
    if shape.use_moe:
        mlp = shape.num_experts * (3 * width * shape.moe_intermediate_size + width)
    else:
        mlp = 3 * width * shape.intermediate_size
    return vocab_size * width + shape.num_hidden_layers * (attention + mlp + 2 * width) + width


def cache_bytes(shape: Shape, positions: int, itemsize: int) -> int:
    """Bytes that the keys and values of one row of so many positions, and one more, take while it is sampled."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * itemsize * (positions + 1)
