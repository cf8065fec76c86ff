"""Requests that a tool answers: what the user says, the right call, the true result, and the reply that restates it.

Results come from the real tools, so a reply is right by construction.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pipeline.data.world.questions import capitalised, join
from pipeline.data.world.styles import draw
from pipeline.tools.arithmetic import format_number
from pipeline.tools.registry import call_tool
from pipeline.tools.simulated import CITIES, CNY_PER, FACTORS, PHRASES, TIMES

_UNIT_NAMES = {
    "km": "公里",
    "miles": "英里",
    "kg": "公斤",
    "pounds": "磅",
    "meters": "米",
    "feet": "英尺",
    "celsius": "摄氏度",
    "fahrenheit": "华氏度",
}
_UNIT_PAIRS = (*FACTORS, ("celsius", "fahrenheit"), ("fahrenheit", "celsius"))

# How a request is said, as a clause and as whole sentences; how its result is restated; the thought before the call.
_SAID: dict[str, dict[str, tuple[str, tuple[str, ...], str, str]]] = {
    "calculate_math": {
        "en": (
            "compute {q}",
            ("What is {q}?", "How much is {q}?", "{q}=?"),
            "the result is {r}",
            "I should compute {q} with a tool.",
        ),
        "zh": ("计算{q}", ("{q}等于多少？", "{q}是多少？", "{q}=?"), "结果是{r}", "我应该用工具来计算{q}的值。"),
    },
    "unit_converter": {
        "en": (
            "convert {q}",
            ("How much is {q}?", "I need to convert {q}."),
            "that makes {r}",
            "I should convert the units with a tool.",
        ),
        "zh": ("换算{q}", ("{q}是多少？", "我想换算{q}。"), "换算后是{r}", "我应该用工具来换算这个单位。"),
    },
    "get_current_weather": {
        "en": (
            "check the weather in {q}",
            ("How is the weather in {q}?", "Is it warm in {q} now?"),
            "{q} has {r}",
            "I should look up the weather in {q}.",
        ),
        "zh": ("查一下{q}的天气", ("{q}天气怎么样？", "{q}现在热不热？"), "{q}现在{r}", "我应该用工具查一下{q}的天气。"),
    },
    "get_current_time": {
        "en": (
            "tell me the time in {q}",
            ("What time is it in {q}?", "What is the time in {q} now?"),
            "it is {r} there",
            "I should look up the time in {q}.",
        ),
        "zh": ("告诉我{q}的时间", ("{q}现在几点？", "{q}是什么时间？"), "那里现在是{r}", "我应该用工具查一下{q}的时间。"),
    },
    "get_exchange_rate": {
        "en": (
            "get the rate from {q}",
            ("What is the rate from {q}?", "How do I exchange {q}?"),
            "the rate is {r}",
            "I should look up the rate from {q}.",
        ),
        "zh": ("查{q}的汇率", ("{q}的汇率是多少？", "{q}怎么兑换？"), "汇率是{r}", "我应该用工具查一下{q}的汇率。"),
    },
    "translate_text": {
        "en": (
            "translate {q}",
            ("How do I say {q}?", "I need a translation of {q}."),
            "the translation is {r}",
            "I should translate the text with a tool.",
        ),
        "zh": ("把{q}", ("{q}怎么说？", "我想把{q}。"), "译文是{r}", "我应该用工具来翻译这段文本。"),
    },
}
_POLITE = {"en": ("Please {}.", "Can you {}?", "I want you to {}.", "{}."), "zh": ("请{}。", "帮我{}。", "麻烦你{}。", "{}。")}
_THEN = {"en": (" and ", " and then "), "zh": ("，再", "，然后")}


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to do with one tool. `reply` and `guess` are clauses without a full stop; `guess` is false."""

    language: str
    tool: str
    arguments: dict[str, Any]
    clause: str
    text: str
    result: str
    reply: str
    guess: str
    gt: str
    thought: str


def request(random: Random, language: str, tool: str) -> Request:
    """Returns a request for this tool, with the result that the tool really gives."""
    arguments, subject = _ARGUMENTS[tool](random, language)
    result = call_tool(tool, arguments)
    if result.is_error:
        raise AssertionError(f"{tool} {arguments}: {result.content}")
    shown, gt, guessed = _OUTCOMES[tool](random, language, json.loads(result.content))
    clause, texts, reply, thought = _SAID[tool][language]
    clause = clause.format(q=subject)
    polite = capitalised(random.choice(_POLITE[language]).format(clause))
    text = random.choice([capitalised(text.format(q=subject)) for text in texts] + [polite])
    true, false = (reply.format(q=subject, r=value) for value in (shown, guessed))
    return Request(language, tool, arguments, clause, text, result.content, true, false, gt, thought.format(q=subject))


