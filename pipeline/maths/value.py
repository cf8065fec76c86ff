"""The critic's side of PPO: generalised advantage estimation, clipped value loss, explained variance."""

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns (arXiv:1506.02438 eq. 16), backwards over the tokens in the loss.

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lambda A_next, where "next" is the row's next position
    in the loss: what tools wrote in between takes no step of discount. Returns are A + V.

    Args:
        rewards: `[B, T]`, per token. Rewards outside the mask are ignored.
        values: `[B, T]`, of the critic that saw the rollout.
        loss_mask: `[B, T]` bool.
        bootstrap_values: `[B]`, the value after the last token of each row; None or 0 for completions that ended by
            themselves. A truncated completion has a future that the reward did not see.

    Returns:
        Advantages and returns, `[B, T]`, 0 outside the mask.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values)) if bootstrap_values is None else bootstrap_values
    next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        valid = loss_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(valid, advantage, 0.0)
        next_advantage = torch.where(valid, advantage, next_advantage)
        next_value = torch.where(valid, values[:, t], next_value)
    return advantages, torch.where(loss_mask, advantages + values, 0.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, value_clip_eps: float, num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the larger of the squared errors of the value and of the value clipped around its old one, mean over tokens.

    max((V - R)^2, (clip(V, V_old +- value_clip_eps) - R)^2) / 2, as in the PPO baselines (arXiv:2005.12729, section 3).

    Args:
        values, old_values, returns: `[B, T]`.
        loss_mask: `[B, T]` bool.
        num_tokens: tokens in the loss of the whole optimizer step.

    Returns:
        Loss (0-d) and sums over `count` tokens: `clip_frac`, values farther than `value_clip_eps` from the old ones.
    """
    values, old_values, returns = (torch.where(loss_mask, tensor, 0.0) for tensor in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-value_clip_eps, value_clip_eps)
    loss = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).sum() / max(num_tokens, 1)
    outside = (values - old_values).detach().abs() > value_clip_eps
    return loss, {"count": loss_mask.sum().float(), "clip_frac": outside.sum().float()}


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Share of the returns' variance that the values explain, 1 - Var(R - V) / Var(R); 1 is perfect, <= 0 is useless.

    Args:
        values, returns: `[N]`, of every token in the loss of the step.

    Returns:
        At most 1.0; 0.0 when the returns do not vary or there is none.
    """
    values, returns = values.double(), returns.double()
    if len(returns) == 0 or returns.max() == returns.min():
        return 0.0
    return float(1 - (returns - values).var(correction=0) / returns.var(correction=0))
