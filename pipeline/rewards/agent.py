"""The reward of a multi-turn trajectory with tools (agent)."""

import json
import re
from collections.abc import Collection, Sequence

from pipeline.params.schema import Rewards
from pipeline.rewards.completion import model_reward
from pipeline.rewards.rules import repetition, span_reward, thinking_reward
from pipeline.rewards.verify import MAX_NUMBER_CHARS, numbers, verify
from pipeline.rollout.records import StopReason, Trajectory, without_tool_blocks
from pipeline.text.turns import ParsedTurn
from pipeline.tools.registry import ToolResult

MAX_FAULTS = 3  # call faults beyond this cost no more, so that one runaway turn does not drown the rest of a group
MAX_NUMBERS_PER_ANSWER = 3
MAX_OPERANDS_PER_ANSWER = 6
MAX_ITEMS_PER_ANSWER = 6
ITEM_CHARS = 12

_SEPARATOR = re.compile(r"[、，;；/|\n]|,(?!\d)")


def agent_rewards(
    trajectory: Trajectory,
    *,
    gt: Sequence[str],
    tools_offered: Collection[str],
    model_score: float | None,
    params: Rewards,
) -> dict[str, float]:
    """Reward terms by name; `total_reward(terms, params.agent_clip)` is the reward.

    `answer`: share of `gt` in the final answer. `tool_call`: positive for valid calls without a fault, negative per fault.
    `unfinished`: the last turn was cut off or still called tools. `thinking`: see `_thinking`. `repetition`: the worst text of
    the trajectory. `length` and `model` only without tools.

    Args:
        trajectory: the episode.
        gt: expected answers, empty when the task has none.
        tools_offered: names of the offered tools.
        model_score: score of the final answer, None without a reward model.
        params: weights.
    """
    turns, tool_results, answer = [turn.parsed for turn in trajectory.turns], trajectory.tool_results, trajectory.final_answer
    called = any(not result.is_error for results in tool_results for result in results)
    earned = bool(gt) and (called or not tools_offered) and not is_dump(answer, turns, tool_results, len(gt))
    texts = [text for turn in turns for text in (without_tool_blocks(turn.answer), turn.thinking or "")]
    return {
        "answer": params.answer * sum(verify(gt, answer)) / len(gt) if earned else 0.0,
        "tool_call": _tool_call(turns, tool_results, params, rewarded=called and bool(gt)),
        "unfinished": 0.0 if trajectory.stop is StopReason.EOS else -params.unfinished,
        "thinking": _thinking(turns, params) if trajectory.open_thinking else 0.0,
        "repetition": -params.repetition * max(map(repetition, texts), default=0.0),
        "length": 0.0 if tools_offered else span_reward(answer, params.length),
        "model": 0.0 if tools_offered else model_reward(model_score, params),
    }


def is_dump(answer: str, turns: Sequence[ParsedTurn], tool_results: Sequence[Sequence[ToolResult]], num_expected: int) -> bool:
    """Whether the answer lists candidates instead of answering.

    Candidates are distinct numbers; more than 3 per expected answer are a list. The operands that the calls were given are free,
    up to 6 per expected answer, and everything from one tool result (a date, a temperature with its humidity) counts once.
    More than 6 short items per expected answer between commas or other separators are a list, too.
    """
    said = set(numbers(answer))
    operands = {number for turn in turns for call in turn.calls for number in numbers(_canonical(call.arguments))}
    if len(operands) <= MAX_OPERANDS_PER_ANSWER * num_expected:
        said -= operands
    sources = {frozenset(said & _all_numbers(result.content)) for results in tool_results for result in results}
    candidates = sum(map(bool, sources)) + len(said.difference(*sources))
    items = {item for part in _SEPARATOR.split(answer) if 0 < len(item := part.strip()) <= ITEM_CHARS}
    return candidates > MAX_NUMBERS_PER_ANSWER * num_expected or len(items) > MAX_ITEMS_PER_ANSWER * num_expected


def _all_numbers(text: str) -> set[int | float]:
    """Numbers and the parts of times and dates, which a reply may spell out: 2025-03-07 as 2025年3月7日."""
    return set(numbers(text)) | {int(digits) for digits in re.findall(r"\d+", text) if len(digits) <= MAX_NUMBER_CHARS}


def _tool_call(
    turns: Sequence[ParsedTurn], tool_results: Sequence[Sequence[ToolResult]], params: Rewards, *, rewarded: bool
) -> float:
    """+weight for at least one valid call and no fault, -weight per fault: a malformed, failed or repeated call.

    The number of calls does not matter: a chain that needs two calls for one answer loses nothing. Without expected answers
    there is no call to be rewarded, only faults to be avoided.
    """
    calls = [_canonical([call.name, call.arguments]) for turn in turns for call in turn.calls]
    malformed = sum(turn.malformed_calls for turn in turns)
    failed = sum(
        result.is_error
        for turn, results in zip(turns, tool_results, strict=False)
        for result in results[: len(turn.calls)]  # behind them stand the errors that answer the malformed ones
    )
    faults = malformed + failed + len(calls) - len(set(calls))
    if faults:
        return -params.tool_call * min(faults, MAX_FAULTS)
    return params.tool_call if rewarded else 0.0


def _thinking(turns: Sequence[ParsedTurn], params: Rewards) -> float:
    """Mean over the turns of the thinking reward, shifted so that good thinking is 0 and bad thinking negative.

    A right answer after valid calls already reaches `agent_clip`; a positive term above it would be cut off, and could pay for
    faults. The shift is the same for all members of a group and leaves their differences alone.
    """
    best = params.thinking.weight + params.think_close
    return sum(thinking_reward(turn, params) for turn in turns) / max(len(turns), 1) - best


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
