"""What a row of MiniMind's JSONL files may look like, every fault of a row named, and the one normalised form of it.

A row that breaks the format is a fault and aborts. A well-formed row from which nothing can be learned is none; `untrainable`
names the reason and the caller drops, lists and counts it. No torch, no tokenizer, no files.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from pipeline.data.answers import holds_turn_tags, result_faults, says_nothing, take_apart

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
FIELDS = ("role", "content", "reasoning_content", "tools", "tool_calls")
OWNERS = {
    "reasoning_content": "assistant",
    "tool_calls": "assistant",
    "tools": "system",
}  # the template renders them nowhere else
MAX_DEPTH = 100  # far more than tools need, far less than the functions that recurse into a value can stand
SUSPICIOUS_ESCAPE = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")

TOO_DEEP = f"not usable JSON: nested too deeply (more than {MAX_DEPTH} levels)"


class Kind(StrEnum):
    """The shapes of a row; a value is named after what a set is for."""

    TEXT = "text"
    CHAT = "chat"
    PAIRS = "pairs"
    PROMPTS = "prompts"
    TASKS = "tasks"


SET_KINDS: dict[str, Kind] = {
    "pretrain": Kind.TEXT,
    "full_sft": Kind.CHAT,
    "lora": Kind.CHAT,
    "dpo": Kind.PAIRS,
    "rlaif": Kind.PROMPTS,
    "agent": Kind.TASKS,
}

ROW_FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.TEXT: ("text",),
    Kind.CHAT: ("conversations",),
    Kind.PAIRS: ("chosen", "rejected"),
    Kind.PROMPTS: ("conversations",),
    Kind.TASKS: ("conversations", "gt"),
}
OPTIONAL_FIELDS: dict[Kind, tuple[str, ...]] = {Kind.PROMPTS: ("gt",)}


class Row(NamedTuple):
    """A normalised row and its line (from 1) in the source; for a recipe, its position in the generated set.

    `value` has, by kind: text `{text}`; chat `{conversations, tools}`; pairs `{chosen, rejected, tools}`; prompts and tasks
    `{conversations, tools, gt}`, where the gt of a prompt may be empty. Messages are `{role, content}` plus
    `reasoning_content` and `tool_calls` (a list of `{name, arguments}`) where given; `tools` is None or a list of
    `{type, function}` (without `type` where the file has none); of prompts and tasks the assistant placeholder is gone.
    What assistants think stands in `reasoning_content` alone; `thinking_moved` says that the file had some in think tags of a
    content.
    """

    line: int
    value: dict[str, Any]
    thinking_moved: bool = False


def untrainable(value: dict[str, Any], kind: Kind) -> str | None:
    """Why nothing can be learned from a well-formed row, or None when something can."""
    match kind:
        case Kind.TEXT:
            return None if value["text"].strip() else "empty text"
        case Kind.CHAT:
            return _empty_answer(value["conversations"])
        case Kind.PAIRS:
            return "chosen equals rejected" if value["chosen"] == value["rejected"] else _empty_answer(value["chosen"])
        case Kind.PROMPTS | Kind.TASKS:
            return None if value["conversations"][-1]["content"].strip() else "empty prompt"


def _empty_answer(messages: list[Message]) -> str | None:
    empty = [i for i, message in enumerate(messages) if message["role"] == "assistant" and says_nothing(message)]
    return f"empty answer in message {empty[0]}" if empty else None


def decode_json(text: str) -> Any:
    """The value of strict JSON: no NaN, no infinity (1e999), no repeated key, no lone surrogate, no NUL, no endless nesting.

    Raises:
        ValueError: one readable reason.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(TOO_DEEP)
    if SUSPICIOUS_ESCAPE.search(text):
        decoded = json.dumps(value, ensure_ascii=False)
        if re.search("[\ud800-\udfff]", decoded):
            raise ValueError("a lone surrogate (half of a \\ud... pair) is not text")
        if _holds_nul(value):
            raise ValueError("NUL character")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated key {next(key for key in keys if keys.count(key) > 1)!r}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"not usable JSON: {_shown(digits)} is beyond the range of numbers")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether something lies inside more than `depth` lists and objects; looked at level by level, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        containers = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = list(chain.from_iterable(containers))
    return bool(level)


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(item) for key, item in value.items())
    if isinstance(value, list):
        return any(_holds_nul(item) for item in value)
    return isinstance(value, str) and "\0" in value


