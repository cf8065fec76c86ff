"""The model: a Qwen3-shaped decoder, dense or with experts, its KV cache, adapters, scalar heads and conversions."""

from pipeline.model.config import ModelConfig, num_parameters
from pipeline.model.heads import RewardModel, ValueModel
from pipeline.model.kv_cache import KVCache
from pipeline.model.lora import add_lora, load_lora, lora_state_dict, merge_lora
from pipeline.model.transformer import CausalLM

__all__ = [
    "CausalLM",
    "KVCache",
    "ModelConfig",
    "RewardModel",
    "ValueModel",
    "add_lora",
    "load_lora",
    "lora_state_dict",
    "merge_lora",
    "num_parameters",
]
