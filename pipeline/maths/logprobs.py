"""Log-probabilities and entropies of given tokens, without a `[B, T, V]` tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.maths.chunks import over_wanted


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, softmax(logits / temperature).

    The temperature is the one that sampled: old, new and reference logprobs then belong to one distribution and
    the ratio of the first update is exactly 1. Beyond `chunk` trained positions logits are formed a chunk at a
    time and again in the backward pass. Measured over forward and backward: at most five fp32 tensors of `[chunk, V]`, and with
    `entropy_grad` one of bool, live at once beside two gradients of the weight and what grows with B * T * D.

    Args:
        hidden: `[..., D]`, after the final norm.
        head_weight: `[V, D]`.
        labels: `[...]`, `-100` where nothing is wanted; on the device of `hidden` or on the CPU, see `over_wanted`.
        temperature: > 0.
        entropy_grad: whether entropies carry a gradient, for a bonus on them.
        chunk: positions per matrix product; `chunks.KEPT_LOGITS` logits' worth when left out.

    Returns:
        Logprobs and entropies (nats), both `[...]` in fp32 (fp64 for fp64 input) and 0 where the label is -100. They differ from
        the plain fp32 formula by at most 1e-5 while logits / temperature stay within +-14, beyond by six roundings of the
        largest (1e-2 at 14000, as temperature 0.01 may give): chunks are other matrix products, which round differently.
    """
    parts, wanted = over_wanted(_chunk_logprobs, hidden, head_weight, labels, temperature, entropy_grad, chunk=chunk)
    logprobs = torch.cat([part[0] for part in parts])
    entropy = torch.cat([part[1] for part in parts])
    empty = logprobs.new_zeros(labels.shape)
    return empty.masked_scatter(wanted, logprobs), empty.masked_scatter(wanted, entropy)


def _chunk_logprobs(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, head_weight.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels[:, None]).squeeze(-1) - normaliser
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        # A logit of -inf has probability 0 and adds nothing; 0 * -inf would be NaN.
        surprise = torch.where(logits == -torch.inf, 0.0, normaliser[:, None] - logits)
        entropy = (surprise * (logits - normaliser[:, None]).exp()).sum(-1)
    return logprobs, entropy
