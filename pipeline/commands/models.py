"""Finding the models of the lineage by name."""

from pipeline.errors import DataError
from pipeline.evaluation.examiner import MODELS, open_policy
from pipeline.model.transformer import CausalLM
from pipeline.text.tokenizer import Tokenizer

NAMES = tuple(name for name in MODELS if name != "reward")


def open_model(name: str, tokenizer: Tokenizer) -> CausalLM:
    """The language model of a stage in evaluation mode; adapters are merged into full_sft.

    Raises:
        DataError: no stage of that name trains a language model, or it has not run.
    """
    if name not in NAMES:
        raise DataError(f"{name}: no language model of the lineage; known are {', '.join(NAMES)}")
    return open_policy(name, tokenizer.digest).eval()
