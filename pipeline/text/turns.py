"""What a sampled assistant turn says: its thinking, its answer and its tool calls."""

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL_TAG = re.compile(r"(</?tool_call>)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call; whether the tool exists and takes these arguments is for the tools to say."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn taken apart.

    Attributes:
        thinking: Stripped text of the think block; None when the turn has none.
        answer: Stripped text after the think block, tool calls included; empty when the block is never closed.
        calls: The well-formed tool calls of the answer, in order.
        malformed_calls: How many bodies between call tags were not calls, plus the tags without a partner.
    """

    thinking: str | None
    answer: str
    calls: list[ToolCall]
    malformed_calls: int


def parse_turn(text: str, *, open_thinking: bool) -> ParsedTurn:
    """Parts of one assistant turn, as sampled and decoded; never raises, whatever a model wrote.

    Everything up to the first `</think>` is thinking. With `open_thinking` the prompt ended inside the think block, so a turn
    that never closes it is thinking and nothing else.

    Args:
        text: The decoded turn after the generation prompt, without `<|im_end|>`; think and tool tags are visible.
        open_thinking: Whether the generation prompt ended with `<think>`.
    """
    before, closing, after = text.partition("</think>")
    if not (closing or open_thinking):
        thinking, answer = None, text.strip()
    else:
        thinking, answer = before.strip().removeprefix("<think>").strip(), after.strip()
    bodies, unpaired = _call_bodies(answer)
    calls = [_parse_call(body) for body in bodies]
    return ParsedTurn(thinking, answer, [call for call in calls if call], calls.count(None) + unpaired)


def _call_bodies(answer: str) -> tuple[list[str], int]:
    """What stands between each opening tag and the next closing one, and how many tags have no partner.

    One pass: a policy may write thousands of tags. An opening tag inside a body belongs to the body.
    """
    pieces = _CALL_TAG.split(answer)  # text, tag, text, tag, ..., text
    bodies: list[str] = []
    body: list[str] | None = None  # pieces since the opening tag
    unpaired = 0
    for tag, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if body is None:
            unpaired += tag == "</tool_call>"
            body = [text] if tag == "<tool_call>" else None
        elif tag == "</tool_call>":
            bodies.append("".join(body))
            body = None
        else:
            body += [tag, text]
    # a body that is never closed holds no call: its opening tag and those inside it are unpaired
    return bodies, unpaired + (0 if body is None else 1 + body.count("<tool_call>"))


def _parse_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        # what no JSON text can hold (NaN, infinities, lone surrogates) could be neither answered nor encoded
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
