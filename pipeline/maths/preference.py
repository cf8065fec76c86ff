"""Losses on pairs: rows 0..N-1 are the chosen answers, rows N..2N-1 the rejected ones of the same pairs."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


def dpo_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    beta: float,
    loss: PreferenceLoss = "sigmoid",
    label_smoothing: float = 0.0,
    num_pairs: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation on h, the difference of the answers' log-ratios to the reference.

    - `sigmoid` (arXiv:2305.18290 eq. 7): -log sigmoid(beta h). With `label_smoothing` e, the chance that a pair is labelled the
      wrong way round: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (conservative DPO, E. Mitchell 2023).
    - `ipo` (arXiv:2310.12036 eq. 17): (h - 1 / (2 beta))^2, which stops pulling once h is there. h is a difference of sums, as in
      the paper; trl takes means over tokens.
    - `hinge` (arXiv:2305.10425): max(0, 1 - beta h).

    At policy = reference the loss is ln 2, 1 / (4 beta^2) or 1, and its gradient is not zero.

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
    chosen_rewards, rejected_rewards = rewards.chunk(2)
    margin = chosen_rewards - rejected_rewards
    if loss == "ipo":
        pair_loss = (margin / beta - 1 / (2 * beta)).square()
    elif loss == "hinge":
        pair_loss = F.relu(1 - margin)
    else:
        pair_loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    chosen_logprobs, rejected_logprobs = logprobs.detach().chunk(2)
    return pair_loss.sum() / max(num_pairs, 1), _margin_metrics(margin) | {
        "chosen_reward": chosen_rewards.detach().sum(),
        "rejected_reward": rejected_rewards.detach().sum(),
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
    return -F.logsigmoid(margin).sum() / max(num_pairs, 1), _margin_metrics(margin)


@torch.no_grad()
def chance_accuracies(num_tokens: Tensor) -> dict[str, Tensor]:
    """What rules earn that know nothing of the answers, beside `accuracy`: sums over pairs, a tie counts half.

    `accuracy_by_length` is that of always preferring the shorter answer, as an untrained model's total logprob does (of the
    longer one: 1 minus it); `accuracy_by_constant` that of equal scores. No model sees an answer's position: a rule that goes by
    it draws lots, and earns a half as well.

    Args:
        num_tokens: `[2N]`, trained tokens of each answer.
    """
    chosen, rejected = num_tokens.chunk(2)
    return {
        "accuracy_by_length": (chosen < rejected).float().sum() + 0.5 * (chosen == rejected).float().sum(),
        "accuracy_by_constant": torch.tensor(0.5 * len(chosen), device=num_tokens.device),
    }


@torch.no_grad()
def _margin_metrics(margin: Tensor) -> dict[str, Tensor]:
    return {
        "count": torch.tensor(float(len(margin))),
        "accuracy": (margin > 0).float().sum() + 0.5 * (margin == 0).float().sum(),
        "margin": margin.sum(),
    }
