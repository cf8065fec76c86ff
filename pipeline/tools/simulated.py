"""What the six tools answer: fixed tables and real physics. Whatever the tables lack is a readable fault, never a guess.

Arguments arrive already checked against the schema (`registry`): types are right, required ones are there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.tools.arithmetic import evaluate, format_number

MAX_VALUE = 1e12  # of a quantity to convert


class ToolFault(ValueError):
    """The tool cannot answer; the message is what the model reads."""


# Chinese name, English name, degrees Celsius, condition in both languages.
CITIES: tuple[tuple[str, str, int, str, str], ...] = (
    ("北京", "Beijing", 28, "晴", "sunny"),
    ("上海", "Shanghai", 15, "多云", "cloudy"),
    ("广州", "Guangzhou", 32, "闷热", "muggy"),
    ("深圳", "Shenzhen", 30, "晴", "sunny"),
    ("杭州", "Hangzhou", 22, "阴", "overcast"),
    ("成都", "Chengdu", 18, "小雨", "rainy"),
    ("武汉", "Wuhan", 25, "多云", "cloudy"),
    ("南京", "Nanjing", 20, "晴", "sunny"),
    ("西安", "Xi'an", 16, "大风", "windy"),
    ("重庆", "Chongqing", 26, "阴", "overcast"),
    ("东京", "Tokyo", 12, "晴", "sunny"),
    ("纽约", "New York", 8, "多云", "cloudy"),
    ("伦敦", "London", 5, "小雨", "rainy"),
    ("巴黎", "Paris", 10, "阴", "overcast"),
    ("悉尼", "Sydney", 25, "晴朗", "clear"),
)

TIMES: dict[str, str] = {
    "Asia/Shanghai": "14:30",
    "America/New_York": "01:30",
    "Europe/London": "06:30",
    "Asia/Tokyo": "15:30",
    "Europe/Paris": "07:30",
    "Australia/Sydney": "17:30",
}

CNY_PER: dict[str, float] = {"CNY": 1.0, "USD": 7.21, "EUR": 7.85, "GBP": 9.12, "JPY": 0.048, "AUD": 4.72}

FACTORS: dict[tuple[str, str], float] = {
    ("km", "miles"): 0.621371,
    ("miles", "km"): 1.60934,
    ("kg", "pounds"): 2.20462,
    ("pounds", "kg"): 0.453592,
    ("meters", "feet"): 3.28084,
    ("feet", "meters"): 0.3048,
}
UNITS: tuple[str, ...] = ("km", "miles", "kg", "pounds", "meters", "feet", "celsius", "fahrenheit")

# Chinese, English.
PHRASES: tuple[tuple[str, str], ...] = (
    ("你好世界", "Hello world"),
    ("早上好", "Good morning"),
    ("今天天气真好", "The weather is nice today"),
    ("我爱编程", "I love programming"),
    ("机器学习很有趣", "Machine learning is fun"),
    ("生日快乐", "Happy birthday"),
    ("晚安", "Good night"),
    ("谢谢你", "Thank you"),
    ("再见", "Goodbye"),
    ("我喜欢红色", "I like red"),
    ("欢迎回家", "Welcome home"),
    ("祝你好运", "Good luck"),
)
_LANGUAGES = {"english": 1, "chinese": 0, "英语": 1, "英文": 1, "中文": 0, "汉语": 0}

_WEATHER = {
    name.casefold(): (name, degrees, condition)
    for zh, en, degrees, zh_condition, en_condition in CITIES
    for name, condition in ((zh, zh_condition), (en, en_condition))
}
_ZONES = {zone.casefold(): zone for zone in TIMES}
_PHRASE_ROWS = {text.casefold(): row for row in PHRASES for text in row}


def shown(text: str) -> str:
    """Returns the text as an error message may quote it: at most 40 characters, printable in UTF-8."""
    return text[:40].encode("utf-8", "replace").decode("utf-8")


def calculate_math(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"result": text}`; raises ArithmeticFault."""
    return {"result": format_number(evaluate(arguments["expression"]))}


def unit_converter(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"result": number}` to 4 decimals; temperatures are converted with their offset."""
    value = arguments["value"]
    source, target = arguments["from_unit"].strip().lower(), arguments["to_unit"].strip().lower()
    for unit in (source, target):
        if unit not in UNITS:
            raise ToolFault(f"unknown unit '{shown(unit)}', known are {', '.join(UNITS)}")
    if abs(value) > MAX_VALUE:
        raise ToolFault("the value is too large")
    if source == target:
        result = float(value)
    elif (source, target) == ("celsius", "fahrenheit"):
        result = value * 9 / 5 + 32
    elif (source, target) == ("fahrenheit", "celsius"):
        result = (value - 32) * 5 / 9
    elif (source, target) in FACTORS:
        result = value * FACTORS[source, target]
    else:
        raise ToolFault(f"cannot convert {source} to {target}")
    rounded = round(result, 4)
    return {"result": int(rounded) if rounded == int(rounded) else rounded}


def get_current_weather(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns city, temperature, humidity and condition, in the language of the city's name."""
    row = _WEATHER.get(arguments["location"].strip().casefold())
    if row is None:
        raise ToolFault(f"unknown city '{shown(arguments['location'])}'")
    city, degrees, condition = row
    return {"city": city, "temperature": f"{degrees}°C", "humidity": "65%", "condition": condition}


def get_current_time(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the simulated world's one moment in a time zone (default Asia/Shanghai)."""
    asked = arguments.get("timezone", "Asia/Shanghai")
    zone = _ZONES.get(asked.strip().casefold())
    if zone is None:
        raise ToolFault(f"unknown timezone '{shown(asked)}', known are {', '.join(TIMES)}")
    return {"datetime": f"2025-03-07 {TIMES[zone]}:00", "timezone": zone}


def get_exchange_rate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how much of one currency a unit of another buys: to 2 decimals, to 4 below 0.1."""
    source, target = arguments["from_currency"].strip().upper(), arguments["to_currency"].strip().upper()
    for currency in (source, target):
        if currency not in CNY_PER:
            raise ToolFault(f"unknown currency '{shown(currency)}', known are {', '.join(CNY_PER)}")
    rate = CNY_PER[source] / CNY_PER[target]
    return {"from": source, "to": target, "rate": round(rate, 2 if rate >= 0.1 else 4)}


def translate_text(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the translation of one of the known phrases into english or chinese."""
    language = _LANGUAGES.get(arguments["target_language"].strip().lower())
    if language is None:
        raise ToolFault(f"unknown language '{shown(arguments['target_language'])}', known are english and chinese")
    row = _PHRASE_ROWS.get(arguments["text"].strip().casefold())
    if row is None:
        raise ToolFault(f"no translation of '{shown(arguments['text'])}'")
    return {"translated_text": row[language]}


FUNCTIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "calculate_math": calculate_math,
    "unit_converter": unit_converter,
    "get_current_weather": get_current_weather,
    "get_current_time": get_current_time,
    "get_exchange_rate": get_exchange_rate,
    "translate_text": translate_text,
}
