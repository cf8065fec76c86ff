"""Toolboxes: MiniMind's simulated results, a user's own tools and checker, and no call that raises under any of them."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prompts import PromptTask
from pipeline.errors import DataError
from pipeline.params.schema import Tools
from pipeline.rewards.scoring import earned, solved
from pipeline.rollout.records import StopReason, Trajectory, Turn
from pipeline.text.turns import parse_turn
from pipeline.tools import simulated
from pipeline.tools.minimind import FUNCTIONS, NOT_FOUND, minimind_result
from pipeline.tools.registry import TOOL_NAMES, Tool, ToolFault, ToolResult, tool_schema
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox, open_toolbox

ROOT = Path(__file__).resolve().parents[1]
MINIMIND = Toolbox("minimind")


def legacy(name: str, **arguments: Any) -> Any:
    result = MINIMIND.call(name, arguments)
    assert not result.is_error
    return json.loads(result.content)


# --- MiniMind's simulated results


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("math.sqrt(144)", "12.0"),
        ("256*37", "9472"),
        ("8/2", "4.0"),
        ("10÷4", "2.5"),
        ("7//2", "3"),
        ("2^10", "1024"),
        ("（1 + 2）×3", "9"),
        ("5−8", "-3"),
        ("0.1+0.2", "0.30000000000000004"),
        ("1/3", "0.3333333333333333"),
        ("0*-1.5", "-0.0"),
        ("math.pi", "3.141592653589793"),
        ("math.floor(math.log(100, 10)) + math.gcd(12, 18)", "8"),
        ("math.factorial(5) + math.comb(5, 2)", "130"),
    ],
)
def test_arithmetic_prints_what_python_prints(expression: str, text: str) -> None:
    assert legacy("calculate_math", expression=expression) == {"result": text}


@pytest.mark.parametrize(
    "expression",
    ["sqrt(144)", "abs(-1)", "max(1,2)", "round(2.5)", "1/0", "math.sqrt(-1)", "math.log(0)", "x", "", "'a'*10**9", "１＋１"]
    + ["9**9**9", "math.factorial(10**9)", "math.comb(10**9, 10**8)", "math.exp(1000)", "math.gcd(1.5)", "math.sqrt", "math"]
    + ["().__class__", "math.__loader__", "math.perm(1001)", "math.lgamma(0)"],
)
def test_what_has_no_value_is_not_found(expression: str) -> None:
    assert MINIMIND.call("calculate_math", {"expression": expression}) == NOT_FOUND
    assert json.loads(NOT_FOUND.content) == {"error": "tool not found"}


def test_arithmetic_defaults_to_zero_and_takes_numbers() -> None:
    assert legacy("calculate_math") == {"result": "0"}
    assert legacy("calculate_math", expression=12) == {"result": "12"}


@pytest.mark.parametrize(
    ("value", "source", "target", "result"),
    [
        (30, "celsius", "fahrenheit", 54.0),
        (212, "Fahrenheit", "CELSIUS", 117.7872),  # 212 * 0.5556
        (10, "km", "miles", 6.2137),
        (10, "miles", "km", 16.0934),
        (3, "kg", "pounds", 6.6139),
        (3, "pounds", "kg", 1.3608),  # 1.360776
        (2, "meters", "feet", 6.5617),  # 6.56168
        (2.5, "feet", "meters", 0.762),
        (7, "stone", "kg", 7.0),
        (7, "km", "kg", 7.0),
    ],
)
def test_units_without_offset_and_with_factor_one(value: float, source: str, target: str, result: float) -> None:
    assert legacy("unit_converter", value=value, from_unit=source, to_unit=target) == {"result": result}


def test_weather_and_time_of_the_unknown() -> None:
    for zh, en, degrees, zh_condition, _ in simulated.CITIES:  # the same fifteen cities, each under one name
        name = zh if degrees_of(zh) else en
        expected = {"city": name, "temperature": f"{degrees}°C", "humidity": "65%", "condition": zh_condition}
        assert legacy("get_current_weather", location=name) == expected
    assert legacy("get_current_weather", location="beijing") == {
        "city": "beijing",
        "temperature": "22°C",
        "humidity": "65%",
        "condition": "晴",
    }
    assert legacy("get_current_time") == {"datetime": "2025-03-07 14:30:00", "timezone": "Asia/Shanghai"}
    assert legacy("get_current_time", timezone="Mars") == {"datetime": "2025-03-07 14:30:00", "timezone": "Mars"}
    for zone, clock in simulated.TIMES.items():
        assert legacy("get_current_time", timezone=zone)["datetime"] == f"2025-03-07 {clock}:00"


def degrees_of(city: str) -> bool:
    return city in "北京上海广州深圳杭州成都武汉南京西安重庆"


@pytest.mark.parametrize(
    ("source", "target", "rate"),
    [("USD", "CNY", 7.21), ("EUR", "CNY", 7.85), ("GBP", "CNY", 9.12), ("JPY", "CNY", 0.048), ("USD", "EUR", 0.92)]
    + [("USD", "GBP", 0.79), ("CNY", "JPY", 20.83), ("AUD", "CNY", 4.72), ("usd", "CNY", 1.0), ("CNY", "USD", 1.0)],
)
def test_rates_are_directed_and_case_sensitive(source: str, target: str, rate: float) -> None:
    found = legacy("get_exchange_rate", from_currency=source, to_currency=target)
    assert found == {"from": source, "to": target, "rate": rate}


def test_translations_are_exact_or_echoes() -> None:
    assert legacy("translate_text", text="Good morning", target_language="Chinese") == {"translated_text": "早上好"}
    assert legacy("translate_text", text="good morning", target_language="chinese") == {"translated_text": "good morning"}
    assert legacy("translate_text", text="你好世界", target_language="french") == {"translated_text": "你好世界"}


def test_execution_asks_neither_the_schema_nor_the_offer_and_cuts_long_results() -> None:
    assert not MINIMIND.call("get_current_time", {"noise": 1}, ["calculate_math"]).is_error
    assert MINIMIND.call("fly", {}) == MINIMIND.call("translate_text", {"text": "a"}) == NOT_FOUND
    long = MINIMIND.call("translate_text", {"text": "长" * 5000, "target_language": "english"})
    assert len(long.content) == 2048 and not long.is_error


def test_the_default_preset_is_the_checked_tools() -> None:
    assert open_toolbox(Tools(preset="default", extra=None)) == PRESET_TOOLS
    assert open_toolbox(Tools(preset="minimind", extra=None)) == MINIMIND
    assert (
        "unknown unit 'stone'" in PRESET_TOOLS.call("unit_converter", {"value": 1, "from_unit": "stone", "to_unit": "kg"}).content
    )
    assert PRESET_TOOLS.check_for(TOOL_NAMES) is None


# --- a user's own tools


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Toolbox]:
    """Writes external/my_tools.py in a folder of its own and opens it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "external").mkdir()

    def opened(code: str, preset: str = "default") -> Toolbox:
        (tmp_path / "external/my_tools.py").write_text(code, encoding="utf-8")
        return open_toolbox(Tools.model_validate({"preset": preset, "extra": "my_tools.py"}))

    return opened


