"""The models of the benchmarks, with random weights, and the same ones as `transformers` classes."""

from pathlib import Path
from typing import Any

import torch

from pipeline.model.config import ModelConfig
from pipeline.model.interop import qwen3_config
from pipeline.model.transformer import CausalLM
from pipeline.params import load_params
from pipeline.params.schema import Params

PROFILES = Path(__file__).parent.parent / "profiles"
VOCABULARY = {"micro": 1024, "minimind": 6400}
SEED = 20


def profile(name: str) -> Params:
    """The parameters of profile `micro` (one million) or `minimind` (64 million)."""
    return load_params(PROFILES / f"{name}.yaml")


def config_of(name: str, *, vocabulary: int = 0, **changes: Any) -> ModelConfig:
    """The model of a profile, for `vocabulary` ids at least; `changes` replace fields of its `model` section."""
    model = profile(name).model
    return ModelConfig.from_params(model.model_copy(update=changes), max(VOCABULARY[name], vocabulary))


def make_model(config: ModelConfig, device: torch.device) -> CausalLM:
    """Random weights: what is measured does not depend on them."""
    return CausalLM(config, seed=SEED).to(device).eval()


def transformers_twin(model: CausalLM) -> Any:
    """`Qwen3ForCausalLM` with the same weights on the same device, fp32, with its default attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    twin: Any = Qwen3ForCausalLM(Qwen3Config(**qwen3_config(model.config), use_cache=True))
    twin.load_state_dict(model.state_dict(), strict=True)
    return twin.to(model.lm_head.weight.device).eval()
