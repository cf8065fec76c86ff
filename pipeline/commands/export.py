"""A model of the lineage as a folder that transformers opens."""

import shutil
from pathlib import Path

from pipeline.errors import ParamsError
from pipeline.model.interop import qwen3_config, stack_experts
from pipeline.model.transformer import CausalLM

TOKENIZER = Path("data/tokenizer")


def export(model: CausalLM, folder: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer with its chat template.

    `AutoModelForCausalLM.from_pretrained(folder)` then gives the same logits, as Qwen3 or Qwen3-MoE.

    Raises:
        ParamsError: `folder` exists and holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParamsError(f"{folder}: exists already; name a new or an empty folder")
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    kind = Qwen3MoeConfig if model.config.use_moe else Qwen3Config
    name = "Qwen3MoeForCausalLM" if model.config.use_moe else "Qwen3ForCausalLM"
    folder.mkdir(parents=True, exist_ok=True)
    kind(**qwen3_config(model.config), architectures=[name], dtype="float32").save_pretrained(folder)
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}  # tied
    if model.config.use_moe:
        state = stack_experts(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for path in TOKENIZER.iterdir():
        shutil.copy(path, folder / path.name)
