"""Bradley-Terry reward modelling: what reward minimises, the scale of its scores, and a table of scored pairs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import PairBatch, PairBatches
from pipeline.errors import NumericsError
from pipeline.maths.preference import bradley_terry_loss, chance_accuracies
from pipeline.model.heads import RewardModel
from pipeline.training.device import Device
from pipeline.training.objectives import (
    LossSum,
    answer_lengths,
    last_trained,
    real_positions,
    sums_of,
    with_router_balance,
    without_dropout,
)

Rows = list[dict[str, Any]]


class RewardModelling:
    """Bradley-Terry (arXiv:2203.02155, eq. 1) on the scores at each last trained token, plus the router's balance loss.

    Without dropout, as trl by default: the difference of two scores is trained, not the noise in each.
    """

    def __init__(self, model: RewardModel, device: Device) -> None:
        self.model, self.device = model, device

    def training_mode(self) -> None:
        without_dropout(self.model)

    def count(self, batch: PairBatch) -> int:
        return batch.num_pairs

    def tokens(self, batch: PairBatch) -> int:
        return batch.num_trained

    def scores(self, batch: PairBatch) -> Tensor:
        """Raw scores, [2n]: n chosen, then n rejected."""
        with self.device.autocast():
            return self.model(self.device.upload(batch.input_ids), self.device.upload(last_trained(batch.labels))).float()

    def __call__(self, batch: PairBatch) -> LossSum:
        scores, n = self.scores(batch), batch.num_pairs
        loss, metrics = bradley_terry_loss(scores, num_pairs=1)
        metrics |= chance_accuracies(answer_lengths(batch.labels).to(scores.device))
        return with_router_balance(LossSum(loss, n, sums_of(loss, metrics)), self.model)


@torch.no_grad()
def score_scale(objective: RewardModelling, pairs: PairBatches) -> tuple[float, float]:
    """Mean and population standard deviation of the model's scores over all answers of `pairs`.

    Raises:
        NumericsError: a score is not finite.
    """
    objective.model.eval()
    scores = torch.cat([objective.scores(batch).cpu() for batch in pairs.in_order()]).double()
    if broken := int((~torch.isfinite(scores)).sum()):
        raise NumericsError(
            f"the trained model's score of {broken} of {len(scores)} answers is not finite; lower the learning rate"
        )
    return float(scores.mean()), max(float(scores.std(unbiased=False)), 1e-6)


def scored_panel(
    objective: RewardModelling, batch: Any, decode: Callable[[Sequence[int]], str]
) -> Callable[[], list[dict[str, Any]]]:
    """A callable that scores one held-out batch of pairs: rows of both texts, both scores and their margin."""

    @torch.no_grad()
    def rows() -> Rows:
        chosen, rejected = objective.scores(batch).cpu().chunk(2)
        real = real_positions(batch.labels)
        texts = [decode(ids[kept].tolist()) for ids, kept in zip(batch.input_ids, real, strict=True)]
        return [
            {
                "chosen": texts[pair],
                "rejected": texts[pair + len(chosen)],
                "chosen_score": float(chosen[pair]),
                "rejected_score": float(rejected[pair]),
                "margin": float(chosen[pair] - rejected[pair]),
            }
            for pair in range(min(len(chosen), 8))
        ]

    return rows
