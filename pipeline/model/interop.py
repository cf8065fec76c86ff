"""Conversions to and from the layout of `transformers`' Qwen3 and Qwen3-MoE classes. Imports neither.

Dense weights are the same tensors under the same names. transformers 5 stacks the experts of a layer; here, as in MiniMind and
in older Qwen3-MoE files, each expert has its own keys.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig

_EXPERT = re.compile(r"(?P<mlp>.+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_STACKED = re.compile(r"(?P<mlp>.+\.mlp)\.experts\.(?P<projection>gate_up|down)_proj")


def qwen3_config(config: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of `Qwen3Config` (dense) or `Qwen3MoeConfig` that describe the same model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope = {**config.rope_scaling.model_dump(), "rope_type": "yarn", "rope_theta": config.rope_theta}
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")
    values = {name: getattr(config, name) for name in shared + (experts if config.use_moe else ())}
    return {**values, "rope_parameters": rope, "attention_dropout": config.dropout, "tie_word_embeddings": True}


def stack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert matrices as transformers 5 stores them; everything else unchanged.

    `{mlp}.experts.gate_up_proj` is [E, 2I, W], gate above up; `{mlp}.experts.down_proj` is [E, W, I].
    """
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in state.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match["mlp"], {})[int(match["expert"]), match["projection"]] = tensor
        else:
            stacked[name] = tensor
    for mlp, parts in experts.items():
        order = range(len(parts) // 3)
        gate_up = [torch.cat((parts[expert, "gate"], parts[expert, "up"])) for expert in order]
        stacked[f"{mlp}.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{mlp}.experts.down_proj"] = torch.stack([parts[expert, "down"] for expert in order])
    return stacked


def unstack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `stack_experts`."""
    flat: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            flat[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            prefix = f"{match['mlp']}.experts.{expert}"
            if match["projection"] == "down":
                flat[f"{prefix}.down_proj.weight"] = matrix
            else:
                flat[f"{prefix}.gate_proj.weight"], flat[f"{prefix}.up_proj.weight"] = matrix.chunk(2)
    return flat
