"""Losses on pairs: rows 0..N-1 are the chosen answers, rows N..2N-1 the rejected ones of the same pairs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo_loss(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation, arXiv:2305.18290 eq. 7: -log sigmoid(beta * difference of the log-ratios).

    At policy = reference the loss is ln 2 and its gradient is not zero.

    Args:
        logprobs: `[2N]`, summed over the trained tokens of each answer (not length-normalised).
        ref_logprobs: `[2N]`, the same of the frozen start weights.
        beta: strength of the implicit KL constraint.
        num_pairs: pairs of the whole optimizer step.

    Returns:
        Loss (0-d) and sums over `count` pairs: `accuracy` (the chosen answer's implicit reward, beta * log-ratio, is the
        higher one; a tie counts half), `margin`, `chosen_reward`, `rejected_reward`, `chosen_logprob`, `rejected_logprob`.
    """
    rewards = beta * (logprobs - ref_logprobs)
    loss, metrics = bradley_terry_loss(rewards, num_pairs=num_pairs)
    chosen_rewards, rejected_rewards = rewards.detach().chunk(2)
    chosen_logprobs, rejected_logprobs = logprobs.detach().chunk(2)
    return loss, metrics | {
        "chosen_reward": chosen_rewards.sum(),
        "rejected_reward": rejected_rewards.sum(),
        "chosen_logprob": chosen_logprobs.sum(),
        "rejected_logprob": rejected_logprobs.sum(),
    }


def bradley_terry_loss(scores: Tensor, *, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood that the chosen answer wins, -log sigmoid(chosen - rejected) (arXiv:2203.02155 eq. 1).

    Args:
        scores: `[2N]`, one per answer.
        num_pairs: pairs of the whole optimizer step.

    Returns:
        Loss (0-d) and sums over `count` pairs: `accuracy` (a tie counts half) and `margin`.
    """
    chosen, rejected = scores.chunk(2)
    margin = chosen - rejected
    loss = -F.logsigmoid(margin).sum() / max(num_pairs, 1)
    margin = margin.detach()
    return loss, {
        "count": torch.tensor(float(len(margin))),
        "accuracy": (margin > 0).float().sum() + 0.5 * (margin == 0).float().sum(),
        "margin": margin.sum(),
    }
