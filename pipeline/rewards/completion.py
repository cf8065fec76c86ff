"""The reward of a single-turn completion (ppo, grpo)."""

from collections.abc import Mapping, Sequence

from pipeline.params.schema import Rewards
from pipeline.rewards.rules import clamped, repetition, span_reward, thinking_reward
from pipeline.text.turns import ParsedTurn


def completion_rewards(
    turn: ParsedTurn,
    *,
    open_thinking: bool,
    model_score: float | None,
    finished: bool,
    found: Sequence[bool],
    params: Rewards,
) -> dict[str, float]:
    """Reward terms by name; their sum is the reward.

    `length` of the answer; `thinking` only when it was asked for; `repetition`, the worse of thinking and answer;
    `model`, the clamped score of the reward model; `answer`, the share of expected answers that were found, 0 where the prompt
    has none; `unfinished` when the completion was cut off or calls a tool at its end.

    Args:
        turn: the parsed completion.
        open_thinking: whether the prompt opened a think block.
        model_score: score of the answer, None without a reward model.
        finished: whether the completion ended by itself without calling a tool.
        found: which of the prompt's expected answers the answer holds.
        params: weights.
    """
    return {
        "length": span_reward(turn.answer, params.length),
        "thinking": thinking_reward(turn, params) if open_thinking else 0.0,
        "repetition": -params.repetition * max(repetition(turn.answer), repetition(turn.thinking or "")),
        "model": model_reward(model_score, params),
        "answer": params.answer * sum(found) / max(len(found), 1),
        "unfinished": 0.0 if finished else -params.unfinished,
    }


def model_reward(score: float | None, params: Rewards) -> float:
    """The weighted score, clamped to +- `model_clip` before weighting; 0 without one."""
    if score is None:
        return 0.0
    return params.model * clamped(score, params.model_clip)


def total_reward(terms: Mapping[str, float], clip: float | None = None) -> float:
    """Sum of the terms, clamped to +- `clip` where one is given."""
    total = sum(terms.values())
    return total if clip is None else clamped(total, clip)
