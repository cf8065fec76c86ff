"""Encoded sets: what the files hold, that nothing is truncated, and what is dropped."""

import json

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.encode import encode_set, windows
from pipeline.data.prepare import prepare
from pipeline.data.prepared import read_prepared, read_report
from pipeline.errors import DataError
from pipeline.params.load import load_params
from pipeline.text.chat import ChatEncoder
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import load_tokenizer, train_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the quick brown fox 秋天的诗歌\n" * 5, "hello world, 你好世界"], folder, vocab_size=320, split_digits=True)
    return load_tokenizer(folder)


@pytest.fixture
def prepared(tmp_path, root):
    """A function that prepares rows (JSON values) as a set and gives the folder."""
    params = load_params(root / "profiles" / "micro.yaml").data.model_copy(update={"held_out_frac": 0.1})

    def make(set_name, rows):
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        prepare(set_name, source, tmp_path / "prepared", params)
        return tmp_path / "prepared"

    return make


def read(folder, split="train"):
    with pa.memory_map(str(folder / f"{split}.arrow")) as file:
        return pa.ipc.open_stream(file).read_all().to_pylist()


def chat(question, answer="A", **fields):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]


def test_windows_by_hand():
    # 9 labels, at most 4 each: three windows of 3 labels, so 4 ids, sharing one id with the next.
    assert windows(10, 5) == [(0, 4), (3, 7), (6, 10)]
    assert windows(5, 5) == [(0, 5)]
    assert windows(6, 5) == [(0, 3), (2, 6)]
    assert windows(2, 8) == [(0, 2)]


