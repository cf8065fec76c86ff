"""Advantages relative to a group of completions, and whitening over a whole step."""

import torch
from torch import Tensor

GROUP_STD_EPS = 1e-4
WHITEN_EPS = 1e-8


@torch.no_grad()
def group_advantages(rewards: Tensor, group_size: int, *, divide_by_std: bool = True) -> Tensor:
    """(reward - group mean) / (group std + 1e-4), population std (arXiv:2402.03300, section 4.1.2).

    trl divides by the sample's std, which is sqrt(G / (G - 1)) times larger.

    Args:
        rewards: `[P * G]`, the G completions of a prompt adjacent.
        group_size: G.
        divide_by_std: False leaves the centred rewards (arXiv:2503.20783: dividing favours prompts that are nearly solved or
            hopeless).

    Returns:
        `[P * G]`; exactly 0 for a group whose rewards are all equal, which carries no signal.
    """
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(-1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (groups.std(-1, correction=0, keepdim=True) + GROUP_STD_EPS)
    # The mean of equal floats may differ from them in the last bit, which the small divisor would blow up.
    equal = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, advantages).view(-1)


@torch.no_grad()
def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all tokens of the step, biased variance.

    Args:
        values: `[N]`, of every token in the loss of the whole step, and of no other.

    Returns:
        `[N]`; all 0 where the values are equal.
    """
    count = max(len(values), 1)
    centred = values - values.sum() / count
    return centred * torch.rsqrt(centred.square().sum() / count + WHITEN_EPS)
