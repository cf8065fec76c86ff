"""The tools: physics by hand, errors that can be read, and no input that raises or hangs."""

import json
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tools.arithmetic import MAX_ABS, ArithmeticFault, evaluate, format_number
from pipeline.tools.registry import ARGUMENT_TYPES, TOOL_NAMES, argument_fault, call_tool, offer_fault, tool_schema
from pipeline.tools.simulated import CITIES, PHRASES, TIMES


def answer(name: str, **arguments: object) -> dict:
    result = call_tool(name, arguments)
    assert not result.is_error, result.content
    return json.loads(result.content)


def error(name: object, arguments: object, offered: object = None) -> str:
    result = call_tool(name, arguments, offered)  # type: ignore[arg-type]
    assert result.is_error
    assert list(json.loads(result.content)) == ["error"]
    return json.loads(result.content)["error"]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("12+34", "46"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("（12＋34）×2", "92"),
        ("２＊（３．５－１）／４", "1.25"),
        ("１７％５＾２", "17"),
        ("5–8", "-3"),
        ("1e5+1.5e-1", "100000.15"),
        ("10÷4", "2.5"),
        ("8/2", "4"),
        ("7//2 + 7%2", "4"),
        ("-7//2", "-4"),
        ("2^10", "1024"),
        ("2**3**2", "512"),
        ("5−8", "-3"),
        ("-2**2", "-4"),
        ("math.sqrt(144)", "12"),
        ("sqrt(2)", "1.4142"),
        ("abs(3-10)+max(1,2,3)-min(4，5)", "6"),
        ("round(2.6)", "3"),
        ("1/3", "0.3333"),
        ("1/100000", "1e-05"),
        ("0*-1.5", "0"),
        ("999*999", "998001"),
        ("123456789*987654321", "121932631112635269"),
        ("10**30", "1" + "0" * 30),
    ],
)
def test_arithmetic_by_hand(expression: str, text: str) -> None:
    assert format_number(evaluate(expression)) == text


@pytest.mark.parametrize("expression", ["1+" * 99 + "1", "100+" * 49 + "9-9", "-" * 198 + "1", "(" * 90 + "1" + ")" * 90])
def test_arithmetic_takes_whatever_fits_into_its_length(expression: str) -> None:
    assert len(expression) <= 200
    assert evaluate(expression) == eval(expression)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("1//0.0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("10**31", "too large"),
        ("1e400", "too large"),
        ("10**20*10**20", "too large"),
        ("(0-8)**0.5", "root"),
        ("sqrt(-1)", "root"),
        ("2+", "malformed"),
        ("(" * 150 + "1" + ")" * 49, "malformed"),
        ("1+" * 100 + "1", "longer"),
        ("1if 1else 2", "malformed"),
        ("0xfor 1", "malformed"),
        ("1e5if 1else 2", "malformed"),
        ("1" * 201, "longer"),
        ("'a'*9", "signs"),
        ("[1][0]", "signs"),
        ("().__class__", "known"),
        ("__import__(1)", "unknown function"),
        ("math.pi.real(1)", "unknown function"),
        ("x+1", "known"),
        ("True+1", "known"),
        ("1j*1j", "malformed"),
        ("1<2", "signs"),
        ("1 if 2 else 3", "known"),
        ("sqrt(1,2)", "takes 1"),
        ("min(1)", "takes 2 to 8"),
        ("round(1.5,ndigits=1)", "signs"),
    ],
)
def test_arithmetic_refuses_with_a_reason(expression: str, reason: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ArithmeticFault, match=reason):
        evaluate(expression)
    assert time.perf_counter() - start < 0.5