def normalise(value: Any, kind: Kind, faults: list[str]) -> tuple[dict[str, Any], bool]:
    """`value` and `thinking_moved` of a `Row`; meaningless when a reason was appended to `faults`."""
    fields = ROW_FIELDS[kind]
    if not isinstance(value, dict):
        faults.append(f"must be an object with {_names(fields)}, got {_shown(value)}")
        return {}, False
    known = fields + OPTIONAL_FIELDS.get(kind, ())
    faults += (f"unknown field {_shown(name)}; allowed: {_names(known)} (docs/data.md)" for name in value if name not in known)
    missing = [name for name in fields if name not in value]
    faults += (f"{name}: missing" for name in missing)
    if missing:
        return {}, False
    match kind:
        case Kind.TEXT:
            return {"text": _string(value["text"], "text", faults)}, False
        case Kind.PAIRS:
            return _pair(value, faults)
        case Kind.CHAT:
            messages, tools = _messages(value["conversations"], "conversations", faults)
            if not faults and all(message["role"] != "assistant" for message in messages):
                faults.append("conversations: no assistant message")
            return {"conversations": messages, "tools": tools}, not faults and take_apart(messages, "conversations", faults)
        case _:
            messages, tools = _messages(value["conversations"], "conversations", faults)
            if not faults and (messages[-1]["role"] != "assistant" or len(messages) == 1):
                faults.append("conversations: must end in a user or tool message and an assistant placeholder")
            row = {"conversations": messages[:-1], "tools": tools, "gt": _answers(value.get("gt", []), faults)}
            return row, not faults and take_apart(messages[:-1], "conversations", faults)


def _pair(value: dict[str, Any], faults: list[str]) -> tuple[dict[str, Any], bool]:
    chosen, tools = _messages(value["chosen"], "chosen", faults)
    rejected, rejected_tools = _messages(value["rejected"], "rejected", faults)
    sides = {"chosen": chosen, "rejected": rejected}
    moved = [] if faults else [take_apart(messages, name, faults) for name, messages in sides.items()]
    if not faults:
        faults += (
            f"{name}: must end in an assistant message" for name, messages in sides.items() if messages[-1]["role"] != "assistant"
        )
    if not faults and (chosen[:-1] != rejected[:-1] or tools != rejected_tools):
        faults.append("chosen and rejected: must be the same up to their last message")
    return {**sides, "tools": tools}, any(moved)


def _answers(value: Any, faults: list[str]) -> list[str]:
    if not isinstance(value, list):
        faults.append(f"gt: must be a list of strings, got {_shown(value)}")
        return []
    answers = []
    for index, item in enumerate(value):
        answer = str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item
        if not isinstance(answer, str) or not answer.strip():
            faults.append(f"gt[{index}]: must be a non-empty string or a number, got {_shown(item)}")
        answers.append(answer)
    return answers


