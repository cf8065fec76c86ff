"""What the supervised stages minimise, each as a sum over a micro-batch with the count it will be divided by.

Dividing is the loop's business, once per optimizer step, so micro-batches of any cut give the same gradient.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.batches import Batch, PairBatch, PairBatches
from pipeline.maths.logprobs import token_logprobs
from pipeline.maths.preference import bradley_terry_loss, dpo_loss
from pipeline.maths.supervised import cross_entropy_sum
from pipeline.model.heads import RewardModel
from pipeline.model.transformer import CausalLM
from pipeline.training.device import Device


@dataclass(slots=True)
class LossSum:
    """`loss` (differentiable) and `sums` of metrics are sums over `count` terms (tokens or pairs)."""

    loss: Tensor
    count: int
    sums: dict[str, float]


class Objective(Protocol):
    """A loss over micro-batches; `count` is known before the forward pass so that a window can be normalised as one."""

    def count(self, batch: Any) -> int: ...
    def tokens(self, batch: Any) -> int: ...
    def __call__(self, batch: Any) -> LossSum: ...


class LanguageModelling:
    """Next-token cross-entropy over trained positions, plus the router's balance loss when there are experts."""

    def __init__(self, model: CausalLM, device: Device) -> None:
        self.model, self.device = model, device

    def count(self, batch: Batch) -> int:
        return batch.num_trained

    def tokens(self, batch: Batch) -> int:
        return batch.num_trained

    def __call__(self, batch: Batch) -> LossSum:
        input_ids, labels = batch.input_ids.to(self.device.device), batch.labels.to(self.device.device)
        with self.device.autocast():
            hidden = self.model.hidden(input_ids, visible=real_positions(labels))
        loss, count = cross_entropy_sum(hidden, self.model.lm_head.weight, labels)
        sums = {"loss": float(loss.detach()), "bytes": float(batch.num_bytes)}
        if self.model.config.use_moe and self.model.training:
            aux = self.model.router_aux_loss() * count
            sums["aux_loss"] = float(aux.detach())
            sums["expert_load_max"] = float(self.model.expert_load_max() * count)
            loss = loss + aux
        return LossSum(loss, int(count), sums)


class DirectPreference:
    """DPO (arXiv:2305.18290, eq. 7) on sequence logprobs against a frozen reference."""

    def __init__(self, model: CausalLM, reference: CausalLM, device: Device, *, beta: float) -> None:
        self.model, self.reference, self.device, self.beta = model, reference, device, beta

    def count(self, batch: PairBatch) -> int:
        return batch.num_pairs

    def tokens(self, batch: PairBatch) -> int:
        return batch.num_trained

    def __call__(self, batch: PairBatch) -> LossSum:
        policy = self._sequence_logprobs(self.model, batch)
        with torch.no_grad():
            reference = self._sequence_logprobs(self.reference, batch)
        n = batch.num_pairs
        loss, metrics = dpo_loss(policy, reference, beta=self.beta, num_pairs=1)
        return LossSum(loss, n, sums_of(loss, metrics))

    def _sequence_logprobs(self, model: CausalLM, batch: PairBatch) -> Tensor:
        input_ids, labels = batch.input_ids.to(self.device.device), batch.labels.to(self.device.device)
        with self.device.autocast():
            hidden = model.hidden(input_ids, visible=real_positions(labels))
        logprobs, _ = token_logprobs(hidden, model.lm_head.weight, labels)
        return torch.where(labels != -100, logprobs, 0.0).sum(dim=1)


class RewardModelling:
    """Bradley-Terry (arXiv:2203.02155, eq. 1) on the scores at each sequence's last trained token."""

    def __init__(self, model: RewardModel, device: Device) -> None:
        self.model, self.device = model, device

    def count(self, batch: PairBatch) -> int:
        return batch.num_pairs

    def tokens(self, batch: PairBatch) -> int:
        return batch.num_trained

    def scores(self, batch: PairBatch) -> Tensor:
        """Raw scores, [2n]: n chosen, then n rejected."""
        with self.device.autocast():
            return self.model(batch.input_ids.to(self.device.device), last_trained(batch.labels).to(self.device.device)).float()

    def __call__(self, batch: PairBatch) -> LossSum:
        scores, n = self.scores(batch), batch.num_pairs
        loss, metrics = bradley_terry_loss(scores, num_pairs=1)
        return LossSum(loss, n, sums_of(loss, metrics))


@torch.no_grad()
def score_scale(objective: RewardModelling, pairs: PairBatches) -> tuple[float, float]:
    """Mean and population standard deviation of the model's scores over all answers of `pairs`."""
    objective.model.eval()
    scores = torch.cat([objective.scores(batch).cpu() for batch in pairs.in_order()]).double()
    return float(scores.mean()), max(float(scores.std(unbiased=False)), 1e-6)


def sums_of(loss: Tensor, metrics: dict[str, Tensor]) -> dict[str, float]:
    """Plain floats of a loss and of the sums beside it, without their count."""
    return {"loss": float(loss.detach()), **{name: float(value) for name, value in metrics.items() if name != "count"}}


def real_positions(labels: Tensor) -> Tensor:
    """True up to each row's last trained label, [B, T]: every row ends there, what follows is padding.

    Only routers look at it: padding must not count as load that experts have to share.
    """
    positions = torch.arange(labels.shape[1], device=labels.device)
    return positions <= last_trained(labels)[:, None]


def last_trained(labels: Tensor) -> Tensor:
    """Index of the last trained position of each row, [B]; labels [B, T] with -100 = not trained."""
    positions = torch.arange(labels.shape[1], device=labels.device)
    return torch.where(labels != -100, positions, -1).amax(dim=1)
