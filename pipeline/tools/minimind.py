"""MiniMind's simulated results (its agent training, commit d65ef2c), for its data files and for comparison.

They are confident where they should be an error: an unknown unit has factor 1, temperatures have no offset, an unknown city has
22 degrees, an unknown text is its own translation. Only Python's eval is not reproduced: expressions go through `arithmetic`, so
values beyond its bounds and values that are no real numbers are errors here. Where a required argument is absent MiniMind's
defaults are known for `expression` alone ("0"); elsewhere that is an error here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.tools.arithmetic import ArithmeticFault, Function, Number, evaluate
from pipeline.tools.registry import ToolResult, json_text

MAX_RESULT_CHARS = 2048
NOT_FOUND = ToolResult('{"error": "tool not found"}', is_error=True)
"""What MiniMind answers to every failure, whatever its cause."""

FACTORS = {
    "km_miles": 0.621371,
    "miles_km": 1.60934,
    "kg_pounds": 2.20462,
    "pounds_kg": 0.453592,
    "meters_feet": 3.28084,
    "feet_meters": 0.3048,
    "celsius_fahrenheit": 1.8,
    "fahrenheit_celsius": 0.5556,
}
WEATHER = {
    "北京": ("28°C", "晴"),
    "上海": ("15°C", "多云"),
    "广州": ("32°C", "闷热"),
    "深圳": ("30°C", "晴"),
    "杭州": ("22°C", "阴"),
    "成都": ("18°C", "小雨"),
    "武汉": ("25°C", "多云"),
    "南京": ("20°C", "晴"),
    "西安": ("16°C", "大风"),
    "重庆": ("26°C", "阴"),
    "Tokyo": ("12°C", "晴"),
    "New York": ("8°C", "多云"),
    "London": ("5°C", "小雨"),
    "Paris": ("10°C", "阴"),
    "Sydney": ("25°C", "晴朗"),
}
TIMES = {
    "Asia/Shanghai": "2025-03-07 14:30:00",
    "America/New_York": "2025-03-07 01:30:00",
    "Europe/London": "2025-03-07 06:30:00",
    "Asia/Tokyo": "2025-03-07 15:30:00",
    "Europe/Paris": "2025-03-07 07:30:00",
    "Australia/Sydney": "2025-03-07 17:30:00",
}
RATES = {
    ("USD", "CNY"): 7.21,
    ("EUR", "CNY"): 7.85,
    ("GBP", "CNY"): 9.12,
    ("JPY", "CNY"): 0.048,
    ("USD", "EUR"): 0.92,
    ("USD", "GBP"): 0.79,
    ("CNY", "JPY"): 20.83,
    ("AUD", "CNY"): 4.72,
}
TRANSLATIONS = {
    ("你好世界", "english"): "Hello World",
    ("Good morning", "chinese"): "早上好",
    ("今天天气真好", "english"): "The weather is really nice today",
    ("I love programming", "chinese"): "我爱编程",
    ("机器学习很有趣", "english"): "Machine learning is interesting",
    ("Happy birthday", "chinese"): "生日快乐",
}

_SIGNS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "（": "(", "）": ")"})
MAX_COMBINATORIAL = 1000  # whole-number functions of more would compute for long before their value is found too large


def _small(function: Callable[..., int]) -> Callable[..., int]:
    def bounded(*arguments: int) -> int:
        if any(abs(argument) > MAX_COMBINATORIAL for argument in arguments):
            raise ArithmeticFault("the result is too large")
        return function(*arguments)

    return bounded


_FUNCTIONS_OF_MATH: dict[str, Function] = {
    **{
        name: (getattr(math, name), 1, 1)
        for name in "acos acosh asin asinh atan atanh cbrt ceil cos cosh degrees erf erfc exp exp2 expm1 fabs floor gamma isqrt "
        "lgamma log10 log1p log2 radians sin sinh sqrt tan tanh trunc".split()
    },
    **{name: (getattr(math, name), 2, 2) for name in ("atan2", "copysign", "fmod", "pow", "remainder")},
    **{name: (getattr(math, name), 1, 8) for name in ("gcd", "hypot", "lcm")},
    "log": (math.log, 1, 2),
    "factorial": (_small(math.factorial), 1, 1),
    "comb": (_small(math.comb), 2, 2),
    "perm": (_small(math.perm), 1, 2),
}
_NAMES: dict[str, Function | Number] = {
    **{f"math.{name}": function for name, function in _FUNCTIONS_OF_MATH.items()},
    "math.pi": math.pi,
    "math.e": math.e,
    "math.tau": math.tau,
}


def minimind_result(name: str, arguments: Any) -> ToolResult:
    """Returns what MiniMind would answer to a call; never raises, whatever JSON the model wrote.

    Neither the schema nor the list of offered tools is consulted. A long result is cut, even if it is no JSON any more.

    Args:
        name: the tool's name as the model wrote it.
        arguments: decoded JSON of any type.
    """
    if not isinstance(name, str) or name not in FUNCTIONS or not isinstance(arguments, Mapping):
        return NOT_FOUND
    try:
        content = json_text(FUNCTIONS[name](arguments))
    # absent keys, wrong types, numbers too large to be written, nesting too deep, arithmetic without a value (a ValueError)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        return NOT_FOUND
    return ToolResult(content[:MAX_RESULT_CHARS], is_error=False)


def calculate_math(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"result": text}`, the text as Python prints the number: `math.sqrt(144)` is "12.0"; `sqrt(144)` is unknown."""
    expression = str(arguments.get("expression", "0"))
    return {"result": str(evaluate(expression, signs=_SIGNS, names=_NAMES))}


def unit_converter(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"result": float}` to 4 decimals."""
    units = f"{arguments['from_unit'].lower()}_{arguments['to_unit'].lower()}"
    return {"result": round(float(arguments["value"]) * FACTORS.get(units, 1), 4)}


def get_current_weather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns city, temperature, humidity and condition; 22 degrees and 晴 for every unknown city."""
    city = arguments["location"]
    degrees, condition = WEATHER.get(city, ("22°C", "晴"))
    return {"city": city, "temperature": degrees, "humidity": "65%", "condition": condition}


def get_current_time(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns datetime and timezone; Shanghai's time under the name of every unknown zone."""
    zone = arguments.get("timezone", "Asia/Shanghai")
    return {"datetime": TIMES.get(zone, TIMES["Asia/Shanghai"]), "timezone": zone}


def get_exchange_rate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns from, to and rate; 1.0 for every unknown pair."""
    source, target = arguments["from_currency"], arguments["to_currency"]
    return {"from": source, "to": target, "rate": RATES.get((source, target), 1.0)}


def translate_text(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the translation; every unknown text comes back as it was."""
    text, language = arguments["text"], arguments["target_language"].lower()
    return {"translated_text": TRANSLATIONS.get((text, language), text)}


FUNCTIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "calculate_math": calculate_math,
    "unit_converter": unit_converter,
    "get_current_weather": get_current_weather,
    "get_current_time": get_current_time,
    "get_exchange_rate": get_exchange_rate,
    "translate_text": translate_text,
}
