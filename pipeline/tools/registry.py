"""The tools as a model meets them: OpenAI function schemas, argument checks, and results as JSON text.

`call_tool` is a boundary: whatever a model asks for comes back as a result it can read, never as an exception.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
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
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # JSON type: what an argument of it must be, and whether a value is
    "string": ("a non-empty string", lambda value: isinstance(value, str) and bool(value.strip())),
    "number": ("a number", lambda value: _is_number(value)),
    "integer": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, Mapping)),
}
MAX_REASON_CHARS = 200  # of an exception of a user's tool
ARGUMENT_TYPES: tuple[str, ...] = tuple(_TYPES)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads after a call: `content` is JSON text; an error is `{"error": reason}`."""

    content: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool.

    Attributes:
        schema: the OpenAI function object, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        function: gets the arguments that passed `argument_fault`, returns a JSON value. What it raises becomes an error that the
            model reads: the bare message of a `ToolFault`, of anything else with the exception's name before it.
    """

    schema: Mapping[str, Any]
    function: Callable[[Mapping[str, Any]], Any]

    @property
    def name(self) -> str:
        """The name that calls use."""
        name: str = self.schema["function"]["name"]
        return name


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


TOOLS: dict[str, Tool] = {name: Tool(tool_schema(name), function) for name, function in FUNCTIONS.items()}
"""The six tools of the default preset by name."""


def argument_fault(schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Returns what is wrong with the arguments of a call, measured by the tool's schema; None when nothing is.

    Of JSON Schema it reads `required` and each property's `type` (one name) and `enum`; no argument beyond the properties is
    taken, and no blank string.
    """
    parameters = schema["function"].get("parameters", {})
    properties = parameters.get("properties", {})
    if not isinstance(arguments, Mapping):
        return "arguments must be an object"
    for argument in parameters.get("required", []):
        if argument not in arguments:
            return f"missing argument '{argument}'"
    for argument, value in arguments.items():
        if argument not in properties:
            return f"unknown argument '{shown(str(argument))}'"
        wanted, fits = _TYPES.get(properties[argument].get("type"), ("", lambda _: True))
        if not fits(value):
            return f"argument '{argument}' must be {wanted}"
        if "enum" in properties[argument] and value not in properties[argument]["enum"]:
            return f"argument '{argument}' must be one of {', '.join(map(str, properties[argument]['enum']))}"
    return None


def offer_fault(offered: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Returns why a call that fits the `offered` function object may not fit the schema of the tool; None when all do.

    It compares what `argument_fault` reads: the arguments, which of them are required, their types and enums. Descriptions differ
    from one file to another.
    """
    given, own = (function["function"].get("parameters") or {} for function in (offered, schema))
    given_properties, properties = (
        parameters.get("properties") or {} if isinstance(parameters, Mapping) else {} for parameters in (given, own)
    )
    if not isinstance(given_properties, Mapping):
        return f"properties must be an object with an entry per argument, got {shown(json_text(given_properties))}"
    required = given.get("required") if isinstance(given, Mapping) else None
    for argument in own.get("required", []):
        if argument not in given_properties or not isinstance(required, list) or argument not in required:
            return f"argument '{argument}' must be required"
    for argument, entry in given_properties.items():
        if argument not in properties:
            return f"unknown argument '{shown(str(argument))}', it takes {', '.join(properties) or 'none'}"
        kind, wanted = (each.get("type") if isinstance(each, Mapping) else None for each in (entry, properties[argument]))
        if wanted is not None and kind != wanted and (kind, wanted) != ("integer", "number"):
            return f"type of argument '{argument}' must be {wanted}, got {shown(json_text(kind))}"
        values = entry.get("enum") if isinstance(entry, Mapping) else None
        if "enum" in properties[argument] and not (
            isinstance(values, list) and all(value in properties[argument]["enum"] for value in values)
        ):
            return f"enum of argument '{argument}' must be of {shown(json_text(properties[argument]['enum']))}"
    return None


def call_tool(name: str, arguments: Any, offered: Collection[str] | None = None, tools: Mapping[str, Tool] = TOOLS) -> ToolResult:
    """Returns the result of a call, or a readable error; never raises, whatever JSON the model wrote.

    Args:
        name: the tool's name as the model wrote it.
        arguments: decoded JSON of any type.
        offered: names of the tools the conversation offers; None offers all.
        tools: the tools there are, by name.
    """
    if not isinstance(name, str) or name not in tools or (offered is not None and name not in offered):
        asked = f"'{shown(name)}'" if isinstance(name, str) else "without a name"
        choice = [tool for tool in tools if offered is None or tool in offered]
        known = f"offered are {', '.join(choice)}" if choice else f"none is offered of {', '.join(tools)}"
        return _error(f"unknown tool {asked}, {known}")
    tool = tools[name]
    fault = argument_fault(tool.schema, arguments)
    if fault is not None:
        return _error(fault)
    try:
        # a copy, nested values too: rewards compare calls by their arguments, which a tool of the user's may take apart
        return ToolResult(json_text(tool.function(deepcopy(dict(arguments)))), is_error=False)
    except KeyboardInterrupt:  # and the stop signals, which are kinds of it
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary to a user's own tools: whatever they raise is a result
        if isinstance(error, ArithmeticFault | ToolFault):
            return _error(_message(error))
        return _error(described(error)[:MAX_REASON_CHARS])


def described(error: BaseException) -> str:
    """Returns `name: message` of what a user's code raised, on one line."""
    return " ".join(f"{type(error).__name__}: {_message(error)}".split())


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above: even the message is the user's code
        return "no message"


def json_text(value: Any) -> str:
    """Returns the value as JSON that UTF-8 can hold, characters beyond ASCII as they are.

    Raises:
        TypeError, ValueError, RecursionError: no JSON can hold it (nan and infinities included).
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")


def _is_number(value: Any) -> bool:
    """JSON numbers only; booleans are not numbers, and Python's decoder lets nan and infinities through."""
    return isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and math.isfinite(value)


def _error(reason: str) -> ToolResult:
    return ToolResult(json_text({"error": reason}), is_error=True)