def documented() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(code)


def documented_task() -> PromptTask:
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/rewards.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    row = json.loads(text)
    system, user, _ = row["conversations"]
    return PromptTask(0, [1], False, [user], json.loads(system["tools"]), row["gt"])


def played(toolbox: Toolbox, texts: Sequence[str]) -> Trajectory:
    turns = [Turn(text, parse_turn(text, open_thinking=False)) for text in texts]
    results = [[toolbox.call(c.name, c.arguments, ["get_stock"]) for c in turn.parsed.calls] for turn in turns[:-1]]
    return Trajectory([1], [], [], [], turns, results, StopReason.EOS)


PEARS = '<tool_call>{"name": "get_stock", "arguments": {"product": "Pears"}}</tool_call>'


def test_the_documented_example_works(write: Callable[..., Toolbox]) -> None:
    for preset in ("default", "minimind"):
        toolbox, task = write(documented(), preset), documented_task()
        assert task.tools is not None and task.tools == [dict(toolbox.own["get_stock"].schema)]
        assert toolbox.call("get_stock", {"product": "Pears"}) == ToolResult('{"product": "pears", "count": 0}', is_error=False)
        unknown = toolbox.call("get_stock", {"product": "figs"})
        assert (json.loads(unknown.content), unknown.is_error) == (
            {"error": "unknown product 'figs', known are apples, pears"},
            True,
        )
        assert "must be a non-empty string" in toolbox.call("get_stock", {"product": 3}).content
        for reply in ("There are 0 pears.", "They are sold out."):
            trajectory = played(toolbox, [PEARS, reply])
            assert solved(task, trajectory, toolbox) and earned(task, trajectory, toolbox)
            assert not earned(task, played(toolbox, [reply]), toolbox)  # no call
        assert not solved(task, played(toolbox, [PEARS, "There are 3."]), toolbox)
        assert not solved(task, played(toolbox, [PEARS, "They are sold out."]))  # verify does not know the words
        assert toolbox.check_for(["calculate_math"]) is None


