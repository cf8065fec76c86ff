"""Next-token prediction: what pretrain, full_sft and lora minimise."""

from pipeline.data.batches import Batch
from pipeline.maths.supervised import cross_entropy_sum
from pipeline.model.transformer import CausalLM
from pipeline.training.device import Device
from pipeline.training.objectives import LossSum, real_positions, with_router_balance


class LanguageModelling:
    """Next-token cross-entropy over trained positions, plus the router's balance loss when there are experts."""

    def __init__(self, model: CausalLM, device: Device) -> None:
        self.model, self.device = model, device

    def training_mode(self) -> None:
        self.model.train()

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
        return with_router_balance(LossSum(loss, int(count), sums), self.model)
