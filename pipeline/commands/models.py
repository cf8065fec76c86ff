"""Finding the models of the lineage by name."""

from pipeline.errors import DataError
from pipeline.evaluation.examiner import MODELS, open_policy
from pipeline.model.transformer import CausalLM
from pipeline.text.tokenizer import Tokenizer

NAMES = tuple(name for name in MODELS if name != "reward")


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
        stages = "full_sft lora" if name == "lora" else name
        raise DataError(
            f"{error}; `dvc checkout --force {stages}` brings back what was trained, `dvc repro {name}` trains it anew"
        ) from error
