"""How sampling and training grow with rows, length, group size and model size: one of them changed at a time."""

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measure import timed
from benchmarks.models import config_of, make_model
from benchmarks.report import Report
from benchmarks.sampling import Workload, open_ours, sample_ours
from benchmarks.setting import Setting
from pipeline.maths.supervised import cross_entropy_sum
from pipeline.model.config import ModelConfig
from pipeline.params.sizes import num_parameters

USUAL: dict[str, Any] = {"rows": 32, "length": 64, "group": 1}
CHANGES: dict[str, list[int]] = {"rows": [1, 8, 32, 128], "length": [16, 64, 256], "group": [1, 4, 16, 32]}
PROMPT = 64
WIDTHS = {"micro": (128, 4), "8M": (256, 8), "29M": (512, 8), "64M": (768, 8)}


def growth(setting: Setting) -> Report:
    """Micro size where the size is not what changes."""
    rows = []
    for changed, values in CHANGES.items():
        for value in values:
            work = USUAL | {changed: value}
            rows.append((f"{changed} {value}", *_rates(setting, config_of("micro"), **work)))
    for name, config in _sizes():
        rows.append((f"model {name} ({num_parameters(config, config.vocab_size) / 1e6:.1f}M)", *_rates(setting, config, **USUAL)))
    columns = ("changed", "sampled tokens/s", "trained tokens/s", "6 N tokens/s of training, GFLOP/s")
    workload = (
        f"{USUAL['rows']} rows, {PROMPT} prompt tokens (one prompt per group) and {USUAL['length']} new ones; training reads "
        "rows of as many tokens and learns all of them; random weights."
    )
    return Report("growth", workload, columns, rows)


def _sizes() -> Iterator[tuple[str, ModelConfig]]:
    for name, (width, layers) in WIDTHS.items():
        heads = width // 32 if name == "micro" else 8
        mlp = 384 if name == "micro" else -(-int(width * 3.1416) // 64) * 64
        shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": width // heads}
        keys = heads if name == "micro" else heads // 2
        yield (
            name,
            config_of("micro" if name == "micro" else "minimind", **shape, num_key_value_heads=keys, intermediate_size=mlp),
        )


def _rates(setting: Setting, config: ModelConfig, *, rows: int, length: int, group: int) -> tuple[str, str, str]:
    model = make_model(config, setting.torch_device)
    prompts = [[1 + number // group] * PROMPT for number in range(rows)]
    work, engine = Workload(prompts, [length] * rows), open_ours(model, rows, setting.device.autocast_dtype)
    ids = torch.randint(config.vocab_size, (rows, PROMPT + length), device=setting.torch_device)

    def train() -> float:
        with setting.device.autocast():
            hidden = model.hidden(ids[:, :-1])
        cross_entropy_sum(hidden, model.lm_head.weight, ids[:, 1:])[0].backward()
        model.zero_grad()
        return float(ids.numel())

    def rate(way: Any) -> float:
        taken = [timed(way, setting.torch_device) for _ in range(setting.repeats + 1)][1:]
        return statistics.median(amount / seconds for amount, seconds in taken)

    sampled, trained = rate(lambda: sample_ours(engine, work)), rate(train)
    return f"{sampled:,.0f}", f"{trained:,.0f}", f"{6 * num_parameters(config, config.vocab_size) * trained / 1e9:.0f}"
