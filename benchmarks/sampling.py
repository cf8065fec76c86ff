"""Tokens per second of rollouts: ours, `transformers` generate, and a plain loop, on the same prompts, weights and lengths.

Dimensions: N rows, T positions, V vocabulary, H query heads, K key/value heads, D head width.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import head_product, layer_products, product_seconds
from benchmarks.measure import interleaved, timed
from benchmarks.models import config_of, make_model, transformers_twin
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting
from pipeline.model.config import ModelConfig
from pipeline.model.rope import apply_rope
from pipeline.model.transformer import CausalLM
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.training.device import Device

PAD_ID = 0
NO_STOP: list[int] = []


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts (those of a group adjacent) and how many ids each row gets: drawn once, so every way does the same work."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Ids that all rows get together."""
        return sum(self.lengths)


def draw_workload(
    num_prompts: int, group_size: int, *, prompt_lengths: tuple[int, int], new_tokens: tuple[int, int], vocabulary: int
) -> Workload:
    """Uniform lengths within the given bounds, and random ids."""
    draw = random.Random(num_prompts)
    prompts = [[draw.randrange(1, vocabulary) for _ in range(draw.randint(*prompt_lengths))] for _ in range(num_prompts)]
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    return Workload(repeated, [draw.randint(*new_tokens) for _ in repeated])


def rollout_64m(setting: Setting) -> Report:
    """Against `generate` and a plain loop, and against the matrix products alone while the batch is full."""
    config = config_of("minimind")
    mixed = draw_workload(16, 6, prompt_lengths=(16, 256), new_tokens=(1, 128), vocabulary=config.vocab_size)
    report, times = compare_rollouts(setting, "rollout, 64M", config, mixed)
    least = 10.0 if setting.torch_device.type == "cuda" else 2.5
    report.bars += [
        Bar("rollout 64M against transformers generate", times["transformers generate"], least),
        Bar("rollout 64M against a plain cached loop", times["plain loop"], 3.0),
        Bar("rollout 64M, share of the products' rate while the batch is full", full_batch_share(setting, config, 96), 0.6),
    ]
    return report


def rollout_micro(setting: Setting) -> Report:
    """At micro size, against `generate` and a plain loop."""
    config = config_of("micro")
    mixed = draw_workload(12, 8, prompt_lengths=(16, 128), new_tokens=(1, 96), vocabulary=config.vocab_size)
    report, times = compare_rollouts(setting, "rollout, micro", config, mixed)
    report.bars.append(Bar("rollout micro against transformers generate", times["transformers generate"], 3.0))
    return report


def compare_rollouts(setting: Setting, title: str, config: ModelConfig, work: Workload) -> tuple[Report, dict[str, float]]:
    """Ours, `generate` and the plain loop in turns: the table, and how many times as fast as each of them ours is."""
    model = make_model(config, setting.torch_device)
    twin, engine = transformers_twin(model).to(setting.dtype), open_ours(model, len(work.prompts), setting.device.autocast_dtype)
    ways = {
        "ours": lambda: sample_ours(engine, work),
        "transformers generate": lambda: sample_transformers(twin, work),
        "plain loop": lambda: sample_plainly(model, work, setting.device),
    }
    rates = interleaved(ways, repeats=setting.repeats, device=setting.torch_device)
    times = {name: rates["ours"].median / rate.median for name, rate in rates.items()}
    rows = [(name, f"{rate.median:,.0f}", f"{rate.spread:.0%}", f"{times[name]:.2f}") for name, rate in rates.items()]
    lengths = [len(prompt) for prompt in work.prompts]
    workload = (
        f"{len(work.prompts)} rows in groups of equal prompts, {min(lengths)} to {max(lengths)} prompt tokens, "
        f"{min(work.lengths)} to {max(work.lengths)} new ones (mean {work.num_tokens / len(work.lengths):.0f}), random weights, "
        "every row at its own length in all three."
    )
    return Report(title, workload, ("", "tokens/s", "spread", "ours is x times as fast"), rows), times