def distinct_requests(random: Random, language: str, tools: Sequence[str]) -> list[Request]:
    """Returns a request for each of these tools, no two with the same answer, which would make one impossible to check."""
    requests: list[Request] = []
    while len(requests) < len(tools):
        asked = request(random, language, tools[len(requests)])
        if asked.gt not in [earlier.gt for earlier in requests]:
            requests.append(asked)
    return requests


def said_together(random: Random, requests: Sequence[Request]) -> str:
    """Returns one user text for all requests."""
    if len(requests) == 1:
        return requests[0].text
    language = requests[0].language
    clauses = random.choice(_THEN[language]).join(request.clause for request in requests)
    return capitalised(random.choice(_POLITE[language]).format(clauses))


def replied_together(language: str, clauses: Sequence[str]) -> str:
    """Returns one reply that holds every clause, in order."""
    also, stop = ("Also, ", ".") if language == "en" else ("另外，", "。")
    first, *rest = clauses
    return join(language, capitalised(first) + stop, *(also + clause + stop for clause in rest))


def expression(random: Random) -> str:
    """Returns a sum, difference or product of short numbers, never negative; one in six has three operands."""
    a, b = random.randint(1, 99), random.randint(1, 99)
    x, y = random.randint(2, 20), random.randint(2, 20)
    weights = {f"{a}+{b}": 4, f"{max(a, b)}-{min(a, b)}": 3, f"{x}*{y}": 3, f"{a}+{x}+{y}": 1, f"{x}*{y % 10}+{a}": 1}
    return draw(random, weights)


def _math(random: Random, language: str) -> tuple[dict[str, Any], str]:
    text = expression(random)
    return {"expression": text}, text


def _units(random: Random, language: str) -> tuple[dict[str, Any], str]:
    source, target = random.choice(_UNIT_PAIRS)
    value = random.randint(1, 99)
    words = f"{value} {source} to {target}" if language == "en" else f"{value}{_UNIT_NAMES[source]}到{_UNIT_NAMES[target]}"
    arguments: dict[str, Any] = {"value": value, "from_unit": source, "to_unit": target}
    return arguments, words


def _weather(random: Random, language: str) -> tuple[dict[str, Any], str]:
    zh, en, *_ = random.choice(CITIES)
    city = en if language == "en" else zh
    return {"location": city}, city


def _time(random: Random, language: str) -> tuple[dict[str, Any], str]:
    zone = random.choice(list(TIMES))
    return {"timezone": zone}, zone


def _rate(random: Random, language: str) -> tuple[dict[str, Any], str]:
    source, target = random.sample(list(CNY_PER), 2)
    words = f"{source} to {target}" if language == "en" else f"{source}到{target}"
    return {"from_currency": source, "to_currency": target}, words


def _translation(random: Random, language: str) -> tuple[dict[str, Any], str]:
    zh, en = random.choice(PHRASES)
    text, target = (zh, "english") if random.random() < 0.5 else (en, "chinese")
    spoken = {"english": "英语", "chinese": "中文"}[target]
    words = f"'{text}' in {target.capitalize()}" if language == "en" else f"“{text}”译成{spoken}"
    return {"text": text, "target_language": target}, words


_ARGUMENTS = {
    "calculate_math": _math,
    "unit_converter": _units,
    "get_current_weather": _weather,
    "get_current_time": _time,
    "get_exchange_rate": _rate,
    "translate_text": _translation,
}


# From a tool's result: how it is shown in a reply, the gt item in it, and a false one shown the same way.
def _math_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    number = result["result"]
    return number, number, str(_other_number(random, int(number)))


def _units_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    number = format_number(result["result"])
    return number, number, str(_other_number(random, round(result["result"])))


def _weather_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    degrees = result["temperature"].removesuffix("°C")
    join_words = f"°C, {result['condition']}" if language == "en" else f"°C，{result['condition']}"
    return degrees + join_words, degrees, str(_other_number(random, int(degrees))) + join_words


def _time_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    clock = result["datetime"][11:16]
    return clock, clock, random.choice(sorted(set(TIMES.values()) - {clock}))


def _rate_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    rate = format_number(result["rate"])
    return rate, rate, format_number(round(result["rate"] * random.choice((0.5, 0.7, 1.3, 1.6)), 2) + 0.01)


def _translation_outcome(random: Random, language: str, result: Mapping[str, Any]) -> tuple[str, str, str]:
    text = result["translated_text"]
    column = next(column for column in (0, 1) if any(row[column] == text for row in PHRASES))
    return text, text, random.choice([row[column] for row in PHRASES if row[column] != text])


def _other_number(random: Random, number: int) -> int:
    """A different number of about the same size."""
    spread = max(3, abs(number) // 4)
    return number + random.choice((-1, 1)) * random.randint(1, spread)


_OUTCOMES = {
    "calculate_math": _math_outcome,
    "unit_converter": _units_outcome,
    "get_current_weather": _weather_outcome,
    "get_current_time": _time_outcome,
    "get_exchange_rate": _rate_outcome,
    "translate_text": _translation_outcome,
}
