"""Weights trained elsewhere: MiniMind's `.pth` files, and what transformers writes."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checkpoint.files import EMBEDDING, HEAD, check_weights, load_state, load_strictly
from pipeline.errors import DataError
from pipeline.model.config import ModelConfig
from pipeline.model.interop import config_faults, unstack_experts
from pipeline.model.transformer import CausalLM

WEIGHTS, DESCRIPTION = "model.safetensors", "config.json"


def load_foreign(path: Path, config: ModelConfig) -> CausalLM:
    """A language model that was trained elsewhere, on the CPU, in evaluation mode.

    Half-precision tensors are widened; a missing copy of the tied embedding is filled in.

    Args:
        path: a `.pth` with a flat state dict, MiniMind's released ones included; a `.safetensors` file with a `config.json`
            beside it; or the folder of both, the weights in one file.
        config: what it is believed to hold: section `model` of params.yaml and the tokenizer's vocabulary size.

    Raises:
        DataError: a file is missing or damaged, or its tensors or its description contradict `config`.
    """
    weights = path / WEIGHTS if path.is_dir() else path
    if weights.suffix == ".safetensors":
        _check_description(weights.with_name(DESCRIPTION), config)
        state = unstack_experts(_load_safetensors(weights))
    else:
        state = load_state(weights)
    for name, twin in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
        if name not in state and twin in state:
            state[name] = state[twin]
    model = CausalLM(config)
    load_strictly(model, state, weights, "; section `model` of params.yaml and the tokenizer must be those of the file")
    return model.eval()


def _check_description(path: Path, config: ModelConfig) -> None:
    """Compares what tensors cannot tell, such as rope_theta, the norms' epsilon, and how a width is divided into heads."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; it says of the weights beside it what they cannot tell, as rope_theta") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable description of a model ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: must hold a JSON object, got {type(found).__name__}")
    if faults := config_faults(config, found):
        raise DataError(
            f"{path}: describes another model than section `model` of params.yaml and the tokenizer: {', '.join(faults)}; "
            "write its values there"
        )


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        state = load_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: not a readable safetensors file ({' '.join(str(error).split())[:120]})") from error
    check_weights(path, state)
    return state
