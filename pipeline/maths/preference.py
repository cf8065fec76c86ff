"""Losses on N pairs of a chosen and a rejected answer."""

import torch.nn.functional as F
from torch import Tensor


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    num_pairs: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation, arXiv:2305.18290 eq. 7: -log sigmoid(beta * difference of the log-ratios).

    At policy = reference the loss is ln 2 and its gradient is not zero.

    Args:
        chosen_logprobs, rejected_logprobs: `[N]`, summed over the trained tokens of each answer (not length-normalised).
        ref_chosen_logprobs, ref_rejected_logprobs: `[N]`, the same of the frozen start weights.
        beta: strength of the implicit KL constraint.
        num_pairs: pairs of the whole optimizer step.

    Returns:
        Loss (0-d) and sums over the pairs: `accuracy` (the chosen answer's implicit reward, beta * log-ratio, is the higher
        one; a tie counts half), `margin`, `chosen_reward`, `rejected_reward`, `chosen_logprob`, `rejected_logprob`.
    """
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs)
    loss, metrics = bradley_terry_loss(chosen_rewards, rejected_rewards, num_pairs=num_pairs)
    return loss, metrics | {
        "chosen_reward": chosen_rewards.detach().sum(),
        "rejected_reward": rejected_rewards.detach().sum(),
        "chosen_logprob": chosen_logprobs.detach().sum(),
        "rejected_logprob": rejected_logprobs.detach().sum(),
    }


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, *, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood that the chosen answer wins, -log sigmoid(chosen - rejected) (arXiv:2203.02155 eq. 1).

    Args:
        chosen, rejected: `[N]` scores.
        num_pairs: pairs of the whole optimizer step.

    Returns:
        Loss (0-d) and sums over the pairs: `accuracy` (a tie counts half) and `margin`.
    """
    margin = chosen - rejected
    loss = -F.logsigmoid(margin).sum() / max(num_pairs, 1)
    margin = margin.detach()
    return loss, {"accuracy": (margin > 0).float().sum() + 0.5 * (margin == 0).float().sum(), "margin": margin.sum()}
