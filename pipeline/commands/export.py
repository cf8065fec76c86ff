"""A model of the lineage as a folder that transformers opens."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import DiskSpaceError, ParamsError
from pipeline.model.interop import qwen3_config, stack_experts
from pipeline.model.transformer import CausalLM
from pipeline.text.tokenizer import CONFIG_FILE, Tokenizer

TOKENIZER = Path("data/tokenizer")
WEIGHTS = "model.safetensors"


def export(model: CausalLM, folder: Path) -> None:
    """Writes configuration, weights, and the tokenizer with its chat template.

    `AutoModelForCausalLM.from_pretrained(folder)` then gives the same logits, as Qwen3 or Qwen3-MoE. `generate` and the pipeline
    `text-generation` give the texts of greedy sampling here, one prompt or a padded batch: they end at `<|im_end|>`, or where the
    window does.

    Raises:
        ParamsError: `folder` exists and holds something, or cannot be written.
        DiskSpaceError: the disk is full; nothing is left of the export.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParamsError(f"{folder}: exists already; name a new or an empty folder")
    from safetensors import SafetensorError

    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(model, folder)
    except BaseException as error:
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink()
        if made and folder.is_dir():
            folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise _failure(folder, error) from error
        raise


def _write(model: CausalLM, folder: Path) -> None:
    """Every file under its name, the weights last and whole: without them no library takes the folder for a model."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3MoeConfig

    tokens: dict[str, Any] = {
        "bos_token_id": Tokenizer.bos_id,
        "eos_token_id": Tokenizer.eos_id,
        "pad_token_id": Tokenizer.pad_id,
    }
    window = model.config.max_position_embeddings
    kind = Qwen3MoeConfig if model.config.use_moe else Qwen3Config
    name = "Qwen3MoeForCausalLM" if model.config.use_moe else "Qwen3ForCausalLM"
    kind(**qwen3_config(model.config), **tokens, architectures=[name], dtype="float32").save_pretrained(folder)
    GenerationConfig(**tokens, do_sample=False, max_length=window).save_pretrained(folder)
    for path in TOKENIZER.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())  # no copy of modes: what DVC keeps is read-only
    # A prompt ends where its answer begins, so a batch of them is padded on the left.
    settings = json.loads((TOKENIZER / CONFIG_FILE).read_bytes()) | {"model_max_length": window, "padding_side": "left"}
    (folder / CONFIG_FILE).write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}  # tied
    if model.config.use_moe:
        state = stack_experts(state)
    partial = folder / f"{WEIGHTS}.part"
    save_file(state, partial, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG_FILE, partial)  # the library makes private files
    os.replace(partial, folder / WEIGHTS)


def _failure(folder: Path, error: Exception) -> ParamsError | DiskSpaceError:
    """`error` in a line; the library of the weights tells the operating system's number in its text only."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC})" in str(error):
        return DiskSpaceError(f"{folder}: no space left, nothing was written; make room, or name a folder on another disk")
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    return ParamsError(f"{folder}: cannot be written ({reason}); name another folder")