@given(st.integers(0, 999), st.integers(1, 999), st.integers(0, 99), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_arithmetic_keeps_integers_exact_and_precedence(a: int, b: int, c: int, sign: str) -> None:
    by_hand = {"+": c + a + b, "-": c + a - b, "*": c + a * b, "//": c + a // b, "%": c + a % b}[sign]
    assert evaluate(f"{c}+{a}{sign}{b}") == by_hand


@settings(max_examples=300)
@given(st.text(alphabet="0123456789+-*/%().,^× eEsqrtabminxro_", max_size=60))
def test_arithmetic_is_total_and_bounded(text: str) -> None:
    try:
        value = evaluate(text)
    except ArithmeticFault:
        return
    assert type(value) in (int, float)
    assert math.isfinite(value)
    assert abs(value) <= MAX_ABS
    assert len(format_number(value)) < 48


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (30, "celsius", "fahrenheit", 86),  # 30 * 1.8 + 32
        (-40, "celsius", "fahrenheit", -40),
        (212, "fahrenheit", "celsius", 100),
        (0, "fahrenheit", "celsius", -17.7778),  # -32 / 1.8
        (10, "km", "miles", 6.2137),
        (10, "Miles", " KM ", 16.0934),
        (3, "kg", "pounds", 6.6139),  # 6.61386
        (2.5, "feet", "meters", 0.762),
        (7, "kg", "kg", 7),
    ],
)
def test_units(value: float, source: str, target: str, expected: float) -> None:
    assert answer("unit_converter", value=value, from_unit=source, to_unit=target) == {"result": expected}


def test_other_tools_answer_from_their_tables() -> None:
    beijing = {"city": "北京", "temperature": "28°C", "humidity": "65%", "condition": "晴"}
    assert answer("get_current_weather", location="北京") == beijing
    assert answer("get_current_weather", location="new york") == {
        "city": "New York",
        "temperature": "8°C",
        "humidity": "65%",
        "condition": "cloudy",
    }
    assert answer("get_current_time") == {"datetime": "2025-03-07 14:30:00", "timezone": "Asia/Shanghai"}
    assert answer("get_current_time", timezone="America/New_York")["datetime"] == "2025-03-07 01:30:00"
    assert answer("translate_text", text="你好世界", target_language="English") == {"translated_text": "Hello world"}
    assert answer("translate_text", text="good morning", target_language="中文") == {"translated_text": "早上好"}
    assert "你好" not in call_tool("get_current_weather", {"location": "北京"}).content
    assert "北京" in call_tool("get_current_weather", {"location": "北京"}).content  # not escaped


# The eight rates of the reference.
@pytest.mark.parametrize(
    ("source", "target", "rate"),
    [
        ("USD", "CNY", 7.21),
        ("EUR", "CNY", 7.85),
        ("GBP", "CNY", 9.12),
        ("JPY", "CNY", 0.048),
        ("USD", "EUR", 0.92),
        ("USD", "GBP", 0.79),
        ("CNY", "JPY", 20.83),
        ("AUD", "CNY", 4.72),
        ("eur", "eur", 1.0),
    ],
)
def test_exchange_rates(source: str, target: str, rate: float) -> None:
    assert answer("get_exchange_rate", from_currency=source, to_currency=target)["rate"] == rate


