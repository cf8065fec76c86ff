"""The tools as a model meets them: OpenAI function schemas, argument checks, and results as JSON text.

`call_tool` is a boundary: whatever a model asks for comes back as a result it can read, never as an exception.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.tools.arithmetic import ArithmeticFault
from pipeline.tools.simulated import FUNCTIONS, ToolFault, shown

# Descriptions are short because every one of them is part of every prompt that offers the tool.
_DESCRIPTIONS: dict[str, dict[str, str]] = {
    "calculate_math": {"zh": "计算数学表达式", "en": "Compute an expression"},
    "unit_converter": {"zh": "单位换算", "en": "Convert units"},
    "get_current_weather": {"zh": "获取天气", "en": "Get the weather"},
    "get_current_time": {"zh": "获取时间", "en": "Get the time"},
    "get_exchange_rate": {"zh": "获取汇率", "en": "Get an exchange rate"},
    "translate_text": {"zh": "翻译文本", "en": "Translate a text"},
}
_PARAMETERS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {  # argument: JSON type; the required ones
    "calculate_math": ({"expression": "string"}, ("expression",)),
    "unit_converter": (
        {"value": "number", "from_unit": "string", "to_unit": "string"},
        ("value", "from_unit", "to_unit"),
    ),
    "get_current_weather": ({"location": "string"}, ("location",)),
    "get_current_time": ({"timezone": "string"}, ()),
    "get_exchange_rate": ({"from_currency": "string", "to_currency": "string"}, ("from_currency", "to_currency")),
    "translate_text": ({"text": "string", "target_language": "string"}, ("text", "target_language")),
}
TOOL_NAMES: tuple[str, ...] = tuple(FUNCTIONS)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads after a call: `content` is JSON text; an error is `{"error": reason}`."""

    content: str
    is_error: bool


def tool_schema(name: str, language: str = "zh") -> dict[str, Any]:
    """Returns the OpenAI function object of a tool, described in `language` (zh or en)."""
    types, required = _PARAMETERS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": _DESCRIPTIONS[name][language],
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": kind} for argument, kind in types.items()},
                "required": list(required),
            },
        },
    }


def argument_fault(name: str, arguments: Any) -> str | None:
    """Returns what is wrong with the arguments of a known tool, measured by its schema; None when nothing is."""
    types, required = _PARAMETERS[name]
    if not isinstance(arguments, Mapping):
        return "arguments must be an object"
    for argument in required:
        if argument not in arguments:
            return f"missing argument '{argument}'"
    for argument, value in arguments.items():
        if argument not in types:
            return f"unknown argument '{shown(str(argument))}'"
        if types[argument] == "string" and not (isinstance(value, str) and value.strip()):
            return f"argument '{argument}' must be a non-empty string"
        if types[argument] == "number" and not _is_number(value):
            return f"argument '{argument}' must be a number"
    return None


def call_tool(name: str, arguments: Any, offered: Collection[str] | None = None) -> ToolResult:
    """Returns the result of a call, or a readable error; never raises, whatever JSON the model wrote.

    Args:
        name: the tool's name as the model wrote it.
        arguments: decoded JSON of any type.
        offered: names of the tools the conversation offers; None offers all.
    """
    if not isinstance(name, str) or name not in FUNCTIONS or (offered is not None and name not in offered):
        known = ", ".join(tool for tool in TOOL_NAMES if offered is None or tool in offered)
        asked = f"'{shown(name)}'" if isinstance(name, str) else "without a name"
        return _error(f"unknown tool {asked}, offered are {known}")
    fault = argument_fault(name, arguments)
    if fault is not None:
        return _error(fault)
    try:
        result = FUNCTIONS[name](arguments)
    except (ArithmeticFault, ToolFault) as error:
        return _error(str(error))
    return ToolResult(json.dumps(result, ensure_ascii=False), is_error=False)


def _is_number(value: Any) -> bool:
    """JSON numbers only; booleans are not numbers, and Python's decoder lets nan and infinities through."""
    return isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and math.isfinite(value)


def _error(reason: str) -> ToolResult:
    return ToolResult(json.dumps({"error": reason}, ensure_ascii=False), is_error=True)
