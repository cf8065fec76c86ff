"""What an assistant turn says: its thinking, its answer and its tool calls.

What is thinking and what is answer is decided here alone: by `split_thinking` for what a row or a conversation says, which is
exact or refused, and by `parse_turn` for what a model sampled, where every text has a reading. Where both have one, the words
are the same.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPARE_LEVELS = 64

_CALL_TAG = re.compile(r"(</?tool_call>)")
_THINK_TAG = re.compile(r"(</?think>)")
TURN_TAGS = re.compile(r"</?(?:think|tool_call)>")
"""The tags that count in what an assistant says."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call; whether the tool exists and takes these arguments is for the tools to say."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn taken apart.

    Attributes:
        thinking: Stripped text of the think blocks; None when the turn has none.
        answer: Stripped text outside every think block, tool calls included; a block that is never closed reaches to the end.
        calls: The well-formed tool calls of the answer, in order.
        malformed_calls: How many bodies between call tags were not calls, plus the tags without a partner. An opening tag
            inside of a body has none, unless the body is a call, whose text it is then.
        closed_once: Whether its think tags are those of one block, closed once.
    """

    thinking: str | None
    answer: str
    calls: list[ToolCall]
    malformed_calls: int
    closed_once: bool = False


def parse_turn(text: str, *, open_thinking: bool) -> ParsedTurn:
    """Parts of one assistant turn, as sampled and decoded; never raises, whatever a model wrote.

    Blocks may be nested. All that stands before a `</think>` which closes nothing is thinking, too: who writes it means to have
    thought. With `open_thinking` the prompt ended inside the think block: a turn that never closes it is thinking and nothing
    else, and one that opens it again at its beginning has one block.

    Args:
        text: The decoded turn after the generation prompt, without `<|im_end|>`; think and tool tags are visible.
        open_thinking: Whether the generation prompt ended with `<think>`.
    """
    tags = _THINK_TAG.findall(text)
    if open_thinking and text.lstrip().startswith("<think>"):
        text, tags = text.lstrip().removeprefix("<think>"), tags[1:]
    opened = max(int(open_thinking), _unopened(tags))
    answer, thinking = split_blocks(text, _THINK_TAG, opened=opened)
    closed_once = tags == (["</think>"] if opened else ["<think>", "</think>"])
    bodies, unpaired = _call_bodies(answer)
    read = [(_parse_call(body), body) for body in bodies]
    malformed = unpaired + sum(1 + body.count("<tool_call>") for call, body in read if call is None)
    return ParsedTurn(thinking, answer, [call for call, _ in read if call], malformed, closed_once)


def _unopened(tags: Sequence[str]) -> int:
    """How many closing tags have no opening one before them: inside of so many blocks a text begins."""
    depth = lowest = 0
    for tag in tags:
        depth += -1 if "/" in tag else 1
        lowest = min(lowest, depth)
    return -lowest


def split_thinking(content: str, reasoning: str = "") -> tuple[str, str]:
    """What a written assistant message thinks and what it answers.

    Without think tags it is `reasoning` and `content` as they are; otherwise the stripped text inside and outside the blocks of
    `content`, several of them joined by a blank.

    Args:
        content: the message's content.
        reasoning: its reasoning_content, "" where there is none.

    Raises:
        ValueError: why it cannot be told: a tag without its partner, a block inside a block, tags in the reasoning, or
            thinking in both places.
    """
    if _THINK_TAG.search(reasoning):
        raise ValueError("think tags inside of reasoning_content")
    tags = _THINK_TAG.findall(content)
    if not tags:
        return reasoning, content
    if tags != ["<think>", "</think>"] * (len(tags) // 2):
        raise ValueError("think tags that do not pair up: each <think> needs a </think> behind it, before the next <think>")
    if reasoning:
        raise ValueError("thinking both in reasoning_content and in think tags of content")
    pieces = [piece.strip() for piece in _THINK_TAG.split(content)[::2]]  # outside, inside, ..., outside
    return " ".join(filter(None, pieces[1::2])), " ".join(filter(None, pieces[::2]))


def split_blocks(text: str, tag: re.Pattern[str], *, opened: int = 0) -> tuple[str, str | None]:
    """The stripped text outside and inside the blocks of a tag; inside is None when there is no block.

    A block that is never closed reaches to the end; a closing tag that closes nothing is text.

    Args:
        text: What to split.
        tag: Matches opening and closing tags, as its only group; closing ones have a slash.
        opened: Inside of how many blocks the text begins.
    """
    pieces = tag.split(text)  # text, tag, text, tag, ..., text
    depth, blocks = opened, opened > 0
    sides: tuple[list[str], list[str]] = ([], [])
    sides[depth > 0].append(pieces[0])
    for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        opens = "/" not in mark
        if opens or depth:
            depth, blocks = depth + (1 if opens else -1), True
            sides[depth > 0].append(" ")  # what a block parts is not one word
        else:
            sides[0].append(mark)
        sides[depth > 0].append(piece)
    outside, inside = ("".join(side).strip() for side in sides)
    return outside, inside if blocks else None


def thinks_in_call(content: str) -> bool:
    """Whether a think block begins inside of a tool call that is written out: taking the block out would break the call."""
    inside = ""
    for tag in TURN_TAGS.findall(content):
        if inside and tag == inside.replace("<", "</"):
            inside = ""
        elif not inside and "/" not in tag:
            inside = tag
        elif inside == "<tool_call>" and "think" in tag:
            return True
    return False


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


def _deeper(value: Any) -> Any:
    """The value some levels down: whoever encodes it later may stand deeper in the stack."""
    for _ in range(SPARE_LEVELS):
        value = [value]
    return value


def _parse_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        # what no JSON text can hold (NaN, infinities, lone surrogates) could be neither answered nor encoded
        json.dumps(_deeper([name, arguments]), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
