"""What assistants say in a row: thinking apart from answers, results beside calls, and whether there is an answer at all."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from pipeline.text.turns import TURN_TAGS, parse_turn, split_thinking, thinks_in_call

Message = dict[str, Any]


def take_apart(messages: Sequence[Message], where: str, faults: list[str]) -> bool:
    """Moves thinking from the content of assistant messages to `reasoning_content`; whether there was any.

    A message whose thinking cannot be told from its answer is a fault and stays as it is.
    """
    moved = False
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, reasoning = message["content"], message.get("reasoning_content") or ""
        try:
            if thinks_in_call(content):
                raise ValueError("think tags inside of a tool call")
            thinking, answer = split_thinking(content, reasoning.strip("\n"))
        except ValueError as error:
            faults.append(f"{where}[{index}]: {error}")
            continue
        if answer != content:
            message["content"], message["reasoning_content"] = answer, thinking
            moved = True
    return moved


def result_faults(messages: Sequence[Message], where: str) -> Iterator[str]:
    """Calls that are answered by more or by fewer tool messages than there are."""
    for index, message in enumerate(messages[1:], start=1):
        caller = messages[index - 1]
        if message["role"] == "tool" and caller["role"] == "assistant":
            results = len(list(takewhile(lambda each: each["role"] == "tool", messages[index:])))
            written = parse_turn(caller["content"], open_thinking=False)
            calls = len(caller.get("tool_calls", [])) + len(written.calls) + written.malformed_calls
            if calls != results:
                yield f"{where}[{index}]: tool messages: {results}, calls before them: {calls}; each call has one result"


def says_nothing(message: Message) -> bool:
    """Whether an assistant message neither answers nor calls; thinking alone is no answer."""
    return not (message["content"].strip() or message.get("tool_calls"))


def holds_turn_tags(text: str) -> bool:
    """Whether a text holds tags that would end or begin something in the middle of a call."""
    return TURN_TAGS.search(text) is not None
