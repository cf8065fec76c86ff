"""Drawing ids from logits, with random numbers that are a function of (key, position) alone.

Dimensions: N rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_KEY_BITS = 64


def fold_key(key: int, index: int) -> int:
    """A 64-bit key that is a fixed function of a key and an index: one stream for each turn of a trajectory."""
    return int.from_bytes(hashlib.blake2b(f"{key}/{index}".encode(), digest_size=_KEY_BITS // 8).digest(), "big")


def uniforms(keys: Sequence[int], num_positions: int) -> Tensor:
    """Numbers in [0, 1), float64, [N, num_positions]; entry (row, position) depends on keys[row] and position alone.

    The streams are counter-based (Philox, Salmon et al., SC 2011), so equal keys give equal rows and a longer row begins with
    the shorter one.
    """
    streams = (np.random.Generator(np.random.Philox(key=key % 2**_KEY_BITS)) for key in keys)
    return torch.from_numpy(np.stack([stream.random(num_positions) for stream in streams]))


def draw(logits: Tensor, temperature: float, uniform: Tensor | None, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One id per row and its logprob, under softmax(logits / temperature) in fp32.

    Args:
        logits: [N, V] of any floating type.
        temperature: > 0.
        uniform: float64 in [0, 1), one for every row that is sampled: the id is the first whose cumulative probability exceeds
            it (inverse transform sampling). None takes the most probable id of all rows.
        rows: int64, the rows that `uniform` belongs to; the others take their most probable id. None samples all N.

    Returns:
        ids: [N] int64.
        logprobs: [N] float32.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if uniform is None:
        ids = logprobs.argmax(dim=-1)
    elif rows is None:
        ids = _invert(logprobs, uniform)
    else:
        ids = logprobs.argmax(dim=-1)
        ids[rows] = _invert(logprobs[rows], uniform)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def draw_flagged(logits: Tensor, temperature: Tensor, uniform: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """What `draw` gives, by the same operations whichever rows are greedy, so that a CUDA graph can replay them.

    Args:
        logits: [N, V] of any floating type.
        temperature: scalar, > 0.
        uniform: [N], float64 in [0, 1).
        greedy: [N] bool, True where a row takes its most probable id and its number counts for nothing.

    Returns:
        ids: [N] int64.
        logprobs: [N] float32.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    ids = torch.where(greedy, logprobs.argmax(dim=-1), _invert(logprobs, uniform))
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def _invert(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The first id of each row whose cumulative probability exceeds the row's number, [N]."""
    # fp64, because fp32 sums lose the tail: near 1 they cannot hold a probability below 6e-8
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]  # the sum is 1 up to rounding; never beyond the last id this way
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)
