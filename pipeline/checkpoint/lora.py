"""LoRA checkpoints: adapter tensors only, and what they were made for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import load_meta, load_model, load_state, model_meta
from pipeline.errors import DataError
from pipeline.model.config import ModelConfig
from pipeline.model.lora import load_lora
from pipeline.model.transformer import CausalLM


def lora_meta(config: ModelConfig, tokenizer_digest: str, *, rank: int, alpha: float, targets: Iterable[str]) -> dict[str, Any]:
    """`model_meta` of adapters: the base model's configuration and what `add_lora` was given."""
    lora = {"rank": rank, "alpha": alpha, "targets": list(targets)}
    return model_meta("lora", config, tokenizer_digest, lora=lora)


def load_lora_model(base: Path, path: Path, *, tokenizer_digest: str | None = None) -> CausalLM:
    """The language model at `base` with the adapters at `path`, not merged. Errors as `load_model`."""
    meta = load_meta(path, "lora", tokenizer_digest)
    model, state = load_model(base, tokenizer_digest=tokenizer_digest), load_state(path)
    try:
        load_lora(model, state, meta["lora"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{path.with_suffix('.json')}: `lora` must hold rank, alpha and targets ({error})") from error
    return model