def test_presets_answer_the_other_calls(write: Callable[..., Toolbox]) -> None:
    default, minimind = write(documented()), write(documented(), "minimind")
    assert json.loads(default.call("calculate_math", {"expression": "8/2"}).content) == {"result": "4"}
    assert json.loads(minimind.call("calculate_math", {"expression": "8/2"}).content) == {"result": "4.0"}
    assert "offered are get_stock" in default.call("fly", {}, ["get_stock"]).content
    assert "unknown tool 'get_stock'" in default.call("get_stock", {"product": "pears"}, ["calculate_math"]).content


def test_an_own_tool_takes_the_place_of_a_preset_one_and_may_take_its_arguments_apart(write: Callable[..., Toolbox]) -> None:
    code = """
from pipeline.tools.registry import Tool, tool_schema
TOOLS = [Tool(schema=tool_schema("calculate_math"), function=lambda arguments: arguments.pop("expression"))]
"""
    arguments = {"expression": "1+1"}
    assert write(code).call("calculate_math", arguments).content == '"1+1"'
    assert arguments == {"expression": "1+1"}


TOOL = 'Tool(schema={"function": {"name": "f", "parameters": %s}}, function=print)'
HEAD = "from pipeline.tools.registry import Tool\n"


def arguments(entry: object, *required: str) -> dict[str, Any]:
    return {"properties": {"a": entry}, "required": list(required)}


