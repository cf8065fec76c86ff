"""Cross-entropy as a sum and a count, without a `[B, T, V]` tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.maths.chunks import over_wanted


def cross_entropy_sum(hidden: Tensor, head_weight: Tensor, labels: Tensor, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy (nats) over the trained positions and how many there are.

    Divide by the number of trained positions of the whole optimizer step: a mean per micro-batch would weigh the
    tokens of short batches more. Beyond `chunk` trained positions logits are formed a chunk at a time and again in
    the backward pass: at most three fp32 tensors of `[chunk, V]` live at once beside two gradients of the weight and what
    grows with B * T * D.

    Args:
        hidden: `[..., D]`, after the final norm.
        head_weight: `[V, D]`.
        labels: `[...]`, `-100` where nothing is trained; on the device of `hidden` or on the CPU, see `over_wanted`.
        chunk: positions per matrix product; `chunks.KEPT_LOGITS` logits' worth when left out.

    Returns:
        The sum (0-d, fp32; 0 with zero gradients when nothing is trained) and the count (0-d, int64).
    """
    parts, trained = over_wanted(_chunk_cross_entropy, hidden, head_weight, labels, chunk=chunk)
    return torch.stack(parts).sum(), trained.sum()


def _chunk_cross_entropy(hidden: Tensor, head_weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, head_weight.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum")
