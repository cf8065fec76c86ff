"""Policy-gradient losses on sampled tokens: GRPO, CISPO, PPO, and the KL estimators beside them.

Three policies: the current one (`logprobs`, with gradient), the one that sampled (`old_logprobs`) and the frozen start
(`ref_logprobs`). All three are logprobs of the same tempered distribution.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is beyond every clip; exp(89) would be infinite in fp32, and 0 * inf is NaN
MAX_K3_EXPONENT = 5.0

GroupLoss = Literal["cispo", "grpo", "dapo", "gspo", "dr_grpo"]
Reduction = Literal["sequence", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]

REDUCTIONS: dict[GroupLoss, Reduction] = {
    "cispo": "sequence",
    "grpo": "sequence",
    "dapo": "token",
    "gspo": "sequence",
    "dr_grpo": "constant",
}
"""How the paper of each loss sums over tokens; cispo as MiniMind does it (its paper: `token`)."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a loss is divided by, so that cutting an optimizer step into micro-batches changes no gradient.

    Attributes:
        num_sequences: completions with at least one token in the loss, in the whole step.
        num_tokens: tokens in the loss, in the whole step.
        max_tokens: the most tokens a completion may have, the constant of `constant`.
    """

    num_sequences: int
    num_tokens: int
    max_tokens: int


def reduce_tokens(token_loss: Tensor, loss_mask: Tensor, reduction: Reduction, size: StepSize) -> Tensor:
    """A micro-batch's share of the step's loss, 0-d, from `[B, T]` per token; values outside the mask have no effect.

    `sequence`: mean over each completion's tokens, then over completions: every completion weighs the same, so a token of a
    long one weighs less. `token`: mean over all tokens (arXiv:2503.14476 eq. 8). `constant`: sum over
    completions x `max_tokens`, so that no length is favoured (arXiv:2503.20783, section 3).
    """
    token_loss = torch.where(loss_mask, token_loss, 0.0)
    if reduction == "token":
        return token_loss.sum() / max(size.num_tokens, 1)
    if reduction == "constant":
        return token_loss.sum() / max(size.num_sequences * size.max_tokens, 1)
    lengths = loss_mask.sum(-1).clamp(min=1)
    return (token_loss.sum(-1) / lengths).sum() / max(size.num_sequences, 1)


def k3(log_ratio: Tensor) -> Tensor:
    """Per-token estimate exp(d) - d - 1 of a KL divergence, with its exponential continued linearly above d = 5.

    For samples x ~ p and d = log q(x) - log p(x) its mean estimates KL(p || q) without bias (Schulman 2020,
    http://joschu.net/blog/kl-approx.html, k3). It is non-negative and zero iff d = 0. A token that p finds a million
    times less likely than q would alone contribute a million; beyond d = 5 the exponential therefore goes on along its
    tangent: finite and still growing, with the bounded gradient e^5 - 1 that pulls such a token back.
    """
    exponent = log_ratio.clamp(max=MAX_K3_EXPONENT)
    # expm1: near 0 the value is d^2 / 2, which exp(d) - 1 would lose to rounding and could turn negative
    return torch.expm1(exponent) + exponent.exp() * (log_ratio - MAX_K3_EXPONENT).relu() - log_ratio


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), continued along its tangent above 20: a ratio however large is finite in fp32 and keeps its gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() * (1 + (log_ratio - MAX_LOG_RATIO).relu())


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens the policy sampled (Schulman 2020, as `k3`).

    `k1`: log p - log q, unbiased but of both signs; as a loss its gradient is zero on average. `k2`: half its square, biased,
    but its gradient is the KL's while the policy is the one that sampled. `k3`: unbiased, never negative.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    return 0.5 * difference.square() if estimator == "k2" else k3(-difference)


def group_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss: GroupLoss,
    reduction: Reduction | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    ratio_cap: float,
    kl_coef: float,
    kl_estimator: KlEstimator = "k3",
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    size: StepSize,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group-relative policy loss of a micro-batch.

    With r the ratio of a token's probability to the one it was sampled with, A its completion's advantage:

    - `grpo` (arXiv:2402.03300 eq. 3), `dapo` (arXiv:2503.14476 eq. 8), `dr_grpo` (arXiv:2503.20783):
      -min(r A, clip(r, 1 - clip_eps_low, 1 + clip_eps_high) A). They differ in reduction, in range and in the advantage.
    - `gspo` (arXiv:2507.18071 eq. 5): the same with the completion's ratio s = exp(mean of log r) in place of r; the gradient
      flows through every token of s.
    - `cispo` (arXiv:2506.13585 eq. 4): -stop_gradient(min(r, ratio_cap)) A logp; every token keeps its gradient. The paper
      reduces by `token`.

    All add kl_coef * KL per token against the reference (at 0 none is computed) and subtract entropy_coef * entropy.

    Args:
        logprobs, old_logprobs, ref_logprobs: `[B, T]`.
        advantages: `[B]`, one per completion.
        loss_mask: `[B, T]` bool. A row without tokens contributes nothing.
        reduction: None for the one of the loss's paper, `REDUCTIONS`.
        entropy: `[B, T]` with gradient, needed where `entropy_coef` > 0.
        size: the whole optimizer step's.

    Returns:
        Loss (0-d) and `policy_metrics`, where clipped means outside the range or above the cap.
    """
    logprobs, old_logprobs, ref_logprobs = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs)
    advantages = torch.where(loss_mask, advantages[:, None], 0.0)
    log_ratio = logprobs - old_logprobs
    if loss == "gspo":
        # one ratio per completion, written at each of its tokens: masked positions hold 0 and add nothing to the sum
        log_ratio = (log_ratio.sum(-1) / loss_mask.sum(-1).clamp(min=1))[:, None].expand_as(logprobs)
    ratio = probability_ratio(log_ratio)
    if loss == "cispo":
        bounds = (0.0, ratio_cap)
        token_loss = -ratio.clamp(max=ratio_cap).detach() * advantages * logprobs
    else:
        bounds = (1 - clip_eps_low, 1 + clip_eps_high)
        token_loss = -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    if kl_coef:
        token_loss = token_loss + kl_coef * kl_penalty(logprobs, ref_logprobs, kl_estimator)
    token_loss = token_loss - _bonus(entropy, entropy_coef, loss_mask)
    total = reduce_tokens(token_loss, loss_mask, reduction or REDUCTIONS[loss], size)
    return total, policy_metrics(logprobs, old_logprobs, ref_logprobs, loss_mask, ratio.detach(), ratio_bounds=bounds)


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float,
    kl_coef: float,
    kl_estimator: KlEstimator = "k3",
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    num_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO (arXiv:1707.06347 eq. 7), mean over tokens, with the terms of KL and entropy as above.

    Args:
        logprobs, old_logprobs, ref_logprobs, advantages: `[B, T]`.
        loss_mask: `[B, T]` bool.
        num_tokens: tokens in the loss of the whole optimizer step.

    Returns:
        Loss (0-d) and `policy_metrics`.
    """
    logprobs, old_logprobs, ref_logprobs, advantages = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs, advantages)
    bounds = (1 - clip_eps, 1 + clip_eps)
    ratio = probability_ratio(logprobs - old_logprobs)
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    if kl_coef:
        token_loss = token_loss + kl_coef * kl_penalty(logprobs, ref_logprobs, kl_estimator)
    token_loss = token_loss - _bonus(entropy, entropy_coef, loss_mask)
    total = torch.where(loss_mask, token_loss, 0.0).sum() / max(num_tokens, 1)
    return total, policy_metrics(logprobs, old_logprobs, ref_logprobs, loss_mask, ratio.detach(), ratio_bounds=bounds)


@torch.no_grad()
def policy_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    ratio: Tensor,
    *,
    ratio_bounds: tuple[float, float],
) -> dict[str, Tensor]:
    """Sums over `count` tokens in the loss; every estimate has the sign of a KL divergence.

    With r the log-ratio of the current policy to the one that sampled: `approx_kl` = r^2 / 2, `approx_kl_k1` = -r,
    `approx_kl_k3` = e^r - r - 1. Against the reference: `ref_kl` = k3 of ref - current, `ref_kl_k1` = current - ref.
    `clip_frac` counts the tokens whose `ratio` (`[B, T]`, as the loss clips it) lies outside `ratio_bounds`; `ratio_max` is the
    largest of them, not a sum (0 without tokens).
    """
    logprobs, old_logprobs, ref_logprobs = _masked(loss_mask, logprobs, old_logprobs, ref_logprobs)
    log_ratio = logprobs - old_logprobs
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


def _bonus(entropy: Tensor | None, entropy_coef: float, loss_mask: Tensor) -> Tensor | float:
    """What is subtracted for entropy, per token."""
    return 0.0 if entropy is None or not entropy_coef else entropy_coef * torch.where(loss_mask, entropy, 0.0)


def _masked(loss_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.where(loss_mask, tensor, 0.0) for tensor in tensors)
