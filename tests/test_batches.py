"""Batches: spliced augmentation equals encoding the augmented messages; order and draws are functions of seed and epoch."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.encode import encode_set
from pipeline.data.prepare import prepare
from pipeline.data.prepared import read_prepared
from pipeline.data.prompts import PromptSet
from pipeline.errors import DataError
from pipeline.params.load import load_params
from pipeline.rewards.model import Reply, TrainedRewardModel
from pipeline.text.chat import ChatEncoder, render_chat
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import load_tokenizer, train_tokenizer
from pipeline.tools.registry import Tool, tool_schema
from pipeline.tools.toolbox import Toolbox
from pipeline.training.panels import pair_prompts

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"name": "f", "arguments": {"x": 1}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        ["the quick brown fox 秋天的诗歌\n\n" * 5, "user assistant system"], folder, vocab_size=330, split_digits=True
    )
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def build(tmp_path_factory, root, tokenizer):
    """A function that prepares and encodes rows (JSON values) and gives (prepared, encoded)."""
    params = load_params(root / "profiles" / "micro.yaml").data.model_copy(update={"held_out_frac": 0.1})

    def make(set_name, rows):
        folder = tmp_path_factory.mktemp("set")
        source = folder / "rows.jsonl"
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        prepare(set_name, source, folder / "prepared", params)
        if set_name not in ("rlaif", "agent"):
            encode_set(set_name, folder / "prepared", folder / "encoded", tokenizer, max_seq_len=2000, max_dropped_frac=0.0)
        return folder / "prepared", folder / "encoded"

    return make


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def system(content, **fields):
    return {"role": "system", "content": content, **fields}


def chats(count):
    """Chats of many lengths: plain, thinking, with system message, with tools, of several turns."""
    rows = []
    for n in range(count):
        question, answer = user(f"Q{n} " + "fox " * (n % 17)), assistant(f"A{n} " + "秋" * (n % 11))
        rows.append(
            [
                [question, answer],
                [question, assistant("so", reasoning_content="why")],
                [system("S"), question, answer],
                [system("", tools=[TOOL]), question, assistant("", tool_calls=[CALL]), {"role": "tool", "content": "1"}, answer],
                [question, answer, user("more"), assistant("yes"), user("and"), assistant("no", reasoning_content="hm")],
            ][n % 5]
        )
    return [{"conversations": row} for row in rows]


def sequences(batch):
    """Per row the ids and the trained flags of all but the first, padding removed; checks the padding on the way."""
    found = []
    for inputs, labels in zip(batch.input_ids, batch.labels, strict=True):
        length = int((labels != -100).nonzero().max()) + 1
        assert (inputs[length:] == 0).all()
        assert (labels[length:] == -100).all()
        trained = labels[:length] != -100
        following = torch.cat([inputs[1:length], labels[length - 1 : length]])
        assert torch.equal(labels[:length][trained], following[trained])
        found.append(([int(inputs[0]), *following.tolist()], trained.tolist()))
    return found


def expected(ids, trained):
    return list(ids), [bool(flag) for flag in trained[1:]]


def test_a_batch_by_hand(build, tokenizer):
    _, encoded = build("pretrain", [{"text": "ab"}, {"text": "abcd"}, {"text": "!!!"}])
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=4, seed=0, tokenizer=tokenizer)
    (batch,) = batches.in_order()
    a, b, c, d = (tokenizer.encode_text(letter)[0] for letter in "abcd")
    by_length = {2: [1, a, b], 4: [1, a, b, c, d]}
    want = {"inputs": [], "labels": []}
    for row in sorted(read_texts(encoded), key=len):
        inputs = by_length[len(row)] if row != "!!!" else [1, *tokenizer.encode_text("!!!")]
        want["inputs"].append(inputs)
        want["labels"].append([*inputs[1:], 2])
    width = max(map(len, want["inputs"]))
    assert batch.input_ids.tolist() == [row + [0] * (width - len(row)) for row in want["inputs"]]
    assert batch.labels.tolist() == [row + [-100] * (width - len(row)) for row in want["labels"]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.num_trained == sum(map(len, want["labels"]))
    assert sorted(batch.row_bytes) == sorted(len(row) for row in read_texts(encoded))
    assert batch.num_bytes == sum(batch.row_bytes)


def read_texts(encoded):
    return [row["text"] for row in read_prepared(encoded.parent / "prepared", "train")]


def augmented(messages, prompt, without_thinks, encoder):
    """Ids and trained flags of the augmented conversation, computed from its text alone."""
    messages = messages if prompt is None else [system(prompt), *messages]
    encoded = encoder.encode(messages)
    if not without_thinks:
        return expected(encoded.ids, encoded.trained)
    kept = [n for n in range(len(encoded.ids)) if not any(start <= n < end for start, end in encoded.empty_thinks)]
    return expected([encoded.ids[n] for n in kept], [encoded.trained[n] for n in kept])


TEXT = st.text(st.sampled_from("ab \n秋fox<>1"), max_size=12)


@st.composite
def conversations(draw):
    messages = [system(draw(TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        fields = {"reasoning_content": draw(TEXT)} if draw(st.booleans()) else {}
        messages += [user(draw(TEXT)), assistant(draw(TEXT) + "!", **fields)]
    return messages


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations(), seed=st.integers(0, 2**70))
def test_spliced_augmentation_equals_encoding_the_augmented_messages(build, tokenizer, messages, seed):
    _, encoded = build("full_sft", [{"conversations": messages}, {"conversations": [user("held out?"), assistant("x")]}])
    prepared = encoded.parent / "prepared"
    encoder = ChatEncoder(tokenizer)
    for split in ("train", "held_out"):
        source = read_prepared(prepared, split)[0]["conversations"]
        takes_system = source[0]["role"] != "system"
        for system_frac, drop_frac in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)):
            batches = SupervisedBatches(
                encoded / f"{split}.arrow",
                batch_size=2,
                seed=seed,
                tokenizer=tokenizer,
                system_prompt_frac=system_frac,
                drop_empty_think_frac=drop_frac,
            )
            (got,) = sequences(batches.batch(3, 0))
            prompts = SYSTEM_PROMPTS if system_frac and takes_system else (None,)
            assert got in [augmented(source, prompt, drop_frac == 1.0, encoder) for prompt in prompts]


def test_dropping_empty_thinks_equals_the_text_without_them(build, tokenizer):
    # An oracle that does not know spans: the rendered text with the blocks removed, read back from the ids.
    _, encoded = build("full_sft", chats(40))
    source = read_prepared(encoded.parent / "prepared", "train")
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=64, seed=1, tokenizer=tokenizer, drop_empty_think_frac=1.0)
    batch = batches.batch(0, 0)
    for row, (ids, _) in zip(batch.rows, sequences(batch), strict=True):
        text = render_chat(source[row]["conversations"], source[row]["tools"]).replace("<think>\n\n</think>\n\n", "")
        assert tokenizer.decode(ids, skip_special=False) == text


def test_chats_with_system_message_or_tools_take_no_system_prompt(build, tokenizer):
    _, encoded = build("full_sft", chats(50))
    source = read_prepared(encoded.parent / "prepared", "train")
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=64, seed=1, tokenizer=tokenizer, system_prompt_frac=1.0)
    batch = batches.batch(0, 0)
    for row, (ids, _) in zip(batch.rows, sequences(batch), strict=True):
        text, stored = tokenizer.decode(ids, skip_special=False), source[row]
        plain = render_chat(stored["conversations"], stored["tools"])
        if stored["conversations"][0]["role"] == "system":
            assert text == plain
        else:
            assert text in [f"<|im_start|>system\n{prompt}<|im_end|>\n{plain}" for prompt in SYSTEM_PROMPTS]


def test_draws_are_per_row_and_epoch_with_the_given_chance(build, tokenizer):
    _, encoded = build("full_sft", [{"conversations": [user(f"Q{n}"), assistant("A")]} for n in range(1000)])
    batches = SupervisedBatches(
        encoded / "train.arrow", batch_size=50, seed=5, tokenizer=tokenizer, system_prompt_frac=0.2, drop_empty_think_frac=0.8
    )
    header = ChatEncoder(tokenizer).encode_system("")[:3]
    think = tokenizer.control_id("<think>")
    draws = []
    for epoch in range(2):
        drawn = {}
        for index in range(batches.batches_per_epoch):
            batch = batches.batch(epoch, index)
            for row, (ids, _) in zip(batch.rows, sequences(batch), strict=True):
                drawn[row] = (ids[:3] == header, think not in ids)
        draws.append([drawn[row] for row in sorted(drawn)])
    for drawn in draws:
        count = len(drawn)
        # Standard deviations: sqrt(0.2 * 0.8 / 900) = 0.013; five of them are allowed.
        assert abs(sum(given for given, _ in drawn) / count - 0.2) < 0.067
        assert abs(sum(dropped for _, dropped in drawn) / count - 0.8) < 0.067
        both = sum(given and dropped for given, dropped in drawn) / count
        assert abs(both - 0.16) < 0.062  # the two are independent
    for part in (0, 1):  # 2 * 0.2 * 0.8 = 0.32 of the rows are expected to differ between epochs, in either decision
        changed = sum(first[part] != second[part] for first, second in zip(*draws, strict=True)) / len(draws[0])
        assert abs(changed - 0.32) < 0.08


def test_every_row_comes_once_per_epoch_and_orders_differ(build, tokenizer):
    _, encoded = build("full_sft", chats(203))
    num_rows = len(read_prepared(encoded.parent / "prepared", "train"))

    def order(seed, epoch):
        batches = SupervisedBatches(encoded / "train.arrow", batch_size=8, seed=seed, tokenizer=tokenizer)
        assert batches.batches_per_epoch == -(-num_rows // 8)
        rows = [batches.batch(epoch, index).rows for index in range(batches.batches_per_epoch)]
        sizes = Counter(map(len, rows))
        assert sizes[num_rows % 8 or 8] >= 1
        assert sum(sizes.values()) - sizes[8] == (1 if num_rows % 8 else 0)
        return [row for batch in rows for row in batch]

    first = order(3, 0)
    assert sorted(first) == list(range(num_rows))
    assert order(3, 0) == first
    assert order(3, 1) != first
    assert order(4, 0) != first
    with pytest.raises(IndexError):
        SupervisedBatches(encoded / "train.arrow", batch_size=8, seed=3, tokenizer=tokenizer).batch(0, -(-num_rows // 8))


def test_any_batch_is_the_same_whatever_was_asked_before(build, tokenizer):
    _, encoded = build("full_sft", chats(60))

    def fresh():
        return SupervisedBatches(
            encoded / "train.arrow", batch_size=4, seed=9, tokenizer=tokenizer, system_prompt_frac=0.5, drop_empty_think_frac=0.5
        )

    walked = fresh()
    for epoch, index in [(0, 0), (0, 1), (1, 0), (0, 3), (2, 5), (0, 1)]:
        got, want = walked.batch(epoch, index), fresh().batch(epoch, index)
        assert got.rows == want.rows
        assert torch.equal(got.input_ids, want.input_ids)
        assert torch.equal(got.labels, want.labels)


def test_similar_lengths_share_a_batch(build, tokenizer):
    _, encoded = build("pretrain", [{"text": f"{n} " + "z" * (n * 37 % 400)} for n in range(500)])
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=8, seed=0, tokenizer=tokenizer)
    made = [batches.batch(0, index) for index in range(batches.batches_per_epoch)]
    padded = sum(batch.labels.numel() for batch in made)
    assert sum(batch.num_trained for batch in made) / padded > 0.9
    lengths = [int(batch.labels.shape[1]) for batch in made]
    assert lengths != sorted(lengths)
    assert np.corrcoef(lengths, range(len(lengths)))[0, 1] < 0.5  # batches come in no order of length


def test_chats_are_batched_by_what_an_epoch_makes_of_them(build, tokenizer):
    """Of one pool no row is longer than the shortest of the next batch, augmentation included."""
    _, encoded = build("full_sft", chats(250))
    chances = {"system_prompt_frac": 0.5, "drop_empty_think_frac": 0.5}
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=8, seed=4, tokenizer=tokenizer, **chances)
    for epoch in (0, 1, 0):
        made = [batches.batch(epoch, index) for index in range(batches.batches_per_epoch)]
        ranges = sorted((min(lengths), max(lengths)) for batch in made if (lengths := [len(ids) for ids, _ in sequences(batch)]))
        assert len(ranges) > 20 and ranges[0][0] < ranges[-1][1]
        assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(ranges))


def test_in_order_is_every_row_as_stored(build, tokenizer):
    _, encoded = build("full_sft", chats(50))
    source = read_prepared(encoded.parent / "prepared", "train")
    encoder = ChatEncoder(tokenizer)
    batches = SupervisedBatches(
        encoded / "train.arrow", batch_size=8, seed=9, tokenizer=tokenizer, system_prompt_frac=1.0, drop_empty_think_frac=1.0
    )
    made = list(batches.in_order())
    assert sorted(row for batch in made for row in batch.rows) == list(range(len(source)))
    for batch in made:
        for row, got in zip(batch.rows, sequences(batch), strict=True):
            whole = encoder.encode(source[row]["conversations"], source[row]["tools"])
            assert got == expected(whole.ids, whole.trained)
    widths = [batch.labels.shape[1] for batch in made]
    assert widths == sorted(widths)


def test_rows_of_all_record_batches_are_found(build, tokenizer):
    _, encoded = build("pretrain", [{"text": f"text {n}"} for n in range(2500)])
    texts = read_texts(encoded)
    batches = SupervisedBatches(encoded / "train.arrow", batch_size=100, seed=0, tokenizer=tokenizer)
    seen = 0
    for index in range(batches.batches_per_epoch):
        batch = batches.batch(0, index)
        for row, (ids, trained) in zip(batch.rows, sequences(batch), strict=True):
            assert ids == [1, *tokenizer.encode_text(texts[row]), 2]
            assert all(trained)
            seen += 1
    assert seen == len(texts) > 2048


def pairs(count):
    rows = []
    for n in range(count):
        prompt = [user(f"Q{n}"), assistant("mid"), user(f"{n} and")]
        rows.append({"chosen": [*prompt, assistant("A" * (n % 7 + 1))], "rejected": [*prompt, assistant("bad " * (n % 5 + 1))]})
    return rows


def test_pair_batches_stack_chosen_over_rejected(build, tokenizer):
    _, encoded = build("dpo", pairs(30))
    source = read_prepared(encoded.parent / "prepared", "train")
    encoder = ChatEncoder(tokenizer)
    batches = PairBatches(encoded / "train.arrow", batch_size=5, seed=2, tokenizer=tokenizer, drop_empty_think_frac=0.5)
    decisions = set()
    for index in range(batches.batches_per_epoch):
        batch = batches.batch(0, index)
        n = batch.num_pairs
        assert len(batch.input_ids) == 2 * n == 2 * len(batch.rows)
        assert batch.num_trained == int((batch.labels != -100).sum())
        got = sequences(batch)
        for place, row in enumerate(batch.rows):
            sides = (got[place], got[n + place])
            wanted = {
                dropped: tuple(
                    last_turn(*augmented(source[row][side], None, dropped, encoder)) for side in ("chosen", "rejected")
                )
                for dropped in (False, True)
            }
            matches = [dropped for dropped, want in wanted.items() if sides == want]  # one decision for both sides
            assert len(matches) == 1
            decisions.add(matches[0])
    assert decisions == {False, True}
    stored = [pair for batch in batches.in_order() for pair in batch.rows]
    assert sorted(stored) == list(range(len(source)))
    think = tokenizer.control_id("<think>")
    assert all((batch.input_ids == think).any(dim=1).all() for batch in batches.in_order())


def last_turn(ids, trained):
    """The flags of the last run of trained labels alone: both sides of a pair say the same before it."""
    start = len(trained)
    while start and trained[start - 1]:
        start -= 1
    return ids, [False] * start + trained[start:]


class ReadIds(torch.nn.Module):
    """Scores nothing and remembers the ids it was asked about."""

    def __init__(self):
        super().__init__()
        self.weight, self.read = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, input_ids, last_positions):
        self.read += [ids[: last + 1].tolist() for ids, last in zip(input_ids, last_positions, strict=True)]
        return torch.zeros(len(input_ids))


def test_a_reward_model_is_asked_in_the_form_it_was_trained_on(build, tokenizer):
    """Tools and earlier turns are rendered, thinking is not: equal ids, up to the one whose score is read."""
    tools = {"role": "system", "content": "S", "tools": json.dumps([TOOL])}
    called = [assistant("", tool_calls=[CALL], reasoning_content="call it"), {"role": "tool", "content": "<think>1</think>"}]
    prompts = [
        [user("Q0")],
        [user("Q1"), assistant("mid", reasoning_content="hm\n\nso"), user("and")],
        [tools, user("Q2")],
        [tools, user("Q3"), *called],
        [tools, user("Q4"), assistant("<think>in\nline</think>mid"), user("<think>"), *called],
    ]
    answers = [assistant("\ngood"), assistant("so\n\nbad", reasoning_content="\n\n what\n")]
    rows = [{"chosen": [*prompt, answers[0]], "rejected": [*prompt, answers[1]]} for prompt in prompts]
    prepared, encoded = build("dpo", rows)
    trained, asked = [], []
    for split in ("train", "held_out"):
        pair_batches = PairBatches(encoded / f"{split}.arrow", batch_size=2, seed=1, tokenizer=tokenizer)
        for batch in pair_batches.judged().in_order():
            ends = (batch.labels != -100).long().cumsum(dim=1).argmax(dim=1)
            trained += [tuple(ids[: end + 1].tolist()) for ids, end in zip(batch.input_ids, ends, strict=True)]
        for row in read_prepared(prepared, split):
            asked += [Reply(row[side][:-1], row[side][-1]["content"], row["tools"]) for side in ("chosen", "rejected")]
    model = ReadIds()
    TrainedRewardModel(model, ChatEncoder(tokenizer), pad_id=0, offset=0, scale=1, batch_size=3, max_len=2000).score(asked)
    assert len(set(trained)) == 10 and set(map(tuple, model.read)) == set(trained)
    blocks = [tokenizer.decode_all(ids).split("<|im_start|>assistant\n")[1:] for ids in trained]
    assert all(turn.startswith("<think>\n\n</think>\n\n") for turns in blocks for turn in turns) and len(sum(blocks, [])) == 18
    assert sum("<tools>" in tokenizer.decode_all(ids) for ids in trained) == 6


def test_only_the_turn_that_differs_is_counted_in_pairs(build, tokenizer):
    _, encoded = build("dpo", pairs(12))
    source = read_prepared(encoded.parent / "prepared", "train")
    opened = PairBatches(encoded / "train.arrow", batch_size=4, seed=2, tokenizer=tokenizer)
    for batch in opened.in_order():
        for number, labels in enumerate(batch.labels):
            row, side = source[batch.rows[number % batch.num_pairs]], ("chosen", "rejected")[number >= batch.num_pairs]
            answer = row[side][-1]["content"]
            assert tokenizer.decode_all(labels[labels != -100].tolist()) == f"<think>\n\n</think>\n\n{answer}<|im_end|>\n"
    shown = [tokenizer.decode_all(prompt) for prompt in pair_prompts(opened)]
    assert shown and all(text.endswith("and<|im_end|>\n<|im_start|>assistant\n") and "mid" in text for text in shown)


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"train\.arrow: no such file"):
        PairBatches(tmp_path / "train.arrow", batch_size=2, seed=0, tokenizer=tokenizer)


def prompt_set(prepared, tokenizer, **values):
    settings = {"batch_size": 7, "seed": 3, "max_prompt_len": 400, "max_dropped_frac": 0.0, "thinking_ratio": 0.5}
    return PromptSet(prepared, "train", tokenizer=tokenizer, **(settings | values))


def test_prompts_are_encoded_with_their_draws(build, tokenizer):
    prepared, _ = build("rlaif", [{"conversations": [user(f"Q{n}"), assistant("空")]} for n in range(300)])
    source = read_prepared(prepared, "train")
    prompts = prompt_set(prepared, tokenizer, system_prompt_frac=0.2)
    encoder = ChatEncoder(tokenizer)
    epochs = []
    for epoch in (0, 1):
        tasks = [task for index in range(prompts.batches_per_epoch) for task in prompts.batch(epoch, index)]
        assert sorted(task.row for task in tasks) == list(range(len(source)))
        for task in tasks:
            assert task.prompt_ids == encoder.encode_prompt(task.messages, open_thinking=task.open_thinking)
            assert task.messages[-1:] == source[task.row]["conversations"]
            assert [message["content"] in SYSTEM_PROMPTS for message in task.messages[:-1]] in ([], [True])
            assert (task.tools, task.gt) == (None, [])
        # Standard deviations: sqrt(0.25 / 240) = 0.032 and sqrt(0.16 / 240) = 0.026; four of them are allowed.
        assert abs(np.mean([task.open_thinking for task in tasks]) - 0.5) < 0.13
        assert abs(np.mean([len(task.messages) - 1 for task in tasks]) - 0.2) < 0.104
        epochs.append(tasks)
    assert [task.row for task in epochs[0]] != [task.row for task in epochs[1]]
    first, second = (sorted(tasks, key=lambda task: task.row) for tasks in epochs)
    assert [task.open_thinking for task in first] != [task.open_thinking for task in second]
    assert [len(task.messages) for task in first] != [len(task.messages) for task in second]
    assert prompts.batch(0, 3) == prompt_set(prepared, tokenizer, system_prompt_frac=0.2).batch(0, 3)


def test_tasks_offer_tools_and_expect_answers(build, tokenizer):
    rows = [{"conversations": [system("", tools=[TOOL]), user(f"Q{n}"), assistant("")], "gt": [str(n)]} for n in range(20)]
    prepared, _ = build("agent", rows)
    prompts = prompt_set(prepared, tokenizer, max_prompt_len=500, thinking_ratio=0.0, system_prompt_frac=1.0)
    for task in prompts.batch(0, 0):
        assert task.tools == [TOOL]
        assert task.messages == [system(""), user(f"Q{task.gt[0]}")]
        assert task.prompt_ids == ChatEncoder(tokenizer).encode_prompt(task.messages, [TOOL])


def test_over_long_prompts_are_dropped_or_abort(build, tokenizer):
    rows = [{"conversations": [user(f"Q{n}" + "x" * (100 if n < 3 else 0)), assistant("空")]} for n in range(40)]
    prepared, _ = build("rlaif", rows)
    source = read_prepared(prepared, "train")
    too_long = sum(row["line"] <= 3 for row in source)
    assert too_long > 0
    prompts = prompt_set(prepared, tokenizer, max_prompt_len=80, max_dropped_frac=0.1)
    assert len(prompts) == len(source) - too_long
    assert len(prompts.dropped) == too_long
    assert all("rows.jsonl:" in reason and reason.endswith("> max_prompt_len=80") for reason in prompts.dropped)
    with pytest.raises(
        DataError, match=rf"rlaif \(train\): {too_long} of {len(source)} rows dropped.*max_prompt_len, or raise that"
    ):
        prompt_set(prepared, tokenizer, max_prompt_len=80)
    with pytest.raises(DataError, match=f"all {len(source)} rows dropped.*raise the stage's max_prompt_len$"):
        prompt_set(prepared, tokenizer, max_prompt_len=2, max_dropped_frac=1.0)
    with pytest.raises(
        DataError, match=r"tokens > the 2 that eval.max_new_tokens leaves of the window.*or lower eval.max_new_tokens$"
    ):
        prompt_set(prepared, tokenizer, max_prompt_len=2, max_dropped_frac=1.0, beside="eval.max_new_tokens")


def test_rows_whose_tools_nothing_answers_are_dropped_with_their_names_or_abort(build, tokenizer):
    other = tool_schema("unit_converter") | {"type": "function"}
    other["function"]["parameters"]["properties"]["value"]["type"] = "string"
    offers = {0: tool_schema("calculate_math"), 1: TOOL, 2: other}  # known, unknown, of another schema
    rows = [
        {"conversations": [system("", tools=[offers[n % 20 if n % 20 < 3 else 0]]), user(f"Q{n}"), assistant("")], "gt": [str(n)]}
        for n in range(60)
    ]
    prepared, _ = build("agent", rows)
    source = read_prepared(prepared, "train")
    wrong = [row for row in source if row["tools"][0] != offers[0]]
    assert 2 <= len(wrong) < len(source)
    prompts = prompt_set(prepared, tokenizer, max_prompt_len=999, toolbox=Toolbox(), max_dropped_frac=0.5)
    assert len(prompts) == len(source) - len(wrong)
    assert [int(reason.split(":")[1]) for reason in prompts.dropped] == [row["line"] for row in wrong]
    name = TOOL["function"]["name"]
    for row, reason in zip(wrong, prompts.dropped, strict=True):
        known = row["tools"][0]["function"]["name"] != name
        fault = "tool 'unit_converter' has another schema in the toolbox" if known else f"the toolbox has no tool '{name}'"
        assert fault in reason
    with pytest.raises(DataError, match=rf"agent \(train\): {len(wrong)} of {len(source)} rows dropped.*tools.extra") as refused:
        prompt_set(prepared, tokenizer, max_prompt_len=999, toolbox=Toolbox(), max_dropped_frac=0.01)
    assert "max_prompt_len" not in str(refused.value)
    own = Toolbox(own={name: Tool(TOOL, lambda arguments: 1), "unit_converter": Tool(other, lambda arguments: 1)})
    assert not prompt_set(prepared, tokenizer, max_prompt_len=999, toolbox=own).dropped
    assert not prompt_set(prepared, tokenizer, max_prompt_len=999).dropped  # nothing is called


@pytest.mark.parametrize("frac", [0.0, 0.3, 0.5, 1.0])
def test_pairs_of_many_epochs_are_given_once_in_each_form(build, tokenizer, frac):
    """As the epochs themselves draw them, and of a million epochs at once: nobody waits for draws that give nothing new."""
    _, encoded = build("dpo", pairs(30))
    options = {"batch_size": 5, "seed": 2, "tokenizer": tokenizer, "drop_empty_think_frac": frac}
    batches = PairBatches(encoded / "train.arrow", **options)

    def forms(given):
        return [(row, drop) for batch in given for row, drop in zip(batch.rows, batch.dropped, strict=True)]

    for epochs in (1, 2, 4):
        drawn = [batches.batch(epoch, index) for epoch in range(epochs) for index in range(batches.batches_per_epoch)]
        assert sorted(forms(batches.of_epochs(epochs))) == sorted(set(forms(drawn)))
    every = forms(batches.of_epochs(10**6))
    assert len(every) == len(set(every)) == batches.num_rows * (2 if 0 < frac < 1 else 1)
