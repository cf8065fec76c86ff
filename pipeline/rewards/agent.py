"""The reward of a multi-turn trajectory with tools (agent)."""

import json
import re
from collections.abc import Collection, Sequence

from pipeline.params.schema import Rewards
from pipeline.rewards.completion import model_reward
from pipeline.rewards.evidence import Exchange, findings, follows
from pipeline.rewards.lists import is_list, others
from pipeline.rewards.rules import repetition, span_reward, thinking_reward
from pipeline.rewards.verify import numbers, verify
from pipeline.rollout.records import StopReason, Trajectory, without_tool_blocks
from pipeline.text.turns import ParsedTurn, ToolCall
from pipeline.tools.registry import ToolResult
from pipeline.tools.toolbox import Check

MAX_FAULTS = 3  # call faults beyond this cost no more, so that one runaway turn does not drown the rest of a group


def agent_rewards(
    trajectory: Trajectory,
    *,
    gt: Sequence[str],
    asked: str,
    tools_offered: Collection[str],
    model_score: float | None,
    params: Rewards,
    check: Check | None = None,
    given: Sequence[Exchange] = (),
) -> dict[str, float]:
    """Reward terms by name; `total_reward(terms, params.agent_clip)` is the reward.

    `answer`: share of `gt` that `earned_answers` grants. `tool_call`: positive for valid calls without a fault, and for none
    where results of the prompt show every answer; negative per fault. `unfinished`: the last turn was cut off or still called
    tools. `thinking`: see `_thinking`. `repetition`: the worst text of the trajectory. `length` and `model` only without tools.

    Args:
        trajectory: the episode.
        gt: expected answers, empty when the task has none.
        asked: what the user wrote.
        tools_offered: names of the offered tools.
        model_score: score of the final answer, None without a reward model.
        params: weights.
        check: see `earned_answers`.
        given: the calls that stand in the prompt, with their results.
    """
    turns, tool_results = [turn.parsed for turn in trajectory.turns], trajectory.tool_results
    called = any(not result.is_error for results in tool_results for result in results)
    earned = earned_answers(gt, trajectory, asked=asked, tools_offered=tools_offered, check=check, given=given)
    rewarded = bool(gt) and (called or bool(tools_offered) and all(earned))
    before = [each.call for each in given if each.current]
    texts = [text for turn in turns for text in (without_tool_blocks(turn.answer), turn.thinking or "")]
    return {
        "answer": params.answer * sum(earned) / max(len(gt), 1),
        "tool_call": _tool_call(turns, tool_results, params, before, rewarded=rewarded),
        "unfinished": 0.0 if trajectory.stop is StopReason.EOS else -params.unfinished,
        "thinking": _thinking(turns, params) if trajectory.open_thinking else 0.0,
        "repetition": -params.repetition * max(map(repetition, texts), default=0.0),
        "length": 0.0 if tools_offered else span_reward(_reply(trajectory, given), params.length),
        "model": 0.0 if tools_offered else model_reward(model_score, params),
    }


def earned_answers(
    gt: Sequence[str],
    trajectory: Trajectory,
    *,
    asked: str,
    tools_offered: Collection[str],
    check: Check | None = None,
    given: Sequence[Exchange] = (),
) -> list[bool]:
    """Which expected answers the final answer holds, and holds honestly.

    Where tools are offered, an answer counts when the result of a call shows it, also of one that stands in the prompt. A number
    also when it follows from results (`evidence.follows`), and the reply holds no other that stands neither in a result nor in
    the question nor in the arguments of a call. A list of candidates (`is_list`) earns nothing.

    Args:
        gt: expected answers.
        trajectory: the episode.
        asked: what the user wrote.
        tools_offered: names of the offered tools.
        check: a user's checker. It alone says what is an answer, instead of `verify` and the rules on lists and results; a call
            must still have returned a result.
        given: the calls that stand in the prompt, with their results.
    """
    answer, found = _reply(trajectory, given), findings(trajectory, asked, given)
    nothing = [False] * len(gt)
    if tools_offered and not found:
        return nothing
    if check is not None:
        return check(gt, answer)
    there = verify(gt, answer)
    if not any(there) or is_list(gt, answer, asked=asked, found=found):
        return nothing
    if not tools_offered:
        return there
    brought = {number for finding in found for text in finding.arguments for number in numbers(text)}
    sure = others(gt, answer, asked=asked, found=found) <= brought

    def grounded(expected: str) -> bool:
        return any(finding.shows(expected, asked) for finding in found) or (sure and follows(expected, found, asked))

    return [hit and grounded(expected) for expected, hit in zip(gt, there, strict=True)]


def _reply(trajectory: Trajectory, given: Sequence[Exchange]) -> str:
    return trajectory.answer_beside([each.result for each in given])


def _tool_call(
    turns: Sequence[ParsedTurn],
    tool_results: Sequence[Sequence[ToolResult]],
    params: Rewards,
    before: Sequence[ToolCall],
    *,
    rewarded: bool,
) -> float:
    """+weight where `rewarded` and without fault, -weight per fault: a malformed, failed or repeated call.

    A call that stands in the prompt, `before` this answer, is repeated, too. The number of calls does not matter: a chain that
    needs two calls for one answer loses nothing. Without expected answers there is no call to be rewarded, only faults to be
    avoided.
    """
    calls = [_canonical([call.name, call.arguments]) for turn in turns for call in turn.calls]
    known = {_canonical([call.name, call.arguments]) for call in before}
    malformed = sum(turn.malformed_calls for turn in turns)
    failed = sum(
        result.is_error
        for turn, results in zip(turns, tool_results, strict=False)
        for result in results[: len(turn.calls)]  # behind them stand the errors that answer the malformed ones
    )
    faults = malformed + failed + len(calls) - len(set(calls) - known)
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
    """One text for calls that differ in the order of keys, in white space (inside strings, too) or as 1 and 1.0 do."""
    numbers_alike = json.loads(json.dumps(value), parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x)
    return re.sub(r"\s+|\\[nrt]", "", json.dumps(numbers_alike, ensure_ascii=False, sort_keys=True))
