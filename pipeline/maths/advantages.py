"""Advantages relative to a group of completions, and whitening over a whole step."""

import torch
from torch import Tensor

GROUP_STD_EPS = 1e-4
WHITEN_EPS = 1e-8
ROUNDING = 1e-5
"""What numbers of size 1 that ought to be equal may differ by: a reward model's scores of one answer do by about 3e-7, as the
shape of the batch decides how sums are rounded."""


def all_equal(values: Tensor) -> Tensor:
    """Whether the numbers along the last dimension, at least one, are equal up to rounding: bool `[...]`.

    They are when their spread is below `ROUNDING`, or below that share of the largest beyond 1. NaN equals nothing. Every
    question whether rewards say anything is this one: an optimizer such as Adam turns the faintest gradient into a full step.
    """
    spread = values.amax(-1) - values.amin(-1)
    return spread < ROUNDING * values.abs().amax(-1).clamp(min=1)


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
        `[P * G]`; exactly 0 for a group whose rewards are `all_equal`, which carries no signal.
    """
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(-1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (groups.std(-1, correction=0, keepdim=True) + GROUP_STD_EPS)
    return torch.where(all_equal(groups)[:, None], 0.0, advantages).view(-1)


@torch.no_grad()
def whiten(values: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all tokens of the step, biased variance.

    Args:
        values: `[N]`, of every token in the loss of the whole step, and of no other.

    Returns:
        `[N]`; exactly 0 where the values are `all_equal`: rounding would be blown up to unit variance.
    """
    if not len(values) or all_equal(values):
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred * torch.rsqrt(centred.square().mean() + WHITEN_EPS)