def test_errors_name_what_was_given_and_what_is_allowed() -> None:
    stone = error("unit_converter", {"value": 1, "from_unit": "stone", "to_unit": "kg"})
    assert stone.startswith("unknown unit 'stone', known are km")
    assert error("unit_converter", {"value": 1, "from_unit": "kg", "to_unit": "km"}) == "cannot convert kg to km"
    assert error("unit_converter", {"value": 10**400, "from_unit": "kg", "to_unit": "pounds"}) == "the value is too large"
    assert error("get_current_weather", {"location": "Atlantis"}) == "unknown city 'Atlantis'"
    assert "unknown timezone 'Mars'" in error("get_current_time", {"timezone": "Mars"})
    assert "unknown currency 'XYZ'" in error("get_exchange_rate", {"from_currency": "XYZ", "to_currency": "CNY"})
    assert error("translate_text", {"text": "spam", "target_language": "english"}) == "no translation of 'spam'"
    assert "unknown language 'french'" in error("translate_text", {"text": "晚安", "target_language": "french"})
    assert error("calculate_math", {"expression": "1/0"}) == "division by zero"
    assert "unknown tool 'fly', offered are calculate_math," in error("fly", {})
    offered = error("get_current_time", {}, ["calculate_math", "translate_text"])
    assert offered == "unknown tool 'get_current_time', offered are calculate_math, translate_text"


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("calculate_math", [], "arguments must be an object"),
        ("calculate_math", "12+34", "arguments must be an object"),
        ("calculate_math", None, "arguments must be an object"),
        ("calculate_math", {}, "missing argument 'expression'"),
        ("calculate_math", {"expression": 12}, "argument 'expression' must be a non-empty string"),
        ("calculate_math", {"expression": "  "}, "argument 'expression' must be a non-empty string"),
        ("calculate_math", {"expression": "1", "exp": "2"}, "unknown argument 'exp'"),
        ("unit_converter", {"value": "3", "from_unit": "kg", "to_unit": "kg"}, "argument 'value' must be a number"),
        ("unit_converter", {"value": True, "from_unit": "kg", "to_unit": "kg"}, "argument 'value' must be a number"),
        ("unit_converter", {"value": math.nan, "from_unit": "kg", "to_unit": "kg"}, "argument 'value' must be a number"),
        ("unit_converter", {"value": 3, "from_unit": "kg"}, "missing argument 'to_unit'"),
        ("get_current_time", {"timezone": None}, "argument 'timezone' must be a non-empty string"),
    ],
)
def test_argument_checks(name: str, arguments: object, fault: str) -> None:
    assert argument_fault(tool_schema(name), arguments) == fault
    assert error(name, arguments) == fault


def test_where_nothing_is_offered_the_known_tools_are_named() -> None:
    for offered in ([], ["get_stock"]):
        said = error("calculate_math", {"expression": "6*7"}, offered)
        assert said == f"unknown tool 'calculate_math', none is offered of {', '.join(TOOL_NAMES)}"


def function(properties: dict[str, Any] | None, required: list[str] | None) -> dict[str, Any]:
    """A function object; None leaves a key out."""
    parameters = {"properties": properties, "required": required}
    return {"function": {"name": "f", "parameters": {key: value for key, value in parameters.items() if value is not None}}}


ENTRY = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(ARGUMENT_TYPES), "enum": st.lists(st.sampled_from(["a", 1, 2.5, True]), max_size=2)}
)
PROPERTIES = st.dictionaries(st.sampled_from("xyz"), ENTRY, max_size=3)
VALUES = st.sampled_from(["a", "", 1, 2.5, True, [1], {"k": 1}])


@settings(max_examples=500, deadline=None)
@given(PROPERTIES, PROPERTIES, st.data())
def test_a_tool_takes_every_call_that_fits_an_offer_without_fault(
    own: dict[str, Any], given_: dict[str, Any], data: st.DataObject
) -> None:
    """The naive twin: calls are drawn and checked by both schemas."""
    schema, offered = (
        function(properties, data.draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else [])
        for properties in (own, given_)
    )
    fault = offer_fault(offered, schema)
    arguments = data.draw(st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3))
    if fault is None and argument_fault(offered, arguments) is None:
        assert argument_fault(schema, arguments) is None


@pytest.mark.parametrize(
    ("properties", "required", "fault"),
    [
        ({"from_unit": "string"}, ["from_unit"], "argument 'value' must be required"),
        ({"value": "number", "from_unit": "string", "to_unit": "string"}, ["from_unit", "to_unit"], "'value' must be required"),
        ({"value": "string", "from_unit": "string", "to_unit": "string"}, None, "'value' must be number, got \"string\""),
        ({"value": "number", "from_unit": None, "to_unit": "string"}, None, "'from_unit' must be string, got null"),
        ({"value": "number", "from_unit": "string", "to_unit": "string", "digits": "integer"}, None, "unknown argument 'digits'"),
        ({"value": "integer", "from_unit": "string", "to_unit": "string"}, None, None),
    ],
)
def test_an_offer_with_another_schema_is_named(
    properties: dict[str, str | None], required: list[str] | None, fault: str | None
) -> None:
    entries = {name: {"type": kind, "description": "-"} if kind else {} for name, kind in properties.items()}
    always = ["value", "from_unit", "to_unit"]
    said = offer_fault(function(entries, always if required is None else required), tool_schema("unit_converter"))
    assert (fault is None) == (said is None) and (fault or "") in (said or "")


