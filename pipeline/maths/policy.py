"""Policy-gradient losses on sampled tokens: GRPO, CISPO, PPO, and the KL estimators beside them.

Three policies: the current one (`logprobs`, with gradient), the one that sampled (`old_logprobs`) and the frozen start
(`ref_logprobs`). All three are logprobs of the same tempered distribution.
"""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is finite in fp32 and beyond every clip; without it 0 * inf would be NaN
MAX_K3_EXPONENT = 5.0


def k3(log_ratio: Tensor) -> Tensor:
    """Per-token estimate exp(d) - d - 1 of a KL divergence, with its exponential continued linearly above d = 5.

    For samples x ~ p and d = log q(x) - log p(x) its mean estimates KL(p || q) without bias (Schulman 2020,
    http://joschu.net/blog/kl-approx.html, k3). It is non-negative and zero iff d = 0. A token that p finds a million
    times less likely than q would alone contribute a million; beyond d = 5 the exponential therefore goes on along its
    tangent: finite and still growing, with the bounded gradient e^5 - 1 that pulls such a token back.
    """
    exponent = log_ratio.clamp(max=MAX_K3_EXPONENT)
    # expm1: near 0 the value is d^2 / 2, which exp(d) - 1 would lose to rounding and could turn negative
    return torch.expm1(exponent) + exponent.exp() * (log_ratio - exponent) - log_ratio


def group_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss: Literal["cispo", "grpo"],
    clip_eps_low: float,
    clip_eps_high: float,
    ratio_cap: float,
    kl_coef: float,
    num_sequences: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group-relative loss: mean over the tokens of each completion, then mean over the completions of the step.

    `grpo` (arXiv:2402.03300 eq. 3): -min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A).
    `cispo` (arXiv:2506.13585 eq. 4): -stop_gradient(min(r, ratio_cap)) A logp; every token keeps its gradient.
    Both add kl_coef * k3 against the reference per token.

    Args:
        logprobs, old_logprobs, ref_logprobs: `[B, T]`.
        advantages: `[B]`, one per completion.
        loss_mask: `[B, T]` bool. A row without tokens contributes nothing.
        num_sequences: completions with at least one token in the whole optimizer step.

    Returns:
        Loss (0-d) and `policy_metrics`, where clipped means outside the grpo range or above the cispo cap.
    """
    logprobs, old_logprobs, ref_logprobs = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs)
    advantages = torch.where(loss_mask, advantages[:, None], 0.0)
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if loss == "cispo":
        bounds = (0.0, ratio_cap)
        token_loss = -ratio.clamp(max=ratio_cap).detach() * advantages * logprobs
    else:
        bounds = (1 - clip_eps_low, 1 + clip_eps_high)
        token_loss = -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    token_loss = token_loss + kl_coef * k3(ref_logprobs - logprobs)
    lengths = loss_mask.sum(-1).clamp(min=1)
    total = (torch.where(loss_mask, token_loss, 0.0).sum(-1) / lengths).sum() / max(num_sequences, 1)
    return total, policy_metrics(logprobs, old_logprobs, ref_logprobs, loss_mask, ratio_bounds=bounds)


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float,
    kl_coef: float,
    num_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO (arXiv:1707.06347 eq. 7) plus kl_coef * k3 against the reference, mean over tokens.

    Args:
        logprobs, old_logprobs, ref_logprobs, advantages: `[B, T]`.
        loss_mask: `[B, T]` bool.
        num_tokens: tokens in the loss of the whole optimizer step.

    Returns:
        Loss (0-d) and `policy_metrics`.
    """
    logprobs, old_logprobs, ref_logprobs, advantages = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs, advantages)
    bounds = (1 - clip_eps, 1 + clip_eps)
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    token_loss = token_loss + kl_coef * k3(ref_logprobs - logprobs)
    total = torch.where(loss_mask, token_loss, 0.0).sum() / max(num_tokens, 1)
    return total, policy_metrics(logprobs, old_logprobs, ref_logprobs, loss_mask, ratio_bounds=bounds)


@torch.no_grad()
def policy_metrics(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, *, ratio_bounds: tuple[float, float]
) -> dict[str, Tensor]:
    """Sums over `count` tokens in the loss; every estimate has the sign of a KL divergence.

    With r the log-ratio of the current policy to the one that sampled: `approx_kl` = r^2 / 2, `approx_kl_k1` = -r,
    `approx_kl_k3` = e^r - r - 1. Against the reference: `ref_kl` = k3 of ref - current, `ref_kl_k1` = current - ref.
    `clip_frac` counts ratios outside `ratio_bounds`; `ratio_max` is the largest ratio, not a sum (0 without tokens).
    """
    logprobs, old_logprobs, ref_logprobs = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ((ratio < ratio_bounds[0]) | (ratio > ratio_bounds[1])) & loss_mask
    ratio_max = torch.where(loss_mask, ratio, 0.0).max() if loss_mask.numel() else ratio.new_zeros(())
    return {
        "count": loss_mask.sum().float(),
        # masked positions hold 0 in every logprob, where each estimator is exactly 0
        "approx_kl": 0.5 * log_ratio.square().sum(),
        "approx_kl_k1": -log_ratio.sum(),
        "approx_kl_k3": k3(log_ratio).sum(),
        "ref_kl": k3(ref_logprobs - logprobs).sum(),
        "ref_kl_k1": (logprobs - ref_logprobs).sum(),
        "clip_frac": clipped.sum().float(),
        "ratio_max": ratio_max,
    }


def _masked(loss_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.where(loss_mask, tensor, 0.0) for tensor in tensors)
