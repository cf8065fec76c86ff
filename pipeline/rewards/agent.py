"""The reward of a multi-turn trajectory with tools (agent)."""

import json
import re
from collections.abc import Collection, Sequence

from pipeline.params.schema import Rewards
from pipeline.rewards.completion import model_reward
from pipeline.rewards.rules import CJK, repetition, span_reward, thinking_reward
from pipeline.rewards.verify import MAX_NUMBER_CHARS, as_number, numbers, quantities, verify
from pipeline.rollout.records import StopReason, Trajectory, without_tool_blocks
from pipeline.text.turns import ParsedTurn
from pipeline.tools.registry import ToolResult
from pipeline.tools.toolbox import Check

MAX_FAULTS = 3  # call faults beyond this cost no more, so that one runaway turn does not drown the rest of a group
MAX_QUANTITIES_PER_ANSWER = 3
MAX_ITEMS_PER_ANSWER = 6
ITEM_CHARS = 24

_SEPARATOR = re.compile(rf"[、，;；/|\n。！？!?]|[,.](?!\d)|(?<=[{CJK}])\s+(?=[{CJK}])")


def agent_rewards(
    trajectory: Trajectory,
    *,
    gt: Sequence[str],
    asked: str,
    tools_offered: Collection[str],
    model_score: float | None,
    params: Rewards,
    check: Check | None = None,
) -> dict[str, float]:
    """Reward terms by name; `total_reward(terms, params.agent_clip)` is the reward.

    `answer`: share of `gt` that `earned_answers` grants. `tool_call`: positive for valid calls without a fault, negative
    per fault. `unfinished`: the last turn was cut off or still called tools. `thinking`: see `_thinking`. `repetition`: the
    worst text of the trajectory. `length` and `model` only without tools.

    Args:
        trajectory: the episode.
        gt: expected answers, empty when the task has none.
        asked: what the user wrote.
        tools_offered: names of the offered tools.
        model_score: score of the final answer, None without a reward model.
        params: weights.
        check: see `earned_answers`.
    """
    turns, tool_results, answer = [turn.parsed for turn in trajectory.turns], trajectory.tool_results, trajectory.final_answer
    called = any(not result.is_error for results in tool_results for result in results)
    earned = earned_answers(gt, answer, asked=asked, tool_results=tool_results, tools_offered=tools_offered, check=check)
    texts = [text for turn in turns for text in (without_tool_blocks(turn.answer), turn.thinking or "")]
    return {
        "answer": params.answer * sum(earned) / max(len(gt), 1),
        "tool_call": _tool_call(turns, tool_results, params, rewarded=called and bool(gt)),
        "unfinished": 0.0 if trajectory.stop is StopReason.EOS else -params.unfinished,
        "thinking": _thinking(turns, params) if trajectory.open_thinking else 0.0,
        "repetition": -params.repetition * max(map(repetition, texts), default=0.0),
        "length": 0.0 if tools_offered else span_reward(answer, params.length),
        "model": 0.0 if tools_offered else model_reward(model_score, params),
    }


def earned_answers(
    gt: Sequence[str],
    answer: str,
    *,
    asked: str,
    tool_results: Sequence[Sequence[ToolResult]],
    tools_offered: Collection[str],
    check: Check | None = None,
) -> list[bool]:
    """Which expected answers the final answer holds, and holds honestly.

    Where tools are offered, an answer counts when a call returned a result that shows it; a number also when it was derived
    from results: then the reply may hold no more numbers per expected answer than one that stand neither in a result nor in
    the question. A list of candidates (`is_list`) earns nothing.

    Args:
        gt: expected answers.
        answer: the final answer.
        asked: what the user wrote.
        tool_results: per turn what its calls returned; errors may echo the policy's own text and show nothing.
        tools_offered: names of the offered tools.
        check: a user's checker. It alone says what is an answer, instead of `verify` and the rules on lists and results; a call
            must still have returned a result.
    """
    read = [result.content for results in tool_results for result in results if not result.is_error]
    if tools_offered and not read:
        return [False] * len(gt)
    if check is not None:
        return check(gt, answer)
    found = verify(gt, answer)
    if is_list(answer, asked, read, len(gt)):
        return [False] * len(gt)
    if not tools_offered:
        return found
    shown, in_question = " ".join(read), set(numbers(asked))
    own = set(numbers(answer)).difference(*map(_all_numbers, read))

    def derived(expected: str) -> bool:
        value = as_number(expected)
        # where the expected number stands in the question, repeating the question's numbers is guessing
        return value is not None and len(own if value in in_question else own - in_question) <= len(gt)

    return [hit and (verify([expected], shown)[0] or derived(expected)) for expected, hit in zip(gt, found, strict=True)]


def is_list(answer: str, asked: str, read: Sequence[str], num_expected: int) -> bool:
    """Whether the answer lists candidates.

    Candidates are distinct numbers, times, dates and versions; more than 3 per expected answer are a list. Those of the question
    are free, and everything from one tool result (a date, a temperature with its humidity) counts once. More than 6 short
    items per expected answer, between separators, sentence ends or the spaces of Chinese text, are a list, too.
    """
    said = set(quantities(answer)) - set(quantities(asked))
    sources = {frozenset(said & (set(quantities(result)) | _all_numbers(result))) for result in read}
    candidates = sum(map(bool, sources)) + len(said.difference(*sources))
    items = {item for part in _SEPARATOR.split(answer) if 0 < len(item := part.strip()) <= ITEM_CHARS}
    return candidates > MAX_QUANTITIES_PER_ANSWER * num_expected or len(items) > MAX_ITEMS_PER_ANSWER * num_expected


def _all_numbers(text: str) -> set[int | float | str]:
    """Numbers and the parts of times and dates, which a reply may spell out: 2025-03-07 as 2025年3月7日."""
    return {*numbers(text), *(int(digits) for digits in re.findall(r"\d+", text) if len(digits) <= MAX_NUMBER_CHARS)}


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