@given(st.integers(2, 3000), st.integers(8, 600))
def test_windows_make_every_token_but_the_first_a_label_once(num_ids, max_seq_len):
    spans = windows(num_ids, max_seq_len)
    assert [position for start, end in spans for position in range(start + 1, end)] == list(range(1, num_ids))
    sizes = [end - start for start, end in spans]
    assert max(sizes) <= max_seq_len
    assert max(sizes) - min(sizes) <= 1
    assert len(spans) == -(-(num_ids - 1) // (max_seq_len - 1))


def test_documents_are_split_not_cut(tmp_path, tokenizer, prepared):
    texts = [f"{n} the quick brown fox 秋天的诗歌 {'word ' * (10 * n)}<|im_end|>" for n in range(1, 9)]
    folder = prepared("pretrain", [{"text": text} for text in texts])
    report = encode_set("pretrain", folder, tmp_path / "out", tokenizer, max_seq_len=32, max_dropped_frac=0.0)
    assert report["dropped"] == 0
    seen = set()
    for split in ("train", "held_out"):
        rows = read(tmp_path / "out", split)
        assert len(rows) == report[split]
        for line in {row["line"] for row in rows}:
            parts = [row for row in rows if row["line"] == line]
            ids = parts[0]["ids"] + [token for part in parts[1:] for token in part["ids"][1:]]
            assert ids == [1, *tokenizer.encode_text(texts[line - 1]), 2]  # bos and eos once, at the ends of the document
            assert all(earlier["ids"][-1] == later["ids"][0] for earlier, later in zip(parts, parts[1:], strict=False))
            assert all(len(part["ids"]) <= 32 for part in parts)
            assert sum(part["num_bytes"] for part in parts) == len(texts[line - 1].encode())
            seen.add(line)
    assert seen == set(range(1, 9))


def test_chat_columns(tmp_path, tokenizer, prepared):
    rows = [
        {"conversations": chat("Q1", "你好")},
        {"conversations": [{"role": "system", "content": "S"}, *chat("Q2", "x", reasoning_content="why")]},
        {"conversations": [{"role": "system", "content": "", "tools": json.dumps([TOOL])}, *chat("Q3"), *chat("Q4")]},
    ]
    folder = prepared("full_sft", rows)
    encode_set("full_sft", folder, tmp_path / "out", tokenizer, max_seq_len=500, max_dropped_frac=0.0)
    encoder = ChatEncoder(tokenizer)
    sources = {split: read_prepared(folder, split) for split in ("train", "held_out")}
    encoded = {row["line"]: row for split in sources for row in read(tmp_path / "out", split)}
    for source in sources["train"] + sources["held_out"]:
        row, whole = encoded[source["line"]], encoder.encode(source["conversations"], source["tools"])
        assert row["ids"] == whole.ids
        assert row["trained"] == [int(flag) for flag in whole.trained]
        assert row["empty_thinks"] == [bound for span in whole.empty_thinks for bound in span]
    assert [encoded[line]["takes_system"] for line in (1, 2, 3)] == [True, False, False]
    assert [len(encoded[line]["empty_thinks"]) for line in (1, 2, 3)] == [2, 0, 4]
    # <think>\n\n</think>\n\n is 19 bytes, the newline after <|im_end|> one, two Chinese characters six.
    assert encoded[1]["num_bytes"] == 19 + 6 + 1
    assert encoded[2]["num_bytes"] == len("<think>\nwhy\n</think>\n\nx\n")
    assert encoded[3]["num_bytes"] == 2 * (19 + 1 + 1)


def test_what_a_model_must_write(tmp_path, tokenizer, prepared):
    """Without what generation prompts give it, an empty block or the opening of one, and the newline behind a turn."""
    call = {"name": "f", "arguments": {}}
    turns = [*chat("Q", "", reasoning_content="why\n", tool_calls=[call]), {"role": "tool", "content": "1"}]
    turns += [{"role": "assistant", "content": "\n你好"}, *chat("<think>\n\n</think>\n\n", "x")]
    folder = prepared("full_sft", [{"conversations": turns}, {"conversations": chat("other")}])
    encode_set("full_sft", folder, tmp_path / "out", tokenizer, max_seq_len=500, max_dropped_frac=0.0)
    (row,) = [row for split in ("train", "held_out") for row in read(tmp_path / "out", split) if row["line"] == 1]
    written = [token for token, flag in zip(row["ids"], row["written"], strict=True) if flag]
    first = 'why\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert tokenizer.decode_all(written) == f"{first}<|im_end|>你好<|im_end|>x<|im_end|>"
    assert row["written_bytes"] == len(f"{first}你好x".encode())
    assert all(trained >= flag for trained, flag in zip(row["trained"], row["written"], strict=True))


def test_pair_columns(tmp_path, tokenizer, prepared):
    rows = [{"chosen": chat(f"Q{n}", "good"), "rejected": chat(f"Q{n}", "quite bad", reasoning_content="r")} for n in range(3)]
    folder = prepared("dpo", rows)
    encode_set("dpo", folder, tmp_path / "out", tokenizer, max_seq_len=100, max_dropped_frac=0.0)
    encoder = ChatEncoder(tokenizer)
    for source, row in zip(read_prepared(folder, "train"), read(tmp_path / "out"), strict=True):
        for side in ("chosen", "rejected"):
            whole = encoder.encode(source[side])
            assert row[f"{side}_ids"] == whole.ids
            assert row[f"{side}_trained"] == [int(flag) for flag in whole.trained]
        assert len(row["chosen_empty_thinks"]) == 2
        assert row["rejected_empty_thinks"] == []


def test_over_long_chats_are_dropped_listed_and_counted(tmp_path, tokenizer, prepared):
    rows = [{"conversations": chat(f"Q{n}", "A" * (300 if n == 5 else 3))} for n in range(20)]
    folder = prepared("full_sft", rows)
    report = encode_set("full_sft", folder, tmp_path / "out", tokenizer, max_seq_len=250, max_dropped_frac=0.05)
    assert report["dropped"] == 1
    assert report["rows"] == 20 == report["train"] + report["held_out"] + 1
    assert report["dropped_rows"][0].startswith(f"{tmp_path}/rows.jsonl:6: ")
    assert report["dropped_rows"][0].endswith("> max_seq_len=250")
    assert report == read_report(tmp_path / "out")
    assert 6 not in [row["line"] for split in ("train", "held_out") for row in read(tmp_path / "out", split)]
    with pytest.raises(DataError) as error:
        encode_set("full_sft", folder, tmp_path / "out", tokenizer, max_seq_len=250, max_dropped_frac=0.04)
    (line,) = error.value.lines
    assert line.startswith("full_sft: 1 of 20 rows dropped")
    assert "rows.jsonl:6: " in line
    assert "full_sft.max_seq_len" in line


def test_room_for_the_longest_system_prompt_is_kept(tmp_path, tokenizer, prepared):
    encoder = ChatEncoder(tokenizer)
    longest = max(len(encoder.encode_system(prompt)) for prompt in SYSTEM_PROMPTS)
    folder = prepared("lora", [{"conversations": chat(question)} for question in ("QQ", "RR")])
    fits = len(encoder.encode(chat("QQ")).ids) + longest
    assert encode_set("lora", folder, tmp_path / "out", tokenizer, max_seq_len=fits, max_dropped_frac=0.0)["dropped"] == 0
    with pytest.raises(DataError, match="with a system prompt of"):
        encode_set("lora", folder, tmp_path / "out", tokenizer, max_seq_len=fits - 1, max_dropped_frac=1.0)


def test_pairs_that_become_the_same_tokens_are_dropped(tmp_path, tokenizer, prepared):
    rows = [{"chosen": chat(f"Q{n}", "good"), "rejected": chat(f"Q{n}", "bad")} for n in range(9)]
    rows.append({"chosen": chat("Q9", "same"), "rejected": chat("Q9", "same", reasoning_content="")})
    rows.append({"chosen": chat("Q10", "same"), "rejected": chat("Q10", "\nsame")})
    folder = prepared("dpo", rows)
    report = encode_set("dpo", folder, tmp_path / "out", tokenizer, max_seq_len=100, max_dropped_frac=0.5)
    reasons = sorted(reason.removeprefix(f"{tmp_path}/rows.jsonl:") for reason in report["dropped_rows"])
    assert reasons == ["10: chosen and rejected are the same tokens", "11: chosen and rejected are the same tokens"]


def test_the_longer_side_decides_about_a_pair(tmp_path, tokenizer, prepared):
    rows = [{"chosen": chat(f"Q{n}", "good"), "rejected": chat(f"Q{n}", "z" * (90 if n == 2 else 3))} for n in range(9)]
    report = encode_set("dpo", prepared("dpo", rows), tmp_path / "out", tokenizer, max_seq_len=80, max_dropped_frac=0.5)
    assert len(report["dropped_rows"]) == 1
    assert "rows.jsonl:3: rejected has" in report["dropped_rows"][0]


def test_a_split_that_loses_all_rows_is_refused(tmp_path, tokenizer, prepared):
    folder = prepared("lora", [{"conversations": chat("Q1" * 50)}, {"conversations": chat("Q2" * 50)}])
    with pytest.raises(DataError, match=r"lora \(train\): all 1 rows dropped"):
        encode_set("lora", folder, tmp_path / "out", tokenizer, max_seq_len=50, max_dropped_frac=1.0)


def test_datasets_opens_the_files_and_the_bytes_repeat(tmp_path, tokenizer, prepared):
    folder = prepared("full_sft", [{"conversations": chat(f"Q{n}")} for n in range(1300)])  # more than one record batch
    for name in ("a", "b"):
        encode_set("full_sft", folder, tmp_path / name, tokenizer, max_seq_len=200, max_dropped_frac=0.0)
    for name in ("train.arrow", "held_out.arrow", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    opened = datasets.Dataset.from_file(str(tmp_path / "a" / "train.arrow"))
    assert opened.column_names == [
        "line",
        "ids",
        "trained",
        "empty_thinks",
        "takes_system",
        "num_bytes",
        "written",
        "written_bytes",
    ]
    assert opened[:]["ids"] == [row["ids"] for row in read(tmp_path / "a")]
    with pa.memory_map(str(tmp_path / "a" / "train.arrow")) as file, pa.ipc.open_stream(file) as reader:
        assert len(list(reader)) >= 2
