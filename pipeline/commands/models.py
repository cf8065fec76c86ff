"""Finding the models of the lineage by name."""

from pathlib import Path

from pipeline.checkpoint.files import load_model
from pipeline.checkpoint.lora import load_lora_model
from pipeline.errors import DataError
from pipeline.model.lora import merge_lora
from pipeline.model.transformer import CausalLM
from pipeline.text.tokenizer import Tokenizer

CHECKPOINTS = Path("checkpoints")
NAMES = ("pretrain", "full_sft", "lora", "dpo", "ppo", "grpo", "agent")


def open_model(name: str, tokenizer: Tokenizer) -> CausalLM:
    """The language model of a stage in evaluation mode; adapters are merged into full_sft.

    Raises:
        DataError: no stage of that name trains a language model, or it has not run.
    """
    if name not in NAMES:
        raise DataError(f"{name}: no language model of the lineage; known are {', '.join(NAMES)}")
    if name == "lora":
        full_sft, adapters = CHECKPOINTS / "full_sft.pth", CHECKPOINTS / "lora.pth"
        model = load_lora_model(full_sft, adapters, tokenizer_digest=tokenizer.digest)
        merge_lora(model)
        return model.eval()
    return load_model(CHECKPOINTS / f"{name}.pth", tokenizer_digest=tokenizer.digest)
