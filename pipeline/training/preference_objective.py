"""Direct preference optimisation: what dpo minimises."""

import torch
from torch import Tensor

from pipeline.data.batches import PairBatch
from pipeline.maths.logprobs import token_logprobs
from pipeline.maths.preference import dpo_loss
from pipeline.model.transformer import CausalLM
from pipeline.training.device import Device
from pipeline.training.objectives import LossSum, real_positions, sums_of, with_router_balance


class DirectPreference:
    """DPO (arXiv:2305.18290, eq. 7) on sequence logprobs against a frozen reference, plus the router's balance loss."""

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
        return with_router_balance(LossSum(loss, n, sums_of(loss, metrics)), self.model)

    def _sequence_logprobs(self, model: CausalLM, batch: PairBatch) -> Tensor:
        input_ids, labels = batch.input_ids.to(self.device.device), batch.labels.to(self.device.device)
        with self.device.autocast():
            hidden = model.hidden(input_ids, visible=real_positions(labels))
        logprobs, _ = token_logprobs(hidden, model.lm_head.weight, labels)
        return logprobs.sum(dim=1)  # 0 where nothing is trained
