"""The reward model's checkpoint."""

from pathlib import Path

from pipeline.checkpoint.files import load_meta, load_state, load_strictly
from pipeline.model.heads import RewardModel


def load_reward_model(path: Path, *, tokenizer_digest: str | None = None) -> RewardModel:
    """The reward model that `save_model` wrote, on the CPU, in evaluation mode. Errors as `load_model`."""
    meta = load_meta(path, "reward", tokenizer_digest)
    model = RewardModel(meta["model"])
    load_strictly(model, load_state(path), path)
    return model.eval()
