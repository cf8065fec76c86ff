"""What a number was measured with. Two numbers say which of two models is better only where that is the same.

Weights of rewards, a reward model and held-out rows are as much part of a mean reward or of a loss as the model is: a policy that
is paid twice as much for an answer is no better for it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

REWARD_MODEL = "checkpoints/reward."
NONE_NAMED = "external/None"
"""What a stage reads where params.yaml names no external file."""


def yardstick(stage: str, metric: str, params: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The parameters and inputs of a stage that decide what a metric of it means, not how well a model does in it.

    Args:
        stage: what measured: one that trains, or `eval`.
        metric: a key of its metrics file; of `eval` without the model's name.
        params: of the stage, by full key.
        inputs: digest by path of what it read.
    """
    beginnings = tuple(_of_evaluation(metric) if stage == "eval" else _of_training(metric))
    known = {path: digest for path, digest in inputs.items() if not path.startswith(NONE_NAMED)}
    return {key: value for key, value in {**params, **known}.items() if key.startswith(beginnings)}


def differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two yardsticks differ, sorted."""
    return sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))


def _of_training(metric: str) -> Iterator[str]:
    """Beginnings of keys and paths. Rewards are of prompts, terms and tools; losses and accuracies of held-out ids."""
    if metric.startswith(("reward/", "tool/")):
        yield from ("rewards.", "reward.external", "tools.", "data/prepared/", "external/", REWARD_MODEL)
    else:
        yield from ("data/encoded/", "data/prepared/")


def _of_evaluation(metric: str) -> Iterator[str]:
    """The panel's rows and settings count for every metric, though not everything for all of them."""
    yield from ("eval.", "data/")
    if metric.startswith(("reward_", "tool_")):
        yield from ("tools.", "external/")
    if metric.startswith("reward_"):
        yield from ("rewards.", "reward.external", REWARD_MODEL)
