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
# What Qwen3's files may say otherwise and this model cannot do; what they mean where they are silent.
_ASSUMED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# What decides nothing of the function: how far it may be asked, what acts in training alone, and what the tensors say themselves.
_INDIFFERENT = ("max_position_embeddings", "attention_dropout", "router_aux_loss_coef", "tie_word_embeddings")
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


def config_faults(config: ModelConfig, found: Mapping[str, Any]) -> list[str]:
    """Where the `config.json` of a Qwen3 or MiniMind folder describes another model than `config` does, a phrase each.

    Args:
        config: what the weights are to be taken for.
        found: the file's content, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Returns:
        Every setting in which the two do not agree and which decides what the same weights compute.
    """
    expected = {**_ASSUMED, **qwen3_config(config)}
    rope = expected.pop("rope_parameters")
    for key in _INDIFFERENT if not config.use_moe else (*_INDIFFERENT, "intermediate_size"):
        expected.pop(key, None)
    stated = {**_ASSUMED, "num_experts": found.get("num_local_experts")}
    stated |= {key: value for key, value in found.items() if value is not None}
    own_rope = _rope_of(stated)
    pairs = [(key, want, stated.get(key)) for key, want in expected.items()]
    pairs += [(key, rope.get(key), own_rope.get(key)) for key in dict.fromkeys([*rope, *own_rope])]
    return [f"{key} {_shown(have)} (here {_shown(want)})" for key, want, have in pairs if have != want]


def _rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a `config.json` of either form."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, Mapping):
        scaling = values.get("rope_scaling")
        rope = {"rope_theta": values.get("rope_theta"), **(scaling if isinstance(scaling, Mapping) else {})}
    return {"rope_type": rope.get("type", "default"), **{key: value for key, value in rope.items() if key != "type"}}


def _shown(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
