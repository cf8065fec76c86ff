"""What the calls of a prompt and a trajectory found out: which answers their results show, and which follow from them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from pipeline.rewards.verify import Number, as_number, equal, numbers, quantities, verify
from pipeline.rollout.records import Trajectory
from pipeline.text.turns import ToolCall, parse_turn
from pipeline.tools.registry import ToolResult

Quantity = Number | str
"""A number; a time, date or version as text."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call that stands in the prompt, and its result.

    Attributes:
        current: whether it stands behind the last question, so that it was made for this answer.
    """

    call: ToolCall
    result: ToolResult
    current: bool


NO_CALL: Mapping[str, Any] = {"name": "", "arguments": {}}


def given_exchanges(messages: Sequence[Mapping[str, Any]]) -> list[Exchange]:
    """The calls of a prompt with their results, in order; also those that are written out in a message's text.

    A result that no call asked for, or a malformed one, has no name and no arguments.
    """
    question = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    found: list[Exchange] = []
    calls: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            written = parse_turn(message["content"], open_thinking=False)
            calls = [{"name": call.name, "arguments": call.arguments} for call in written.calls]
            calls += [dict(NO_CALL) for _ in range(written.malformed_calls)] + list(message.get("tool_calls") or [])
        elif message["role"] == "tool":
            call: dict[str, Any] = calls.pop(0) if calls else dict(NO_CALL)
            arguments = call["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
            found.append(Exchange(ToolCall(call["name"], arguments), _read_result(message["content"]), place > question))
    return found


def _read_result(content: str) -> ToolResult:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    return ToolResult(content, is_error=isinstance(value, dict) and value.keys() == {"error"})


MAX_OPERANDS = 32  # different new numbers of all results; from a table almost anything follows


@dataclass(frozen=True, slots=True)
class Finding:
    """One call that succeeded.

    Attributes:
        leaves: the values of its result as text, each with the key that it stands under ("" where it has none); keys, too.
        arguments: the values of its arguments as text.
        quantities: the numbers, times, dates and parts of these that the result shows. Without those that the call brought
            along: where its arguments hold no number of the question, their numbers are made up.
        new: the numbers among them that stand neither in the arguments nor in the question.
    """

    leaves: list[tuple[str, str]]
    arguments: list[str]
    quantities: frozenset[Quantity]
    new: frozenset[Number]

    def shows(self, answer: str, asked: str) -> bool:
        """Whether the answer stands in the result, or is the rounding of a number there, and the call did not bring it along."""
        value = as_number(answer)
        if value is not None:
            return any(equal(value, q) or is_rounding(value, q) for q in self.quantities if not isinstance(q, str))
        brought = any(_holds(text, answer) for text in self.arguments) and not _holds(asked, answer)
        return not brought and any(_holds(text, answer) for _, text in self.leaves)


def findings(trajectory: Trajectory, asked: str, given: Sequence[Exchange] = ()) -> list[Finding]:
    """The successful calls in order; errors may echo the policy's own text and show nothing.

    Args:
        trajectory: the episode.
        asked: what the user wrote.
        given: the calls that stand in the prompt; they come first.
    """
    made = [
        (call, result)
        for turn, results in zip(trajectory.turns, trajectory.tool_results, strict=False)
        for call, result in zip(turn.parsed.calls, results, strict=False)  # behind them stand answers to malformed calls
    ]
    return [
        _finding(result.content, json.dumps(call.arguments, ensure_ascii=False), asked)
        for call, result in [*((each.call, each.result) for each in given), *made]
        if not result.is_error
    ]


def follows(answer: str, found: Sequence[Finding], asked: str) -> bool:
    """Whether a number follows in one step from what the calls found out and the question left open.

    It is the sum, difference, product or quotient of a result's new number and one of another result or of the question, or
    the sum or mean of all that the results say under one key. It must not be a number of the question itself. Whole numbers
    must be exact, others may be rounded.
    """
    value, question = as_number(answer), set(numbers(asked))
    if value is None or value in question:
        return False
    return any(
        equal(value, result) or (isinstance(value, float) and is_rounding(value, result))
        for result in (*_pairs(found, question), *_summaries(found))
    )


def is_rounding(value: Number, exact: Number) -> bool:
    """Whether `value`, as many decimals as it has, is `exact` rounded; never zero for what is not zero."""
    text = repr(value)
    if "e" in text or not value:
        return False
    decimals = len(text.partition(".")[2])
    return abs(value - exact) <= 0.5 * 10**-decimals * (1 + 1e-9)


def all_quantities(text: str) -> set[Quantity]:
    """Numbers, times and dates, and the parts of these, which a reply may spell out: 2025-03-07 as 2025年3月7日."""
    said = quantities(text)
    return {*said, *(int(part) for one in said if isinstance(one, str) for part in re.findall(r"\d+", one)[:6])}


def _finding(content: str, arguments: str, asked: str) -> Finding:
    leaves, given = list(_leaves(content)), [text for _, text in _leaves(arguments)]
    in_question, in_arguments = set(numbers(asked)), {number for text in given for number in numbers(text)}
    # A call that works on the question's numbers has a result of its own, even where it is one of its operands (4/2).
    made_up = in_arguments if in_arguments.isdisjoint(in_question) else set()
    shown = {quantity for _, text in leaves for quantity in all_quantities(text)} - made_up
    exact = {number for _, text in leaves for number in numbers(text)}
    return Finding(leaves, given, frozenset(shown), frozenset(exact - in_arguments - in_question))


def _holds(text: str, answer: str) -> bool:
    return verify([answer], text) == [True]


def _leaves(content: str) -> Iterator[tuple[str, str]]:
    """Every value of a JSON text as text, with its key; the text itself where it is no JSON (a cut result)."""
    try:
        value = json.loads(content, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        value = content
    open_values = [("", value)]
    while open_values:
        key, value = open_values.pop()
        if isinstance(value, dict):
            yield from (("", name) for name in value)
            open_values += value.items()
        elif isinstance(value, list):
            open_values += [(key, item) for item in value]
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)


def _pairs(found: Sequence[Finding], question: set[Number]) -> Iterator[Number]:
    """What one operation makes of a new number and another; never an operand again, as with 0 and 1."""
    sources = {finding.new for finding in found}
    if len(frozenset().union(*sources)) > MAX_OPERANDS:
        return
    operands = [(a, b) for one, other in permutations(sources, 2) for a, b in product(one, other)]
    operands += [pair for new in sources for a, b in product(new, question) for pair in ((a, b), (b, a))]
    for a, b in operands:
        results = [a + b, a - b, a * b] + ([a / b] if b else [])
        yield from (result for result in results if result not in (a, b))


def _summaries(found: Sequence[Finding]) -> Iterator[Number]:
    """Sum and mean of the new numbers under each key, over all results."""
    by_key: dict[str, list[Number]] = {}
    for finding in found:
        for key, text in finding.leaves:
            by_key.setdefault(key, []).extend(number for number in numbers(text) if number in finding.new)
    for said in by_key.values():
        if len(said) > 1:
            yield from (sum(said), sum(said) / len(said))