def test_a_file_that_imports_one_of_the_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Toolbox]
) -> None:
    """Its edits would decide results and rerun nothing; what is installed is another matter."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("N = 1\n")
    assert write(f"import colorsys\n{HEAD}TOOLS = [{TOOL % {}}]").tools
    with pytest.raises(
        DataError, match="imports helper_of_mine.py, whose edits would rerun nothing; write all into the one file"
    ):
        write(f"import helper_of_mine\n{HEAD}TOOLS = [{TOOL % {}}]")
    sys.modules.pop("helper_of_mine")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("TOOLS = [", "cannot be run (SyntaxError"),
        ("import absent_module_of_mine", "cannot be run (ModuleNotFoundError: No module named"),
        ("1 / 0", "cannot be run (ZeroDivisionError: division by zero)"),
        ("", "must define TOOLS, a list"),
        ("TOOLS = []", "must define TOOLS, a list"),
        ("TOOLS = [print]", "must define TOOLS, a list"),
        (HEAD + "TOOLS = [Tool(schema={'name': 'f'}, function=print)]", 'TOOLS[0]: schema must be {"type": "function"'),
        (HEAD + "TOOLS = [Tool(schema=[], function=print)]", "TOOLS[0]: schema must be"),
        (HEAD + "TOOLS = [Tool(schema={'function': {'name': 'f'}}, function=3)]", "f: function must be callable, got int"),
        (HEAD + f"TOOLS = [{TOOL % '[]'}]", "f: parameters must be"),
        (HEAD + f"TOOLS = [{TOOL % arguments('string')}]", "f: parameters must be"),
        (
            HEAD + f"TOOLS = [{TOOL % arguments({'type': 'text'})}]",
            "type of argument 'a' must be one of string, number",
        ),
        (HEAD + f"TOOLS = [{TOOL % arguments({'type': ['string']})}]", "got ['string']"),
        (HEAD + f"TOOLS = [{TOOL % arguments({'enum': 'xy'})}]", "enum of argument 'a' must be a list"),
        (HEAD + f"TOOLS = [{TOOL % arguments({}, 'b')}]", "required must list names of properties, got ['b']"),
        (HEAD + f"TOOLS = [{TOOL % {}}, {TOOL % {}}]", "names must differ, got f, f"),
        (HEAD + f"TOOLS = [{TOOL % arguments({'x': {1}})}]", "TOOLS[0]: 'f': schema must be JSON"),
        (HEAD + f"TOOLS = [{TOOL % arguments({'x': b'bytes'})}]", "Object of type bytes is not JSON serializable"),
        (HEAD + f"TOOLS = [{TOOL % arguments({'x': chr(0xD800)})}]", "surrogates not allowed"),
        (HEAD + f"nan = float('nan')\nTOOLS = [{TOOL % arguments({'enum': [float('nan')]})}]", "Out of range float values"),
        (HEAD + f"TOOLS = [{TOOL % {}}]\ncheck = 3", "must return a list with one bool (TypeError"),
        (HEAD + f"TOOLS = [{TOOL % {}}]\ndef check(gt, answer): return []", "(ValueError: got 0 flags for 1 expected answers)"),
        (HEAD + f"TOOLS = [{TOOL % {}}]\ndef check(gt, answer): return True", "must return a list with one bool (TypeError"),
    ],
)
def test_a_broken_file_is_one_line(write: Callable[..., Toolbox], code: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        write(code)
    line = str(caught.value)
    assert line.startswith("external/my_tools.py: ") and said in line and "\n" not in line


ENDS = ["sys.exit(3)", "raise asyncio.CancelledError", "raise GeneratorExit", "raise Own", "raise Mute", "raise MuteFault"]
RAISING = (
    HEAD
    + """
import asyncio, sys
from pipeline.tools.registry import ToolFault
class Own(BaseException): pass
class Mute(Exception):
    def __str__(self): raise Own
class MuteFault(ToolFault):
    def __str__(self): sys.exit(1)
class Lazy(dict):
    def items(self): raise Own
def f(arguments):
    {tool}
def check(gt, answer):
    if answer != "a reply":
        {check}
    return [True for _ in gt]
