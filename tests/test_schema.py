"""Rows of the data files: what is accepted and in which form, and what is refused with which line."""

import json
from pathlib import Path

import pytest

from pipeline.data.schema import SET_KINDS, Kind, Row, untrainable
from pipeline.data.sources import read_source
from pipeline.errors import DataError
from pipeline.yaml_files import read_yaml

TOOL = {"type": "function", "function": {"name": "calculate_math", "parameters": {"type": "object"}}}


def user(content="Q", **fields):
    return {"role": "user", "content": content, **fields}


def assistant(content="A", **fields):
    return {"role": "assistant", "content": content, **fields}


def system(content="S", **fields):
    return {"role": "system", "content": content, **fields}


def tool(content="{}"):
    return {"role": "tool", "content": content}


CALL = {"name": "calculate_math", "arguments": {"expression": "1+1"}}


def write(folder: Path, *lines, end=b"\n") -> Path:
    """A file of the lines: bytes as they are, anything else as JSON."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x, ensure_ascii=False).encode() for x in lines) + end)
    return path


def faults(path: Path, set_name: str) -> list[str]:
    """The lines of the error, without the folder."""
    with pytest.raises(DataError) as error:
        read_source(path, set_name)
    assert error.value.exit_code == 3
    return [line.replace(f"{path}", "F") for line in error.value.lines]


def test_text_rows_keep_text_and_line(tmp_path):
    rows = read_source(write(tmp_path, {"text": "秋天 \n"}, {"text": ""}), "pretrain")
    assert rows == [Row(1, {"text": "秋天 \n"}), Row(2, {"text": ""})]


def test_chat_rows_are_normalised(tmp_path):
    row = {
        "conversations": [
            system("", tools=json.dumps([TOOL]), reasoning_content=None, tool_calls=None),
            user(tools="", reasoning_content="", tool_calls="[]"),
            assistant(
                "", reasoning_content="think", tool_calls=json.dumps([{"function": CALL, "id": "1", "type": "function"}, CALL])
            ),
            tool("2"),
            tool("3"),
            assistant("two", reasoning_content=""),
        ]
    }
    (read,) = read_source(write(tmp_path, row), "full_sft")
    assert read.value == {
        "tools": [TOOL],
        "conversations": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "two", "reasoning_content": ""},
        ],
    }


def test_lists_are_as_good_as_json_strings(tmp_path):
    def row(pack):
        return {"conversations": [system(tools=pack([TOOL])), user(), assistant(tool_calls=pack([CALL])), tool(), assistant()]}

    plain, packed = read_source(write(tmp_path, row(lambda value: value), row(json.dumps)), "lora")
    assert plain.value == packed.value


def test_tools_are_found_below_function_in_every_accepted_form(tmp_path):
    function = TOOL["function"]
    forms = [TOOL, function, {"type": "function", **function}, {"function": function}]
    rows = [{"conversations": [system(tools=[form]), user(), assistant("")], "gt": ["1"]} for form in forms]
    read = [row.value["tools"] for row in read_source(write(tmp_path, *rows), "agent")]
    assert read == [[TOOL], [TOOL], [TOOL], [{"function": function}]]  # MiniMind's own files have the last form


def test_arguments_given_as_a_string_stay_verbatim(tmp_path):
    call = {"name": "f", "arguments": '{"x":  1}'}
    (row,) = read_source(write(tmp_path, {"conversations": [user(), assistant(tool_calls=[call])]}), "full_sft")
    assert row.value["conversations"][1]["tool_calls"] == [call]


def test_a_call_written_out_in_the_text_may_be_answered(tmp_path):
    row = {"conversations": [user(), assistant('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'), tool(), assistant()]}
    assert len(read_source(write(tmp_path, row), "full_sft")) == 1


def test_prompts_and_tasks_lose_the_placeholder(tmp_path):
    (prompt,) = read_source(write(tmp_path, {"conversations": [user("a"), assistant("b"), user("c"), assistant("空")]}), "rlaif")
    assert prompt.value == {"tools": None, "conversations": [user("a"), assistant("b"), user("c")], "gt": []}
    (prompt,) = read_source(write(tmp_path, {"conversations": [user("1+1?"), assistant("空")], "gt": [2]}), "rlaif")
    assert prompt.value == {"tools": None, "conversations": [user("1+1?")], "gt": ["2"]}
    task = {"conversations": [system("", tools=json.dumps([TOOL])), user(), assistant("")], "gt": ["5", 7, 2.5]}
    (task,) = read_source(write(tmp_path, task), "agent")
    assert task.value == {"tools": [TOOL], "conversations": [system(""), user()], "gt": ["5", "7", "2.5"]}


def test_pairs(tmp_path):
    pair = {"chosen": [system(), user(), assistant("x")], "rejected": [system(), user(), assistant("y")]}
    (row,) = read_source(write(tmp_path, pair), "dpo")
    assert row.value == pair | {"tools": None}


GOOD_CHAT = [user(), assistant()]
GOOD_CALL = json.dumps([CALL])


def test_thinking_in_the_content_is_moved_and_nothing_of_the_answer_is_lost(tmp_path):
    inline = assistant("<think>A</think>B <think>C</think>D.")
    blank = assistant("<think>\nA\n</think>\n\nB\n\n C", reasoning_content="")
    rows = [
        {"conversations": [user("<think>"), inline]},
        {"conversations": [user(), blank, user(), assistant()]},
        {"conversations": [user(), assistant("a < b"), user(), assistant("B", reasoning_content="A")]},
    ]
    first, second, third = read_source(write(tmp_path, *rows), "full_sft")
    assert first.value["conversations"] == [user("<think>"), assistant("B D.", reasoning_content="A C")]
    assert second.value["conversations"][1] == assistant("B\n\n C", reasoning_content="A")
    assert third.value["conversations"] == rows[2]["conversations"]
    assert [row.thinking_moved for row in (first, second, third)] == [True, True, False]


def test_pairs_are_compared_with_their_thinking_apart(tmp_path):
    earlier = [user("P"), assistant("<think>t</think>a"), user()], [user("P"), assistant("a", reasoning_content="t"), user()]
    pair = {"chosen": [*earlier[0], assistant("x")], "rejected": [*earlier[1], assistant("<think>u</think>y")]}
    (row,) = read_source(write(tmp_path, pair), "dpo")
    assert row.value["chosen"][:-1] == row.value["rejected"][:-1] == earlier[1]
    assert row.value["rejected"][-1] == assistant("y", reasoning_content="u") and row.thinking_moved


def test_a_placeholder_is_thrown_away_whatever_it_says(tmp_path):
    (row,) = read_source(write(tmp_path, {"conversations": [user(), assistant("R</think>A")]}), "rlaif")
    assert row == Row(1, {"tools": None, "conversations": [user()], "gt": []})


FAULTS = [
    # bytes
    ("pretrain", b"\xff\xfe{", "not UTF-8 at byte 1"),
    ("pretrain", b'\xef\xbb\xbf{"text": "a"}', "byte order mark"),
    ("pretrain", b'{"text": "a\0"}', "NUL byte"),
    ("pretrain", b'{"text": "a\\u0000"}', "NUL character"),
    ("pretrain", b"", "empty line"),
    ("pretrain", b"  \r", "empty line"),
    # JSON
    ("pretrain", b"{'text': 1}", "not JSON"),
    ("pretrain", b'{"text": "a"} x', "not JSON: Extra data"),
    ("pretrain", b'{"text": NaN}', "NaN is no JSON number"),
    ("pretrain", b'{"text": "a", "text": "b"}', "repeated key 'text'"),
    ("pretrain", b'{"text": "\\ud83d"}', "lone surrogate"),
    ("pretrain", b"[" * 100_000, "nested too deeply"),
    *(("pretrain", b'{"text":' + b"[" * n + b'"\\u0000"' + b"]" * n + b"}", "nested too deeply") for n in (100, 500, 900, 980)),
    *(("pretrain", b'{"text":' + b'{"a":' * n + b"1" + b"}" * n + b"}", "nested too deeply") for n in (100, 900, 980)),
    ("full_sft", {"conversations": [system(tools="[" * 500 + "]" * 500), *GOOD_CHAT]}, "tools: not usable JSON: nested too"),
    ("pretrain", b'{"text":' + b"[" * 99 + b'"\\u0000"' + b"]" * 99 + b"}", "NUL character"),
    ("pretrain", b'{"text": 1e999}', "1e999' is beyond the range of numbers"),
    ("pretrain", b'{"text": -1e999}', "-1e999' is beyond the range of numbers"),
    ("pretrain", b'{"text": ' + b"9" * 400 + b".0}", "beyond the range of numbers"),
    ("pretrain", b'{"text": Infinity}', "Infinity is no JSON number"),
    ("agent", b'{"conversations": [], "gt": [1e999]}', "1e999' is beyond the range of numbers"),
    (
        "full_sft",
        {"conversations": [user(), assistant(tool_calls=[CALL | {"arguments": '{"x": 1e400}'}])]},
        "1e400' is beyond the range of numbers",
    ),
    # fields
    ("pretrain", ["a"], "must be an object with text"),
    ("pretrain", {"text": 3}, "text: must be a string, got 3"),
    ("pretrain", {"txt": "a"}, "unknown field 'txt'; allowed: text"),
    ("pretrain", {}, "text: missing"),
    ("full_sft", {"conversations": GOOD_CHAT, "id": 1}, "unknown field 'id'"),
    ("full_sft", {"conversations": []}, "must be a list of messages"),
    ("full_sft", {"conversations": "[]"}, "must be a list of messages"),
    ("full_sft", {"conversations": ["hi"]}, "conversations[0]: must be an object"),
    ("full_sft", {"conversations": [{"role": "user"}, assistant()]}, "conversations[0].content: missing"),
    ("full_sft", {"conversations": [{"content": "x"}, assistant()]}, "conversations[0].role: missing"),
    ("full_sft", {"conversations": [user(None), assistant()]}, "conversations[0].content: must be a string, got None"),
    ("full_sft", {"conversations": [user(), assistant(["a"])]}, "conversations[1].content: must be a string"),
    ("full_sft", {"conversations": [user(), {"role": "bot", "content": ""}]}, "conversations[1].role='bot': must be one of"),
    ("full_sft", {"conversations": [user(), assistant(thoughts="x")]}, "conversations[1]: unknown field 'thoughts'"),
    ("full_sft", {"conversations": [user(), assistant(reasoning_content=1)]}, "reasoning_content: must be a string"),
    ("full_sft", {"conversations": [user(reasoning_content="x"), assistant()]}, "reasoning_content: only assistant messages"),
    ("full_sft", {"conversations": [user(tools=json.dumps([TOOL])), assistant()]}, "tools: only system messages"),
    ("full_sft", {"conversations": [user(tool_calls=GOOD_CALL), assistant()]}, "tool_calls: only assistant messages"),
    # tools and calls
    ("full_sft", {"conversations": [system(tools="[{"), *GOOD_CHAT]}, "conversations[0].tools: not JSON"),
    ("full_sft", {"conversations": [system(tools='{"a": 1}'), *GOOD_CHAT]}, "tools: must be a JSON array"),
    ("full_sft", {"conversations": [system(tools=[{"function": {}}]), *GOOD_CHAT]}, "tools[0]: must be a function object"),
    ("full_sft", {"conversations": [system(tools=[{"name": "f", "function": 1}]), *GOOD_CHAT]}, "tools[0]: must be a function"),
    ("full_sft", {"conversations": [user(), assistant(tool_calls='["f"]')]}, "tool_calls[0]: must be an object with name"),
    ("full_sft", {"conversations": [user(), assistant(tool_calls=[{"name": "f"}])]}, "must be an object with name and arguments"),
    (
        "full_sft",
        {"conversations": [user(), assistant(tool_calls=[CALL | {"x": 1}])]},
        "must be an object with name and arguments",
    ),
    ("full_sft", {"conversations": [user(), assistant(tool_calls=[CALL | {"name": 'a"b'}])]}, "name must be a string without"),
    ("full_sft", {"conversations": [user(), assistant(tool_calls=[CALL | {"arguments": "[1]"}])]}, "arguments must be an object"),
    ("full_sft", {"conversations": [user(), assistant(tool_calls='[{"name": "\\ud800", "arguments": {}}]')]}, "lone surrogate"),
    # order
    ("full_sft", {"conversations": [user(), system(), assistant()]}, "after user must come assistant"),
    ("full_sft", {"conversations": [system(), system(), *GOOD_CHAT]}, "after system must come user"),
    ("full_sft", {"conversations": [assistant()]}, "first must come system or user"),
    ("full_sft", {"conversations": [user(), user(), assistant()]}, "conversations[1].role='user': after user"),
    ("full_sft", {"conversations": [user(), assistant(), assistant()]}, "after assistant must come user"),
    ("full_sft", {"conversations": [user(), assistant(), tool(), assistant()]}, "conversations[2].role='tool'"),
    ("full_sft", {"conversations": [user(), assistant(tool_calls=GOOD_CALL), tool(), user()]}, "after tool must come tool or"),
    ("full_sft", {"conversations": [system(), user()]}, "no assistant message"),
    # results
    (
        "full_sft",
        {"conversations": [user(), assistant(tool_calls=GOOD_CALL), tool(), tool(), assistant()]},
        "conversations[2]: tool messages: 2, calls before them: 1",
    ),
    (
        "agent",
        {"conversations": [user(), assistant(tool_calls=[CALL, CALL]), tool(), assistant("")], "gt": ["1"]},
        "conversations[2]: tool messages: 1, calls before them: 2",
    ),
    # thinking
    *(
        ("full_sft", {"conversations": [user(), assistant(content)]}, "conversations[1]: think tags that do not pair up")
        for content in (
            "<think>a",
            "a</think>",
            "a </think> b",
            "<think>a<think>b</think>c</think>d",
            "<think>a</think>b</think>",
        )
    ),
    ("full_sft", {"conversations": [user(), assistant("<think>a</think>b", reasoning_content="c")]}, "thinking both in"),
    (
        "full_sft",
        {"conversations": [user(), assistant(reasoning_content="a</think>b")]},
        "think tags inside of reasoning_content",
    ),
    (
        "full_sft",
        {"conversations": [user(), assistant('<tool_call>{"name": "<think>f</think>"}</tool_call>')]},
        "think tags inside of a tool call",
    ),
    (
        "full_sft",
        {"conversations": [user(), assistant(tool_calls=[CALL | {"arguments": {"x": "</think>"}}])]},
        "must not hold think or tool_call tags",
    ),
    ("dpo", {"chosen": [user(), assistant("</think>")], "rejected": GOOD_CHAT}, "chosen[1]: think tags that do not pair up"),
    # pairs
    ("dpo", {"chosen": GOOD_CHAT}, "rejected: missing"),
    ("dpo", {"chosen": [user()], "rejected": GOOD_CHAT}, "chosen: must end in an assistant message"),
    ("dpo", {"chosen": GOOD_CHAT, "rejected": [user("other"), assistant()]}, "must be the same up to their last message"),
    ("dpo", {"chosen": [system(tools=[TOOL]), *GOOD_CHAT], "rejected": [system(), *GOOD_CHAT]}, "must be the same up to"),
    # prompts and tasks
    ("rlaif", {"conversations": [user()]}, "must end in a user or tool message and an assistant placeholder"),
    ("rlaif", {"conversations": [user(), assistant()], "gt": "5"}, "gt: must be a list of strings, got '5'"),
    ("rlaif", {"conversations": [user(), assistant()], "answer": []}, "unknown field 'answer'; allowed: conversations, gt"),
    ("full_sft", {"conversations": [user(), assistant()], "gt": []}, "unknown field 'gt'; allowed: conversations (docs"),
    ("agent", {"conversations": GOOD_CHAT}, "gt: missing"),
    ("agent", {"conversations": GOOD_CHAT, "gt": "5"}, "gt: must be a list of strings, got '5'"),
    ("agent", {"conversations": GOOD_CHAT, "gt": ["5", " "]}, "gt[1]: must be a non-empty string or a number"),
    ("agent", {"conversations": GOOD_CHAT, "gt": [True]}, "gt[0]: must be a non-empty string or a number, got True"),
]


@pytest.mark.parametrize(("set_name", "line", "reason"), FAULTS)
def test_each_fault_is_named_with_its_line(tmp_path, set_name, line, reason):
    # On line 1, so that a byte order mark is one; a good row follows and must not be blamed.
    kind = SET_KINDS[set_name]
    good = {
        Kind.TEXT: {"text": "a"},
        Kind.CHAT: {"conversations": GOOD_CHAT},
        Kind.PAIRS: {"chosen": GOOD_CHAT, "rejected": [user(), assistant("B")]},
        Kind.PROMPTS: {"conversations": GOOD_CHAT},
        Kind.TASKS: {"conversations": GOOD_CHAT, "gt": ["1"]},
    }[kind]
    found = faults(write(tmp_path, line, good), set_name)
    assert any(fault.startswith("F:1: ") and reason in fault for fault in found), found
    assert not any(fault.startswith("F:2:") for fault in found)
    assert all("\n" not in fault for fault in found)


def test_all_faults_come_at_once(tmp_path):
    path = write(tmp_path, b"{", {"text": "fine"}, b"", {"text": 1, "x": 2}, b'{"text": "cut', end=b"")
    assert [fault.split(": ")[0] for fault in faults(path, "pretrain")] == ["F:1", "F:3", "F:4", "F:4", "F:5"]
    assert "truncated last line?" in faults(path, "pretrain")[-1]


def test_a_long_list_of_faults_is_cut_and_counted(tmp_path):
    found = faults(write(tmp_path, *[b""] * 60, {"text": "a"}), "pretrain")
    assert len(found) == 51
    assert found[49].startswith("F:50:")
    assert found[50] == "and 10 more faults in F"


def test_windows_line_ends_and_a_missing_last_one_are_accepted(tmp_path):
    rows = read_source(write(tmp_path, b'{"text": "a"}\r\n{"text": "b"}', end=b""), "pretrain")
    assert rows == [Row(1, {"text": "a"}), Row(2, {"text": "b"})]


def test_surrogate_pairs_and_escaped_backslashes_are_text(tmp_path):
    rows = read_source(write(tmp_path, b'{"text": "\\ud83d\\ude00 \\\\ud83d \\\\u0000"}'), "pretrain")
    assert rows[0].value["text"] == "\U0001f600 \\ud83d \\u0000"


def test_nesting_and_numbers_just_inside_are_data(tmp_path):
    deep = '{"a": ' * 94 + "{}" + "}" * 94
    wide = json.dumps([{"name": f"f{i}", "parameters": [[], {}]} for i in range(300)])
    row = {
        "conversations": [system(tools=wide), user(), assistant("", tool_calls=[{"name": "f", "arguments": json.loads(deep)}])]
    }
    number = b'{"conversations": [{"role": "user", "content": "[{[{"}, {"role": "assistant", "content": ""}], "gt": [1.5e308]}'
    assert len(read_source(write(tmp_path, row), "full_sft")) == 1
    assert read_source(write(tmp_path, number), "agent")[0].value["gt"] == ["1.5e+308"]


@pytest.mark.parametrize("name", ["rows.jsonl", "world.yaml"])
def test_a_source_that_cannot_be_read_is_one_line(tmp_path, name):
    source = tmp_path / name
    source.symlink_to("/proc/self/mem")  # a file that opens and gives EIO
    with pytest.raises(DataError) as error:
        read_source(source, "dpo")
    assert len(error.value.lines) == 1 and error.value.lines[0].startswith(f"{source}: cannot be read: ")


def test_no_file_and_no_rows(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file; data\.sets\.dpo\.source"):
        read_source(tmp_path / "absent.jsonl", "dpo")
    with pytest.raises(DataError, match="holds no rows"):
        read_source(write(tmp_path, end=b""), "dpo")


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (Kind.TEXT, {"text": " \n"}, "empty text"),
        (Kind.TEXT, {"text": "a"}, None),
        (Kind.CHAT, {"conversations": [user(), assistant(" ")]}, "empty answer in message 1"),
        (Kind.CHAT, {"conversations": [user(), assistant("\n"), user(), assistant("x")]}, "empty answer in message 1"),
        (Kind.CHAT, {"conversations": [system(), user(), assistant("x"), user(), assistant("")]}, "empty answer in message 4"),
        (Kind.CHAT, {"conversations": [user(), assistant("", tool_calls=[CALL])]}, None),
        (Kind.CHAT, {"conversations": [user(), assistant("", reasoning_content="hm")]}, "empty answer in message 1"),
        (Kind.PAIRS, {"chosen": GOOD_CHAT, "rejected": list(GOOD_CHAT)}, "chosen equals rejected"),
        (Kind.PAIRS, {"chosen": GOOD_CHAT, "rejected": [user(), assistant("")]}, None),
        (Kind.PAIRS, {"chosen": [user(), assistant(" ")], "rejected": GOOD_CHAT}, "empty answer in message 1"),
        (Kind.PAIRS, {"chosen": [user(), assistant(""), *GOOD_CHAT], "rejected": GOOD_CHAT}, "empty answer in message 1"),
        (Kind.PROMPTS, {"conversations": [user("")]}, "empty prompt"),
        (Kind.TASKS, {"conversations": [user("x")]}, None),
    ],
)
def test_untrainable_rows(kind, value, reason):
    assert untrainable(value, kind) == reason


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "set_name", "rows"),
    [
        ("pretrain_sample", "pretrain", 600),
        ("lora_identity", "lora", 91),
        ("lora_identity", "full_sft", 91),
        ("rlaif_sample", "rlaif", 1500),
        ("agent_rl_math_sample", "agent", 12),
    ],
)
def test_real_files_are_valid(shared, name, set_name, rows):
    read = read_source(shared / "data" / "real" / f"{name}.jsonl", set_name)
    assert [row.line for row in read] == list(range(1, rows + 1))
    assert not any(untrainable(row.value, SET_KINDS[set_name]) for row in read)


@pytest.mark.wide
def test_real_tasks_offer_tools_and_expect_answers(shared):
    first = read_source(shared / "data" / "real" / "agent_rl_math_sample.jsonl", "agent")[0].value
    assert [entry["function"]["name"] for entry in first["tools"]] == ["calculate_math", "get_current_weather"]
    assert first["conversations"] == [{"role": "system", "content": ""}, {"role": "user", "content": "算算7109*2920"}]
    assert first["gt"] == ["20758280"]


@pytest.mark.parametrize("set_name", SET_KINDS)
def test_the_embedded_world_passes_the_same_validation(root, tmp_path, set_name):
    recipe = read_yaml(root / "data" / "world.yaml")
    recipe["rows"] = dict.fromkeys(recipe["rows"], 40)
    path = tmp_path / "world.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    rows = read_source(path, set_name)
    assert [row.line for row in rows] == list(range(1, 41))
    assert not any(untrainable(row.value, SET_KINDS[set_name]) for row in rows)


@pytest.mark.parametrize("text", ["rows: [", "- a\n- b\n", "7", "[" * 5000])
def test_a_recipe_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "world.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_source(path, "dpo")
    assert len(error.value.lines) == 1 and error.value.lines[0].startswith(f"{path}: ")