def _messages(value: Any, where: str, faults: list[str]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The normalised messages and the tools of their system message."""
    if not isinstance(value, list) or not value:
        faults.append(f"{where}: must be a list of messages with at least one, got {_shown(value)}")
        return [], None
    known = len(faults)
    messages = [_message(raw, f"{where}[{index}]", faults) for index, raw in enumerate(value)]
    if len(faults) > known:
        return messages, None
    tools = messages[0].pop("tools", None)
    faults += _order_faults(messages, where)
    faults += result_faults(messages, where)
    return messages, tools


def _message(raw: Any, where: str, faults: list[str]) -> Message:
    if not isinstance(raw, dict):
        faults.append(f"{where}: must be an object with role and content, got {_shown(raw)}")
        return {}
    faults += (f"{where}: unknown field {_shown(name)}; allowed: {_names(FIELDS)}" for name in raw if name not in FIELDS)
    faults += (f"{where}.{name}: missing" for name in ("role", "content") if name not in raw)
    role = raw.get("role")
    if "role" in raw and role not in ROLES:
        faults.append(f"{where}.role={_shown(role)}: must be one of {_names(ROLES)}")
    message: Message = {"role": role, "content": _string(raw["content"], f"{where}.content", faults) if "content" in raw else ""}
    reasoning = raw.get("reasoning_content")
    if reasoning is not None:
        message["reasoning_content"] = _string(reasoning, f"{where}.reasoning_content", faults)
    for name, check in (("tools", _tool), ("tool_calls", _tool_call)):
        items = _nested(raw.get(name), f"{where}.{name}", check, faults)
        if items:
            message[name] = items
    for name, owner in OWNERS.items():
        if name in message and role in ROLES and role != owner:
            if message[name]:
                faults.append(f"{where}.{name}: only {owner} messages have it, this is a {role} message")
            del message[name]
    return message


def _order_faults(messages: list[Message], where: str) -> Iterator[str]:
    """System first if at all, then user and assistant in turn; tool results follow the assistant message that called."""
    previous: Message = {"role": "start"}
    for index, message in enumerate(messages):
        match previous["role"]:
            case "start":
                allowed: tuple[str, ...] = ("system", "user")
            case "system":
                allowed = ("user",)
            case "user":
                allowed = ("assistant",)
            case "tool":
                allowed = ("tool", "assistant")
            case _:
                # A call may also be written out in the text; the tokenizer gives it the same control tokens.
                called = "tool_calls" in previous or "<tool_call>" in previous["content"]
                allowed = ("user", "tool") if called else ("user",)
        if message["role"] not in allowed:
            after = "first" if index == 0 else f"after {previous['role']}"
            yield f"{where}[{index}].role={message['role']!r}: {after} must come {' or '.join(allowed)}"
        previous = message


def _nested(value: Any, where: str, check: Callable[[Any], Any], faults: list[str]) -> list[Any]:
    """The checked objects of a JSON string (MiniMind's form) or of a list; none for null, "" and []."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except ValueError as error:
            faults.append(f"{where}: {error}")
            return []
    if not isinstance(value, list):
        faults.append(f"{where}: must be a JSON array of objects, got {_shown(value)}")
        return []
    items = []
    for index, item in enumerate(value):
        try:
            items.append(check(item))
        except ValueError as error:
            faults.append(f"{where}[{index}]: {error}")
    return items


def _tool(item: Any) -> dict[str, Any]:
    """The object with its function below `function`. One written that way stays as it is: its JSON is part of the prompt."""
    wrapped = isinstance(item, dict) and "function" in item
    function = item["function"] if wrapped else item
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"must be a function object with a name, got {_shown(item)}")
    return item if wrapped else {"type": "function", "function": {key: item[key] for key in item if key != "type"}}


def _tool_call(item: Any) -> dict[str, Any]:
    call = item
    if isinstance(item, dict) and "function" in item and item.keys() <= {"function", "id", "type"}:
        call = item["function"]
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise ValueError(f"must be an object with name and arguments, got {_shown(item)}")
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise ValueError(f"name must be a string without quotes, backslashes and control characters, got {_shown(name)}")
    if not isinstance(decode_json(arguments) if isinstance(arguments, str) else arguments, dict):
        raise ValueError(f"arguments must be an object, got {_shown(arguments)}")
    if holds_turn_tags(f"{name} {arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}"):
        raise ValueError("name and arguments must not hold think or tool_call tags: in a turn these count, wherever they stand")
    return {"name": name, "arguments": arguments}


def _string(value: Any, where: str, faults: list[str]) -> str:
    if not isinstance(value, str):
        faults.append(f"{where}: must be a string, got {_shown(value)}")
    return value


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
