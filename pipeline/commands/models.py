"""Finding the tokenizer and the models of the lineage."""

from pathlib import Path

from pipeline.errors import DataError
from pipeline.evaluation.examiner import MODELS, open_policy
from pipeline.lineage.damage import remedies
from pipeline.model.transformer import CausalLM
from pipeline.text.tokenizer import Tokenizer, load_tokenizer

NAMES = tuple(name for name in MODELS if name != "reward")
TOKENIZER = "data/tokenizer"


def open_tokenizer() -> Tokenizer:
    """That of the lineage.

    Raises:
        DataError: stage tokenizer has not run, or what it wrote is damaged.
    """
    try:
        return load_tokenizer(Path(TOKENIZER))
    except DataError as error:
        raise DataError("; ".join([str(error), *remedies(Path.cwd(), [TOKENIZER])])) from error


def open_model(name: str, tokenizer: Tokenizer) -> CausalLM:
    """The language model of a stage in evaluation mode; adapters are merged into full_sft.

    Raises:
        DataError: no stage of that name trains a language model, it has not run, or what it wrote is damaged.
    """
    if name not in NAMES:
        raise DataError(f"{name}: no language model of the lineage; known are {', '.join(NAMES)}")
    try:
        return open_policy(name, tokenizer.digest).eval()
    except DataError as error:
        stages = ("full_sft", "lora") if name == "lora" else (name,)
        files = [f"checkpoints/{stage}.{kind}" for stage in stages for kind in ("pth", "json")]
        known = "; ".join(remedies(Path.cwd(), [TOKENIZER, *files]))
        raise DataError(f"{error}; {known or f'`dvc repro {name}` trains it anew'}") from error