def full_batch_share(setting: Setting, config: ModelConfig, rows: int) -> float:
    """Tokens per second while no row has finished, over what the layers' and the head's products alone would allow."""
    model = make_model(config, setting.torch_device)
    engine = open_ours(model, rows, setting.device.autocast_dtype)
    prompts = [[1 + row % 7] * 64 for row in range(rows)]
    short, long = (Workload(prompts, [count] * rows) for count in (1, 65))
    products = [*layer_products(config, rows), head_product(config, rows)]
    limit = rows / product_seconds(products, setting.torch_device, setting.dtype)
    shares = []
    for _ in range(setting.repeats + 1):
        seconds = [timed(partial(sample_ours, engine, work), setting.torch_device)[1] for work in (short, long)]
        shares.append(64 * rows / (seconds[1] - seconds[0]) / limit)
    return statistics.median(shares[1:])


def open_ours(model: CausalLM, rows: int, autocast_dtype: torch.dtype | None = None) -> TorchRolloutEngine:
    """The engine of the stages; no id ends a row, the workload's lengths do."""
    return TorchRolloutEngine(model, stop_ids=NO_STOP, pad_id=PAD_ID, max_rows=rows, autocast_dtype=autocast_dtype)


def sample_ours(engine: TorchRolloutEngine, work: Workload) -> float:
    """Samples every row to its length; how many ids that were."""
    rows = range(len(work.prompts))
    completions = engine.generate(work.prompts, keys=rows, max_new_tokens=work.lengths, temperature=1.0)
    return float(sum(len(completion.ids) for completion in completions))


def sample_transformers(twin: Any, work: Workload) -> float:
    """`generate` with left padding; a row that has its length is finished, and the batch goes on until the last one has."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    ids, mask = left_padded(work.prompts, twin.device)
    ends = ids.shape[1] + torch.tensor(work.lengths, device=twin.device)

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return input_ids.shape[1] >= ends

    with torch.inference_mode():
        twin.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(work.lengths),
            pad_token_id=PAD_ID,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([AtLength()]),
        )
    return float(work.num_tokens)


@torch.inference_mode()
def sample_plainly(model: CausalLM, work: Workload, device: Device) -> float:
    """A loop as one writes it first: left padding, every row prefilled, keys and values concatenated at each step."""
    ids, mask = left_padded(work.prompts, device.device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    caches: list[tuple[Tensor, Tensor] | None] = [None] * len(model.model.layers)
    steps = max(work.lengths)
    for _ in range(steps):
        with device.autocast():
            hidden = plain_forward(model, ids, positions, mask, caches)
        probabilities = model.head(hidden[:, -1]).softmax(dim=-1)
        ids = torch.multinomial(probabilities, 1)
        positions = positions[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
    return float(work.num_tokens)


def plain_forward(
    model: CausalLM, ids: Tensor, positions: Tensor, mask: Tensor, caches: list[tuple[Tensor, Tensor] | None]
) -> Tensor:
    """Hidden states [N, T, W] of new ids [N, T] behind what `caches` holds; `mask` [N, all positions] is 0 at padding."""
    decoder = model.model
    x = decoder.embed_tokens(ids)
    rotation = decoder.rotation(positions)
    new, all_positions = ids.shape[1], mask.shape[1]
    causal = torch.ones(new, all_positions, dtype=torch.bool, device=ids.device).tril(all_positions - new)
    # a padding query sees itself: a row of nothing but -inf has no softmax
    diagonal = torch.eye(new, all_positions, dtype=torch.bool, device=ids.device).roll(all_positions - new, dims=1)
    visible = (causal & mask[:, None, None, :].bool()) | diagonal
    blocks: list[Any] = list(decoder.layers)
    for number, block in enumerate(blocks):
        attention = block.self_attn
        normed = block.input_layernorm(x)
        shape = (*ids.shape, -1, attention.head_dim)
        q = apply_rope(attention.q_norm(attention.q_proj(normed).view(shape)), *rotation).transpose(1, 2)
        k = apply_rope(attention.k_norm(attention.k_proj(normed).view(shape)), *rotation).transpose(1, 2)
        v = attention.v_proj(normed).view(shape).transpose(1, 2)
        before = caches[number]
        if before is not None:
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        caches[number] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return decoder.norm(x)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, both [N, T]."""
    width = max(map(len, prompts))
    ids = [[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
