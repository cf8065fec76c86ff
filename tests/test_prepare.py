"""Prepared sets: what is stored comes back, the split holds questions out, and the same input gives the same bytes."""

import json
from pathlib import Path

import pytest

from pipeline.data.prepare import prepare
from pipeline.data.prepared import read_prepared, read_report
from pipeline.errors import DataError
from pipeline.params.load import load_params

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}


@pytest.fixture(scope="module")
def data_params(root):
    values = {"held_out_frac": 0.1, "held_out_max_rows": 300, "max_dropped_frac": 0.02, "seed": 42}
    return load_params(root / "profiles" / "micro.yaml").data.model_copy(update=values)


def with_values(params, **values):
    return params.model_copy(update=values)


def write(folder: Path, rows) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question, answer="A", system=None):
    start = [] if system is None else [{"role": "system", "content": system}]
    return {"conversations": [*start, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def both_splits(out):
    rows = read_prepared(out, "train") + read_prepared(out, "held_out")
    return sorted(rows, key=lambda row: row["line"])


def test_text_round_trip_in_source_order(tmp_path, data_params):
    texts = [f"文 {number}\n\U0001f600" for number in range(30)]
    report = prepare("pretrain", write(tmp_path, [{"text": text} for text in texts]), tmp_path / "out", data_params)
    assert [row["text"] for row in both_splits(tmp_path / "out")] == texts
    for split in ("train", "held_out"):
        lines = [row["line"] for row in read_prepared(tmp_path / "out", split)]
        assert lines == sorted(lines)
        assert len(lines) == report[split] > 0
    assert report == read_report(tmp_path / "out")


def test_chats_come_back_ready_for_the_encoder(tmp_path, data_params):
    calls = [{"name": "f", "arguments": {"z": 1, "a": [None, {"k": "计"}]}}, {"name": "f", "arguments": '{"z":  2.0}'}]
    messages = [
        {"role": "system", "content": "", "tools": json.dumps([TOOL])},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": json.dumps(calls)},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "three"},
    ]
    prepare("full_sft", write(tmp_path, [{"conversations": messages}, chat("other")]), tmp_path / "out", data_params)
    first, second = both_splits(tmp_path / "out")
    assert first == {
        "line": 1,
        "tools": [TOOL],
        "conversations": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": calls},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "three"},
        ],
    }
    # Equal as text too: the order of keys is what the model reads.
    assert json.dumps(first["tools"]) == json.dumps([TOOL])
    assert json.dumps(first["conversations"][2]["tool_calls"]) == json.dumps(calls)
    assert second == {"line": 2, "tools": None} | chat("other")


def test_pairs_and_tasks_round_trip(tmp_path, data_params):
    pairs = [
        {"chosen": chat(f"Q{n}", "good")["conversations"], "rejected": chat(f"Q{n}", "bad")["conversations"]} for n in range(3)
    ]
    prepare("dpo", write(tmp_path, pairs), tmp_path / "dpo", data_params)
    assert both_splits(tmp_path / "dpo") == [{"line": n + 1, "tools": None} | pair for n, pair in enumerate(pairs)]
    tasks = [chat(f"Q{n}", "") | {"gt": [str(n), "x"]} for n in range(3)]
    prepare("agent", write(tmp_path, tasks), tmp_path / "agent", data_params)
    assert [(row["conversations"], row["gt"]) for row in both_splits(tmp_path / "agent")] == [
        ([{"role": "user", "content": f"Q{n}"}], [str(n), "x"]) for n in range(3)
    ]


@pytest.mark.parametrize(
    ("num_rows", "frac", "max_rows", "held_out"),
    [(100, 0.1, 300, 10), (100, 0.1, 4, 4), (5, 0.1, 300, 1), (2, 0.5, 300, 1), (91, 0.1, 300, 9)],
)
def test_how_many_rows_are_held_out(tmp_path, data_params, num_rows, frac, max_rows, held_out):
    source = write(tmp_path, [{"text": f"t{number}"} for number in range(num_rows)])
    params = with_values(data_params, held_out_frac=frac, held_out_max_rows=max_rows)
    report = prepare("pretrain", source, tmp_path / "out", params)
    assert (report["train"], report["held_out"]) == (num_rows - held_out, held_out)


def test_rows_that_ask_the_same_lie_on_one_side(tmp_path, data_params):
    # 40 questions, each three times: other answers, other system prompts.
    rows = [chat(f"Q{n}", f"A{k}", None if k == 0 else f"S{k}") for k in range(3) for n in range(40)]
    prepare("full_sft", write(tmp_path, rows), tmp_path / "out", with_values(data_params, held_out_frac=0.1))

    def asked(split):
        return [row["conversations"][-2]["content"] for row in read_prepared(tmp_path / "out", split)]

    train, held_out = asked("train"), asked("held_out")
    assert len(held_out) == 12
    assert sorted(train + held_out) == sorted(f"Q{n}" for n in range(40) for _ in range(3))
    assert not set(train) & set(held_out)


def test_no_held_out_chat_begins_one_that_is_trained_on(tmp_path, data_params):
    """Every turn of a chat is trained on: Q1 alone, and Q1 with more behind it, are one question of the split."""
    asked = [questions for n in range(60) for questions in ([f"Q{n}"], [f"Q{n}", "More?"], [f"Q{n}", "More?", "And?"])]
    rows = [
        {
            "conversations": [
                turn for text in each for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": "A"})
            ]
        }
        for each in asked
    ]
    prepare("full_sft", write(tmp_path, rows), tmp_path / "out", with_values(data_params, held_out_frac=0.2))
    firsts = {
        split: {row["conversations"][0]["content"] for row in read_prepared(tmp_path / "out", split)}
        for split in ("train", "held_out")
    }
    assert len(firsts["held_out"]) == 12 and not firsts["train"] & firsts["held_out"]


@pytest.mark.parametrize("set_name", ["dpo", "rlaif", "agent"])
def test_no_held_out_question_is_trained_on_behind_other_turns(tmp_path, data_params, set_name):
    """The reply to the last question is what these sets train."""

    def turns(*asked):
        return [turn for text in asked for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": "A"})]

    rows = []
    for asked in ([*before, f"Q{n}"] for n in range(60) for before in ([], ["Hello"])):
        chat_row = {"conversations": turns(*asked), "gt": ["A"]}
        other = [*turns(*asked)[:-1], {"role": "assistant", "content": "B"}]
        rows.append({"chosen": turns(*asked), "rejected": other} if set_name == "dpo" else chat_row)
    prepare(set_name, write(tmp_path, rows), tmp_path / "out", with_values(data_params, held_out_frac=0.2))
    last = {
        split: {
            [m["content"] for m in row["chosen" if set_name == "dpo" else "conversations"] if m["role"] == "user"][-1]
            for row in read_prepared(tmp_path / "out", split)
        }
        for split in ("train", "held_out")
    }
    assert len(last["held_out"]) == 12 and not last["train"] & last["held_out"]


def test_the_split_depends_on_seed_and_question_not_on_the_place(tmp_path, data_params):
    rows = [chat(f"Q{n}") for n in range(60)]

    def held_out(name, rows, **values):
        prepare("full_sft", write(tmp_path / name, rows), tmp_path / name / "out", with_values(data_params, **values))
        return {row["conversations"][0]["content"] for row in read_prepared(tmp_path / name / "out", "held_out")}

    first = held_out("a", rows)
    assert held_out("b", rows[::-1]) == first
    assert held_out("c", rows, seed=7) != first
    # A question held out of the chats is held out of a prompt set of the same questions.
    prepare("rlaif", write(tmp_path / "d", rows), tmp_path / "d" / "out", data_params)
    assert {row["conversations"][0]["content"] for row in read_prepared(tmp_path / "d" / "out", "held_out")} == first


def test_a_set_without_a_second_question_is_refused(tmp_path, data_params):
    with pytest.raises(DataError, match="2 rows with 1 different prompts"):
        prepare("full_sft", write(tmp_path, [chat("Q", "a"), chat("Q", "b")]), tmp_path / "out", data_params)


def test_a_large_group_is_held_out_only_when_it_must(tmp_path, data_params):
    # Wanted: one row. Both questions come more often, so the smaller group goes, as long as it is allowed.
    source = write(tmp_path, [chat("Q", str(n)) for n in range(6)] + [chat("P", str(n)) for n in range(3)])
    report = prepare("full_sft", source, tmp_path / "out", with_values(data_params, held_out_frac=0.1, held_out_max_rows=3))
    assert (report["train"], report["held_out"]) == (6, 3)
    with pytest.raises(DataError, match="held_out_max_rows=2"):
        prepare("full_sft", source, tmp_path / "out", with_values(data_params, held_out_frac=0.1, held_out_max_rows=2))


def test_same_input_gives_same_bytes(tmp_path, data_params):
    source = write(tmp_path, [chat(f"Q{n}") for n in range(50)])
    prepare("full_sft", source, tmp_path / "a", data_params)
    prepare("full_sft", source, tmp_path / "b", data_params)
    for name in ("train.parquet", "held_out.parquet", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_untrainable_rows_are_dropped_listed_and_counted(tmp_path, data_params):
    source = write(tmp_path, [{"text": f"t{n}"} for n in range(97)] + [{"text": ""}, {"text": " "}, {"text": "x"}])
    report = prepare("pretrain", source, tmp_path / "out", with_values(data_params, max_dropped_frac=0.02))
    assert report["rows"] == 100
    assert report["train"] + report["held_out"] == 98
    assert report["dropped"] == 2
    assert report["dropped_rows"] == [f"{source}:98: empty text", f"{source}:99: empty text"]


def test_empty_answers_are_dropped_and_moved_thinking_is_counted(tmp_path, data_params):
    rows = [chat(f"Q{n}", "" if n == 7 else f"<think>t</think>{n}" if n % 5 == 0 else str(n)) for n in range(20)]
    source = write(tmp_path, rows)
    report = prepare("full_sft", source, tmp_path / "out", with_values(data_params, max_dropped_frac=0.05))
    assert report["dropped_rows"] == [f"{source}:8: empty answer in message 1"]
    assert report["thinking_moved"] == 4
    answers = [row["conversations"][1] for row in both_splits(tmp_path / "out")]
    assert answers[0] == {"role": "assistant", "content": "0", "reasoning_content": "t"}
    assert not any("think>" in answer["content"] for answer in answers)


def test_too_many_untrainable_rows_abort(tmp_path, data_params):
    source = write(tmp_path, [{"text": f"t{n}"} for n in range(97)] + [{"text": ""}, {"text": " "}, {"text": "x"}])
    with pytest.raises(DataError) as error:
        prepare("pretrain", source, tmp_path / "out", with_values(data_params, max_dropped_frac=0.019))
    (line,) = error.value.lines
    assert line.startswith("pretrain: 2 of 100 rows dropped, allowed is data.max_dropped_frac=0.019")
    assert f"{source}:98: empty text; {source}:99: empty text" in line
    with pytest.raises(DataError, match="pretrain: all 1 rows dropped"):
        prepare(
            "pretrain", write(tmp_path / "e", [{"text": ""}]), tmp_path / "out", with_values(data_params, max_dropped_frac=1.0)
        )


def test_a_malformed_file_leaves_nothing_behind(tmp_path, data_params):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: unknown field 'label'"):
        prepare("pretrain", write(tmp_path, [{"text": "a"}, {"text": "b", "label": 1}]), tmp_path / "out", data_params)
    assert not (tmp_path / "out").exists()
