"""Next-token prediction: what pretrain, full_sft and lora minimise."""

from torch import Tensor

from pipeline.data.batches import Batch
from pipeline.maths.supervised import cross_entropy_sum
from pipeline.model.transformer import CausalLM
from pipeline.training.device import Device
from pipeline.training.objectives import LossSum, routed_positions, with_router_balance


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
        visible = self.device.upload(routed_positions(self.model, batch.labels))
        with self.device.autocast():
            hidden = self.model.hidden(self.device.upload(batch.input_ids), visible=visible)
        loss, _ = cross_entropy_sum(hidden, self.model.lm_head.weight, batch.labels)
        sums: dict[str, Tensor | float] = {"loss": loss.detach(), "bytes": float(batch.num_bytes)}
        if batch.written is not None:
            written, count = cross_entropy_sum(hidden, self.model.lm_head.weight, batch.written.labels)
            sums |= {"written_loss": written.detach(), "written": count, "written_bytes": float(batch.written.num_bytes)}
        return with_router_balance(LossSum(loss, batch.num_trained, sums), self.model)