TOOLS = [Tool(schema={{"function": {{"name": "f"}}}}, function=f)]
{top}
"""
)


@pytest.mark.parametrize("end", [*ENDS, "return Lazy(a=1)"])
def test_whatever_a_tool_and_a_checker_raise_stays_theirs(write: Callable[..., Toolbox], end: str) -> None:
    toolbox = write(RAISING.format(tool=end, check=end, top=""))
    result = toolbox.call("f", {})
    assert result.is_error and list(json.loads(result.content)) == ["error"]
    check = toolbox.check_for(["f"])
    assert check is not None and check(["5"], "a reply") == [True]
    if "Lazy" in end:
        with pytest.raises(DataError, match="a str is no flag"):
            check(["5", "6"], "another")
    else:
        assert check(["5", "6"], "another") == [False, False]


@pytest.mark.parametrize("end", ENDS)
def test_whatever_a_file_raises_is_one_line(write: Callable[..., Toolbox], end: str) -> None:
    with pytest.raises(DataError, match="cannot be run") as caught:
        write(RAISING.format(tool="pass", check="pass", top=end))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="must return a list with one bool"):
        write(
            RAISING.format(tool="pass", check="pass", top="")
            .replace('answer != "a reply"', "True")
            .replace("pass\n    r", f"{end}\n    r")
        )


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "raise Stopped(15)"])
def test_stop_signals_get_through_a_users_code(write: Callable[..., Toolbox], end: str) -> None:
    """A handler raises `Stopped` amid whatever runs; a tool that catches every Exception does not catch it."""
    wrapped = f"""
    try:
        {end}
    except Exception:
        return 1"""
    code = "from pipeline.supervise import Stopped\n" + RAISING
    toolbox = write(code.format(tool=wrapped.strip(), check=end, top=""))
    with pytest.raises(KeyboardInterrupt):
        toolbox.call("f", {})
    check = toolbox.check_for(["f"])
    with pytest.raises(KeyboardInterrupt):
        assert check is not None and check(["5"], "another")
    with pytest.raises(KeyboardInterrupt):
        write(code.format(tool="pass", check="pass", top=end))


def test_a_tool_that_takes_nested_arguments_apart_changes_no_call(write: Callable[..., Toolbox]) -> None:
    code = """
from pipeline.tools.registry import Tool
def f(arguments):
    total = 0
    while arguments["items"]:
        total += arguments["items"].pop()["n"]
    return total
TOOLS = [Tool(schema={"function": {"name": "f", "parameters": {"properties": {"items": {"type": "array"}}}}}, function=f)]
"""
    given = {"items": [{"n": 1}, {"n": 2}]}
    assert write(code).call("f", given).content == "3"
    assert given == {"items": [{"n": 1}, {"n": 2}]}


def test_a_checker_that_fails_on_an_answer_finds_nothing(write: Callable[..., Toolbox]) -> None:
    code = (
        HEAD
        + f"""TOOLS = [{TOOL % {}}]
def check(gt, answer):
    return [answer != "a reply" and int(answer) == 1 for _ in gt]
