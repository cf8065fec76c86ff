"""Share of the machine's arithmetic that pretraining turns into model FLOPs, on full rows of random ids."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.machine import product_rate
from benchmarks.measure import interleaved
from benchmarks.models import config_of, make_model, profile
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting
from benchmarks.supervised import our_steps
from pipeline.data.batches import Batch
from pipeline.model.config import ModelConfig
from pipeline.params.sizes import num_parameters

ROWS = {"cpu": 4, "cuda": 64}
STEPS = {"cpu": 1, "cuda": 20}
DATA_SHEET = {"H100": 989e12, "H200": 989e12}
"""Dense bf16 FLOP per second that the maker names."""


@dataclass(slots=True)
class FullRows:
    """Batches of random ids without padding; every epoch is one batch."""

    rows: int
    length: int
    vocabulary: int
    batches_per_epoch: int = 1

    def batch(self, epoch: int, index: int) -> Batch:
        """See `SupervisedBatches.batch`."""
        ids = torch.randint(self.vocabulary, (self.rows, self.length + 1), generator=torch.Generator().manual_seed(epoch))
        return Batch(ids[:, :-1], ids[:, 1:], ids[:, 1:].numel(), list(range(self.rows)), [0] * self.rows)

    def in_order(self) -> Iterator[Batch]:
        """No held-out rows."""
        yield from ()


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Of forward and backward pass: six per weight, and causal attention's two products over half the row on average."""
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
    return 6.0 * num_parameters(config, config.vocab_size) + attention


def mfu(setting: Setting) -> Report:
    """MiniMind's size and row length, with as many rows as the device likes."""
    kind, config = setting.torch_device.type, config_of("minimind")
    settings = profile("minimind").pretrain.model_copy(update={"accumulation_steps": 1})
    batches = FullRows(ROWS[kind], settings.max_seq_len, config.vocab_size)
    model = setting.device.prepare(make_model(config, setting.torch_device))
    step = our_steps(model, batches, settings, setting.device, STEPS[kind])
    rate = interleaved({"ours": step}, repeats=setting.repeats, device=setting.torch_device)["ours"]
    flops = rate.median * flops_per_token(config, settings.max_seq_len)
    measured = product_rate(setting.torch_device, setting.dtype)
    rows = [
        ("tokens/s", f"{rate.median:,.0f}"),
        ("model TFLOP/s", f"{flops / 1e12:.3f}"),
        ("share of a large matrix product here", f"{flops / measured:.0%}"),
        ("peak memory, GiB", f"{setting.device.peak_memory_bytes() / 2**30:.1f}"),
    ]
    bars = [Bar("pretrain 64M, share of a large matrix product", flops / measured)]
    if kind == "cuda":
        name = torch.cuda.get_device_name(setting.torch_device)
        bars += [Bar("pretrain 64M, MFU", flops / peak, 0.35) for chip, peak in DATA_SHEET.items() if chip in name]
    workload = f"{batches.rows} rows of {settings.max_seq_len} tokens a step, 64M parameters, {setting.dtype}.".replace(
        "torch.", ""
    )
    return Report("mfu", workload, ("", ""), rows, bars)
