"""Rotary position embedding (Su et al., arXiv:2104.09864), half-split as in Llama and Qwen3, with optional YaRN.

Dimensions: S positions, D head width.
"""

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig
from pipeline.params.schema import RopeScaling
from pipeline.yarn import stretched_band


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of every pair of dimensions, [D/2], fp32: theta^(-2i/D), stretched by YaRN where configured."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return frequencies
    return _yarn(frequencies, config.rope_theta, config.rope_scaling)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Tables that `apply_rope` reads, each [S, D] with S = max_position_embeddings + 1.

    The one position beyond the limit belongs to the spare slot of the KV cache, where padding goes; nothing attends to it.
    The first half of the sine table is negated, so that the rotation is a roll and two products.
    """
    positions = torch.arange(config.max_position_embeddings + 1, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config))
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of the last dimension of `x` by the angles of its positions.

    Args:
        x: [..., D].
        cos, sin: rows of `rope_tables`, broadcastable to `x`.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN by parts (arXiv:2309.00071, section 3.2): fast pairs keep their frequency, slow ones are divided by `factor`."""
    half = len(frequencies)
    window = scaling.original_max_position_embeddings
    low, high = stretched_band(2 * half, theta, window, scaling.beta_fast, scaling.beta_slow)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp + ramp / scaling.factor)