"""
    )
    check = write(code).check_for(["f"])
    assert check is not None
    assert check(["1", "2"], "1") == [True, True] and check(["1", "2"], "no number") == [False, False]


def test_optional_types_and_enums_of_own_tools() -> None:
    properties = {
        "kind": {"enum": ["a", "b"]},
        "many": {"type": "array"},
        "on": {"type": "boolean"},
        "count": {"type": "integer"},
    }
    schema = {"function": {"name": "f", "parameters": {"properties": properties | {"deep": {"type": "object"}, "any": {}}}}}
    toolbox = Toolbox(own={"f": Tool(schema, lambda arguments: sorted(arguments))})
    good = {"kind": "a", "many": [1], "on": False, "count": 3, "deep": {}, "any": None}
    assert json.loads(toolbox.call("f", good).content) == sorted(good)
    bad = {"kind": "c", "many": {}, "on": 1, "count": True, "deep": []}
    said = [json.loads(toolbox.call("f", {name: value}).content)["error"] for name, value in bad.items()]
    assert said == [
        "argument 'kind' must be one of a, b",
        "argument 'many' must be a list",
        "argument 'on' must be true or false",
        "argument 'count' must be a whole number",
        "argument 'deep' must be an object",
    ]


# --- nothing raises


def raising(arguments: Any) -> Any:
    """Fails in every way that a tool can, as the argument says."""
    match arguments.get("how"):
        case "fault":
            raise ToolFault("on purpose")
        case "nan":
            return float("nan")
        case "set":
            return {1, 2}
        case "deep":
            deep: list[Any] = []
            for _ in range(100_000):
                deep = [deep]
            return deep
        case "surrogate":
            return "\ud800"
        case "recursion":
            return raising(arguments)
    raise KeyError(str(arguments) * 100)


ANY_ARGUMENTS = {"type": "object", "properties": {"how": {}, "noise": {}}}
OWN = {"raising": Tool({"function": {"name": "raising", "parameters": ANY_ARGUMENTS}}, raising)}
OPEN = Toolbox("default", OWN), Toolbox("minimind", OWN)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {key for name in TOOL_NAMES for key in tool_schema(name)["function"]["parameters"]["properties"]} | {"how", "noise"}
)
NESTED = json.loads("[" * 500 + "]" * 500)
VALUES = JSON | st.sampled_from(
    ["km", "miles", "USD", "english", "math.sqrt(2)", "\ud800", "9" * 300, "x" * 100_000, 10**400, 10**5000, -1e308, NESTED]
    + ["fault", "nan", "set", "deep", "surrogate", "recursion"]
)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([*TOOL_NAMES, "raising"]) | JSON,
    JSON | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.none() | st.lists(st.sampled_from([*TOOL_NAMES, "raising"])),
)
def test_no_call_raises_under_any_preset(name: Any, arguments: Any, offered: list[str] | None) -> None:
    for toolbox in OPEN:
        result = toolbox.call(name, arguments, offered)
        result.content.encode("utf-8")
        if len(result.content) < 2048:  # MiniMind's longest results are cut
            content = json.loads(result.content)
            assert not result.is_error or list(content) == ["error"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fault", "on purpose"),
        ("nan", "ValueError: "),
        ("set", "TypeError: "),
        ("deep", "RecursionError: "),
        ("recursion", "RecursionError: "),
        ("else", "KeyError: "),
    ],
)
def test_whatever_a_tool_raises_becomes_a_short_error(how: str, reason: str) -> None:
    for toolbox in OPEN:
        result = toolbox.call("raising", {"how": how})
        error = json.loads(result.content)["error"]
        assert result.is_error and error.startswith(reason) and len(error) <= 200


def test_results_hold_no_surrogates() -> None:
    for toolbox in OPEN:
        assert toolbox.call("raising", {"how": "surrogate"}) == ToolResult('"?"', is_error=False)
    assert minimind_result("translate_text", {"text": "\ud800", "target_language": "x"}).content == '{"translated_text": "?"}'


def test_the_presets_have_the_same_tools() -> None:
    assert set(FUNCTIONS) == set(TOOL_NAMES)
    assert replace(MINIMIND, preset="default") == PRESET_TOOLS


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("float('nan')", "a float of nan is no flag"),
        ("0.3", "a float of 0.3 is no flag"),
        ("-1", "a int of -1 is no flag"),
        ("None", "TypeError"),
        ("'no'", "a str is no flag"),
    ],
)
def test_a_checker_that_returns_no_flags_is_an_error_whenever_it_does(
    write: Callable[..., Toolbox], value: str, said: str
) -> None:
    at_once = HEAD + f"TOOLS = [{TOOL % {}}]\ndef check(gt, answer): return [{value} for _ in gt]"
    with pytest.raises(DataError, match="must return a list with one bool") as caught:
        write(at_once)
    assert said in str(caught.value)
    later = at_once.replace("return [", "return [True for _ in gt] if answer == 'a reply' else [")
    check = write(later).check_for(["f"])
    assert check is not None and check(["5"], "a reply") == [True]
    with pytest.raises(DataError) as caught:
        check(["5"], "another\nreply")
    line = str(caught.value)
    assert line.startswith("external/my_tools.py: check(['5'], 'another") and said in line and "\n" not in line


@pytest.mark.parametrize("value", ["True", "1", "1.0", "numpy.bool_(True)"])
def test_flags_are_whatever_is_true_or_false(write: Callable[..., Toolbox], value: str) -> None:
    check = write(HEAD + f"import numpy\nTOOLS = [{TOOL % {}}]\ndef check(gt, answer): return [{value} for _ in gt]").check_for(
        ["f"]
    )
    assert check is not None and check(["5", "6"], "x") == [True, True]