@pytest.mark.parametrize("parameters", [None, [], "x", {"properties": []}, {"properties": {"expression": 3}, "required": "no"}])
def test_an_offer_without_usable_parameters_has_a_fault(parameters: Any) -> None:
    assert "'expression' must be required" in str(
        offer_fault({"function": {"name": "f", "parameters": parameters}}, tool_schema("calculate_math"))
    )


@pytest.mark.parametrize("properties", [["timezone"], "timezone", 3])
def test_an_offer_whose_arguments_are_no_object_has_a_fault(properties: Any) -> None:
    """Of a tool that takes a call without arguments, too."""
    offered = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    assert "properties must be an object" in str(offer_fault(offered, tool_schema("get_current_time")))


def test_zero_is_a_value_and_optional_arguments_are_optional() -> None:
    assert argument_fault(tool_schema("unit_converter"), {"value": 0, "from_unit": "kg", "to_unit": "pounds"}) is None
    assert argument_fault(tool_schema("get_current_time"), {}) is None


def test_schemas_agree_with_an_outside_validator() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for name in TOOL_NAMES:
        for language in ("zh", "en"):
            schema = tool_schema(name, language)
            assert schema["type"] == "function"
            assert schema["function"]["name"] == name
            assert len(json.dumps(schema, ensure_ascii=False)) < 300  # every prompt pays for it
            jsonschema.Draft202012Validator.check_schema(schema["function"]["parameters"])
    validator = jsonschema.Draft202012Validator(tool_schema("unit_converter")["function"]["parameters"])
    trials: tuple[object, ...] = (
        {"value": 1, "from_unit": "a", "to_unit": "b"},
        {"value": "1", "from_unit": "a", "to_unit": "b"},
        {},
        [],
    )
    for arguments in trials:
        assert validator.is_valid(arguments) == (argument_fault(tool_schema("unit_converter"), arguments) is None)
    assert tool_schema("calculate_math", "zh") != tool_schema("calculate_math", "en")
    tool_schema("calculate_math")["function"]["name"] = "changed"
    assert tool_schema("calculate_math")["function"]["name"] == "calculate_math"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ARGUMENT_NAMES = (
    "expression",
    "value",
    "from_unit",
    "to_unit",
    "location",
    "timezone",
    "from_currency",
    "text",
    "target_language",
)
VALUES = JSON | st.sampled_from(["km", "miles", "celsius", "USD", "english", "\ud800", "9" * 300, 10**400, -1e308])


@settings(max_examples=500)
@given(
    st.sampled_from(TOOL_NAMES) | JSON,
    JSON | st.dictionaries(st.sampled_from(ARGUMENT_NAMES), VALUES, max_size=4),
    st.none() | st.lists(st.sampled_from(TOOL_NAMES)),
)
def test_no_call_raises_and_every_result_is_json_in_utf8(name: object, arguments: object, offered: list[str] | None) -> None:
    result = call_tool(name, arguments, offered)  # type: ignore[arg-type]
    content = json.loads(result.content)
    assert isinstance(content, dict)
    assert ("error" in content) == result.is_error
    assert not re.match(r"[A-Za-z]+Error: ", str(content.get("error")))  # refused, not broken
    assert len(result.content.encode("utf-8")) < 600  # not cut, so short by construction


def test_a_result_never_quotes_a_text_that_utf8_cannot_hold() -> None:
    assert "?" in error("get_current_weather", json.loads('{"location": "\\ud800city"}'))


def test_tables_have_no_ambiguous_names() -> None:
    names = [name.casefold() for city in CITIES for name in city[:2]]
    phrases = [text.casefold() for row in PHRASES for text in row]
    assert len(set(names)) == len(names) == 30
    assert len(set(phrases)) == len(phrases)
    assert len(set(TIMES.values())) == len(TIMES) == 6
