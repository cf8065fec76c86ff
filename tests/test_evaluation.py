"""Evaluation: intervals and verdicts against known values, every metric against a twin, the cache, and the report's bytes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import CPU, assistant, documents, make_model, make_set, make_tokenizer, pairs, prompts, user
from turn_engines import TurnByTurn

from pipeline.checkpoint.files import model_meta, save_model
from pipeline.checkpoint.lora import lora_meta
from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.prompts import PromptTask
from pipeline.evaluation import examiner as examiner_module
from pipeline.evaluation import report as report_module
from pipeline.evaluation.catalogue import BASELINE, METRICS, OFFERED, PARENTS
from pipeline.evaluation.examiner import MODELS, measure_all, open_held_out, open_panel
from pipeline.evaluation.panel import (
    BY_LENGTH,
    Examination,
    Examiner,
    Panel,
    Question,
    RowValues,
    calls_valid,
    exact_baselines,
    last_turns,
    normalised,
    questions_of,
    single_turns,
)
from pipeline.evaluation.report import CURVES, draw_curves, markdown, metrics_tree, write_report
from pipeline.evaluation.results import cached, chance_of, estimates_of, verdicts_of
from pipeline.evaluation.statistics import Estimate, mean, proportion, ratio, verdict
from pipeline.model.heads import RewardModel
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.model.transformer import CausalLM
from pipeline.params.load import load_params
from pipeline.params.schema import Eval, Params, Rewards, Span
from pipeline.rewards.scoring import CompletionScorer
from pipeline.rollout.records import Completion, StopReason, Trajectory, Turn
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.text.turns import parse_turn
from pipeline.tools.registry import ToolResult, tool_schema
from pipeline.tools.toolbox import PRESET_TOOLS
from pipeline.training.reward_objective import RewardModelling

# --- statistics


def test_proportions_have_wilson_intervals() -> None:
    """z = 1.959964, z^2 = 3.841459. 8 of 10: centre (0.8 + z^2/20) / (1 + z^2/10) = 0.716740, half width
    z sqrt(0.016 + z^2/400) / (1 + z^2/10) = 0.226578. 0 of 20: z^2 / (20 + z^2) = 0.161125."""
    eight = proportion([True] * 8 + [False] * 2, 0.95)
    assert (eight.value, eight.n) == (0.8, 10)
    assert (eight.low, eight.high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    none, every = proportion([False] * 20, 0.95), proportion([True] * 20, 0.95)
    assert none.value == 0 and (none.low, none.high) == pytest.approx((0, 0.161125), abs=1e-6)
    assert every.value == 1 and (every.low, every.high) == pytest.approx((1 - 0.161125, 1), abs=1e-6)
    wide = proportion([True] * 8 + [False] * 2, 0.99)
    assert wide.low < eight.low and wide.high > eight.high
    with pytest.raises(ValueError, match="at least one row"):
        proportion([], 0.95)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0.5, 0.999))
def test_wilson_bounds_solve_the_score_equation(rows: list[bool], confidence: float) -> None:
    """A bound is where |p - bound| = z sqrt(bound (1 - bound) / n), or an end of [0, 1]."""
    estimate = proportion(rows, confidence)
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64)))
    for bound in (estimate.low, estimate.high):
        assert 0 <= bound <= 1
        if 0 < bound < 1:
            distance = abs(estimate.value - bound)
            assert distance == pytest.approx(z * math.sqrt(bound * (1 - bound) / len(rows)), abs=1e-6)


def test_means_have_bootstrap_intervals() -> None:
    values = [math.sin(row) + 0.3 for row in range(400)]
    estimate = mean(values, 0.95)
    centre = sum(values) / 400
    error = math.sqrt(sum((value - centre) ** 2 for value in values) / 400 / 400)
    assert estimate.value == pytest.approx(centre) and estimate.n == 400
    assert (estimate.low, estimate.high) == pytest.approx((centre - 1.96 * error, centre + 1.96 * error), abs=0.2 * error)
    assert estimate == mean(list(values), 0.95)  # no seed but the number of rows
    assert mean([2.5], 0.95) == Estimate(2.5, 2.5, 2.5, 1)
    narrow = mean(values, 0.5)
    assert estimate.low < narrow.low < narrow.high < estimate.high


def test_a_ratio_is_sum_over_sum() -> None:
    estimate = ratio([1.0, 30.0], [1.0, 10.0], 0.95)
    assert estimate.value == pytest.approx(31 / 11)  # not the mean of 1 and 3
    assert (estimate.low, estimate.high) == (1.0, 3.0)  # resamples of two rows
    for bits, sizes in (([], []), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="denominator"):
            ratio(bits, sizes, 0.95)


def test_verdicts_on_known_differences() -> None:
    parent = [float(row % 7) for row in range(200)]
    up = [value + 0.1 + 0.05 * (row % 3 - 1) for row, value in enumerate(parent)]  # +0.1 on rows that spread over 0..6
    assert verdict(up, parent, 0.95, higher_is_better=True) == "better"
    assert verdict(up, parent, 0.95, higher_is_better=False) == "worse"
    assert verdict(parent, up, 0.95, higher_is_better=True) == "worse"
    own, other = mean(up, 0.95), mean(parent, 0.95)
    assert own.low < other.high  # unpaired intervals overlap: pairing is what sees it
    assert verdict(parent, parent, 0.95, higher_is_better=True) == "no clear difference"
    noise = [value + (-1) ** row for row, value in enumerate(parent)]
    assert verdict(noise, parent, 0.95, higher_is_better=True) == "no clear difference"
    assert verdict([1.0], [0.0], 0.95, higher_is_better=True) == "no clear difference"  # one row proves nothing
    with pytest.raises(ValueError, match="differ in number: 2 and 1"):
        verdict([1.0, 2.0], [1.0], 0.95, higher_is_better=True)


def test_estimates_and_verdicts_by_metric() -> None:
    good = [1.0] * 30 + [0.0] * 10
    child: RowValues = {"bits": [8.0] * 40, "bytes": [4.0] * 40, "qa_exact": good, "reward_mean": [0.5] * 40, "stops_frac": []}
    parent: RowValues = {"bits": [9.0] * 40, "bytes": [4.0] * 40, "qa_exact": good[::-1], "reward_mean": [0.1] * 40}
    estimates = estimates_of(child, 0.95)
    assert set(estimates) == {"bits_per_byte", "qa_exact", "reward_mean"}  # bytes are no metric, nothing measured is none
    assert estimates["bits_per_byte"].value == 2.0 and estimates["qa_exact"] == proportion([row == 1 for row in good], 0.95)
    verdicts = verdicts_of({"full_sft": parent, "dpo": child}, 0.95)
    assert verdicts == {"dpo": {"bits_per_byte": "better", "qa_exact": "no clear difference", "reward_mean": "better"}}
    assert verdicts_of({"dpo": child}, 0.95) == {}
    assert set(PARENTS) == set(MODELS) - {"pretrain"} and set(PARENTS.values()) <= set(MODELS)


# --- the panel


def test_normalised() -> None:
    same = ["Paris", "paris.", " PARIS ！", "Ｐａｒｉｓ。", "paris?!", "paris\n"]
    assert {normalised(text) for text in same} == {"paris"}
    assert normalised("a  b\n c") == "a b c" and normalised("3.5") == "3.5" and normalised("") == "" == normalised(" 。！")
    assert normalised("a.b") != normalised("ab") and normalised("不是") != normalised("是")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def row(*messages: dict[str, Any], tools: Any = None) -> dict[str, Any]:
    return {"conversations": list(messages), "tools": tools}


def test_questions_are_single_turns_with_one_right_form(tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer)
    system = {"role": "system", "content": "s"}
    rows = [
        row(user("one"), assistant("1")),
        row(system, user("system"), assistant("x")),
        row(user("tools"), assistant("x"), tools=[tool_schema("calculate_math")]),
        row(user("thinks"), assistant("x", reasoning_content="hm")),
        row(user("two turns"), assistant("x"), user("more"), assistant("y")),
        row(user("long " * 50), assistant("x")),
        row(user("two"), assistant("2", reasoning_content="")),
        row(user("three"), assistant("3")),
    ]
    questions = questions_of(single_turns(rows), encoder, limit=2, max_prompt_len=60)
    assert [question.reference for question in questions] == ["1", "2"]
    assert questions[0].prompt_ids == encoder.encode_prompt([user("one")])
    assert len(questions_of(single_turns(rows), encoder, limit=99, max_prompt_len=999)) == 4
    tools = [[tool_schema("calculate_math", "en")], [tool_schema("unit_converter", "en")]]
    idle = questions_of(single_turns(rows), encoder, limit=3, max_prompt_len=999, offered=tools)
    assert [question.reference for question in idle] == ["1", "x", "2"]
    assert idle[2].prompt_ids == encoder.encode_prompt([user("two")], tools[0])  # in turn
    assert questions_of(single_turns(rows), encoder, limit=3, max_prompt_len=999, offered=[]) == []


def test_the_last_question_of_a_chat_is_asked_behind_its_turns() -> None:
    talk = [user("one"), assistant("1"), user("two"), assistant("2")]
    rows = [row(*talk), row(user("a"), assistant("b", reasoning_content="hm")), row(user("a"), assistant(" "))]
    rows.append({"conversations": talk, "tools": [tool_schema("calculate_math", "en")]})
    assert list(last_turns(rows)) == [(talk[:3], "2")]


def make_eval(**changes: Any) -> Eval:
    shape = {"seed": 3, "panel_rows": 5, "temperature": 0.7, "thinking_ratio": 0.5, "max_new_tokens": 12, "max_turns": 3}
    return Eval(**(shape | {"batch_size": 4, "confidence": 0.95, "gate": None} | changes))


REWARDS = Rewards(
    preset="default",
    length=Span(min_chars=2, max_chars=80, weight=0.5, penalty=0.25),
    thinking=Span(min_chars=2, max_chars=30, weight=1.0, penalty=0.5),
    think_close=0.125,
    repetition=1.0,
    model=1.0,
    model_clip=3.0,
    answer=2.5,
    tool_call=0.5,
    unfinished=0.75,
    agent_clip=3.0,
)


class Fixed:
    """A reward model with the same score for everything."""

    def score(self, items: Sequence[Any]) -> list[float]:
        return [0.25] * len(items)


class ScriptedEngine(TurnByTurn):
    """Says what it was told to: texts by call and row, ended by themselves unless they end in an ellipsis."""

    def __init__(self, tokenizer: Tokenizer, script: list[list[str]]) -> None:
        self.tokenizer, self.script = tokenizer, list(script)
        self.keys: list[list[int]] = []
        self.greedy: list[bool | list[bool]] = []

    def turn(self, prompts: Any, *, keys: Any, temperature: float, greedy: Any, **_: Any) -> list[Completion]:
        assert temperature == 0.7
        self.keys.append(list(keys))
        self.greedy.append(greedy)
        return [self.complete(text) for text, _ in zip(self.script.pop(0), prompts, strict=True)]

    def complete(self, text: str) -> Completion:
        ids: list[int] = []
        for place, part in enumerate(text.removesuffix("...").replace("</call>", "<call>").split("<call>")):
            tags = [self.tokenizer.control_id("<tool_call>" if place % 2 else "</tool_call>")] if place else []
            ids += tags + self.tokenizer.encode_text(part)
        if text.endswith("..."):
            return Completion(ids, [0.0] * len(ids), StopReason.LENGTH)
        return Completion([*ids, self.tokenizer.eos_id], [0.0] * (len(ids) + 1), StopReason.EOS)


def make_task(tokenizer: Tokenizer, text: str, gt: list[str], *, tools: Any = None, open_thinking: bool = False) -> PromptTask:
    messages = [user(text)]
    ids = ChatEncoder(tokenizer).encode_prompt(messages, tools, open_thinking=open_thinking)
    return PromptTask(0, ids, open_thinking, messages, tools, gt)


def make_examiner(tokenizer: Tokenizer, panel: Any, **changes: Any) -> Examiner:
    score, encoder = CompletionScorer(REWARDS, Fixed()), ChatEncoder(tokenizer)
    return Examiner(panel, make_eval(**changes), tokenizer, encoder, score, CPU, 4096)


def empty_panel(**parts: Any) -> Any:
    asked = dict.fromkeys(("questions", "idle", "subject", "prompts", "tasks"), [])
    return Panel(**({"text": None, "pairs": None} | asked | parts))


def test_questions_count_equal_replies_and_ends(tokenizer: Tokenizer) -> None:
    questions = [Question([1, 5], reference) for reference in ("Red.", "blue", "green", "dog")]
    sampled, greedy = ["red", "blue...", "gr een", "Dog!"], ["x", "blue", "green", "dog"]
    engine = ScriptedEngine(tokenizer, [sampled + greedy])
    values = make_examiner(tokenizer, empty_panel(questions=questions)).questions(engine).values
    measured = {"qa_exact": [1, 1, 0, 1], "stops_frac": [1, 0, 1, 1], "qa_exact_greedy": [0, 1, 1, 1]}
    assert values == measured | {"qa_exact_by_constant": [1, 0, 0, 0]}
    assert engine.greedy == [[False] * 4 + [True] * 4]  # one call: every question is read once
    assert len(set(engine.keys[0])) == 4  # a seed per row, the same for every model
    again = ScriptedEngine(tokenizer, [sampled + greedy])
    make_examiner(tokenizer, empty_panel(questions=questions)).questions(again)
    assert again.keys == engine.keys


def test_a_reply_is_its_answer_without_thinking(tokenizer: Tokenizer) -> None:
    questions = [Question([1, 5], "Red.")] * 3
    engine = ScriptedEngine(tokenizer, [["<think>hm</think>\nred", "red<think>hm</think>", "<think>red"] * 2])
    assert make_examiner(tokenizer, empty_panel(questions=questions)).questions(engine).values["qa_exact"] == [1, 1, 0]


def test_rewards_come_with_their_terms(tokenizer: Tokenizer) -> None:
    tasks = [make_task(tokenizer, "a", []), make_task(tokenizer, "b", [], open_thinking=True)]
    engine = ScriptedEngine(tokenizer, [["a good answer", "good thoughts</think>..."]])
    # </think> as text is no control token here; parse_turn reads text, so it closes the block all the same
    values = make_examiner(tokenizer, empty_panel(prompts=tasks)).rewards(engine).values
    assert values["reward_term_length"] == [0.5, -0.25] and values["reward_term_unfinished"] == [0, -0.75]
    assert values["reward_term_model"] == [0.25, 0.25] and values["reward_term_thinking"] == [0, -0.625]
    assert values["reward_mean"] == pytest.approx([0.75, -1.375])
    assert len(engine.keys) == 1  # single turns


def test_tools_count_final_answers_and_valid_calls(tokenizer: Tokenizer) -> None:
    tools = [tool_schema("calculate_math", "en")]
    tasks = [make_task(tokenizer, "6*7 and 2+3?", ["42", "5"], tools=tools) for _ in range(5)]
    call = '<call>{{"name": "calculate_math", "arguments": {{"expression": "{}"}}}}</call>'.format
    first = [call("6*7") + call("2+3"), call("6*7") + call("2+3"), "42 and 5", call("6*"), call("6*7") + "<call>no json</call>"]
    second = ["42 and 5", "42 only", "42 and 5", "42 and 5..."]  # the third task is done already
    engine = ScriptedEngine(tokenizer, [first + ["5, 42"] * 5, second])
    values = make_examiner(tokenizer, empty_panel(tasks=tasks)).tools(engine).values
    assert values["tool_success"] == [1, 0, 1, 1, 0]  # one item missing; cut before its end
    assert values["tool_valid_frac"] == [1, 1, 0, 0, 0]  # no call at all; a failed one; a malformed one
    assert values["tool_success_greedy"] == [1] * 5
    assert engine.greedy == [[False] * 5 + [True] * 5, [False] * 4]


def test_tool_success_is_told_apart_by_the_number_of_tools_offered(tokenizer: Tokenizer) -> None:
    one = [tool_schema("calculate_math", "en")]
    three = [*one, tool_schema("unit_converter", "en"), tool_schema("get_current_time", "en")]
    tasks = [make_task(tokenizer, "6*7?", ["42"], tools=tools) for tools in (one, three, one, three, three)]
    replies = ["42", "41", "41", "42", "42"]  # sampled, then greedy
    values = make_examiner(tokenizer, empty_panel(tasks=tasks)).tools(ScriptedEngine(tokenizer, [["x"] * 5 + replies])).values
    assert values["tool_success_greedy"] == [1, 0, 0, 1, 1]
    assert {name: rows for name, rows in values.items() if name.startswith(OFFERED) and BASELINE not in name} == {
        f"{OFFERED}1": [1, 0],
        f"{OFFERED}3": [0, 1, 1],
    }


def test_chance_is_what_a_constant_and_an_echo_earn(tokenizer: Tokenizer) -> None:
    """Of five tasks two expect 42; the question of a third holds what is expected; a text stays for 晴 whatever is asked."""
    one, two = [tool_schema("calculate_math", "en")], [tool_schema("calculate_math", "en"), tool_schema("unit_converter", "en")]
    asked = [("6*7?", ["42"], one), ("7*6?", ["42"], two), ("say 5", ["5"], one), ("2+3?", ["5", "2+3"], two), ("?", ["晴"], one)]
    tasks = [make_task(tokenizer, text, gt, tools=tools) for text, gt, tools in asked]
    values = make_examiner(tokenizer, empty_panel(tasks=tasks)).tools(ScriptedEngine(tokenizer, [["x"] * 10])).values
    nothing = [0.0] * 5
    assert {name: rows for name, rows in values.items() if BASELINE in name} == {
        "tool_success_by_constant": [1, 1, 0, 0, 0],
        "tool_success_by_echo": [0, 0, 1, 0, 0],
        "tool_earned_by_constant": nothing,  # earns nothing without a tool's result
        "tool_earned_by_echo": nothing,
        "tool_valid_frac_by_constant": nothing,
        "tool_valid_frac_by_echo": nothing,
        f"{OFFERED}1_by_constant": [1, 0, 0],
        f"{OFFERED}1_by_echo": [0, 1, 0],
        f"{OFFERED}2_by_constant": [1, 0],
        f"{OFFERED}2_by_echo": [0, 0],
    }
    questions = [Question([1, 5], reference) for reference in ("Red.", "blue", "Blue!", "green")]
    assert exact_baselines("qa_exact", questions) == {"qa_exact_by_constant": [0, 1, 1, 0]}
    nobody = make_examiner(tokenizer, empty_panel()).tools(ScriptedEngine(tokenizer, [[]])).values
    assert not any(nobody.values()) and exact_baselines("qa_exact", []) == {"qa_exact_by_constant": []}
    said = chance_of({"full_sft": values | exact_baselines("qa_exact_tools", questions), "reward": {BY_LENGTH: [1.0, 0.5]}})
    same, echo = "by always the same answer, the most frequent one", "by repeating the question"
    assert said["tool_success"] == said["tool_success_greedy"] == f"0.400 {same}; 0.200 {echo}"
    assert said[f"{OFFERED}2"] == f"0.500 {same}; 0.000 {echo}" and said["tool_earned"] == f"0.000 {same}; 0.000 {echo}"
    assert said["qa_exact_tools_greedy"] == f"0.500 {same}" and "qa_exact_greedy" not in said
    assert said["preference_accuracy"] == "0.750 by length (always the shorter); 0.500 by position; 0 by equal scores"
    assert chance_of({"pretrain": {"bits": [1.0], "qa_exact_by_constant": []}}) == {}


def test_greedy_replies_are_compared_with_the_reference(tokenizer: Tokenizer) -> None:
    questions = [Question([1, 5], reference) for reference in ("Red.", "blue")]
    engine = ScriptedEngine(tokenizer, [["red", "Blue!..."]])
    assert make_examiner(tokenizer, empty_panel()).exact_greedy(engine, questions) == [1, 1]
    assert engine.greedy == [True]


def test_a_malformed_call_is_not_forgotten_when_nobody_answered_it() -> None:
    bad = parse_turn("<tool_call>no json</tool_call>", open_thinking=False)
    good = parse_turn('<tool_call>{"name": "f", "arguments": {}}</tool_call>', open_thinking=False)
    answered = [[ToolResult("{}", is_error=False)]]

    def trajectory(*turns: Any) -> Trajectory:
        return Trajectory([1], [2], [True], [0.0], [Turn("", turn) for turn in turns], answered, StopReason.MAX_TURNS)

    assert calls_valid(trajectory(good, good)) and not calls_valid(trajectory(good, bad))


# --- real models on a real panel


def make_repository(folder: Path) -> Tokenizer:
    """Everything that stage eval reads, tiny."""
    tokenizer = make_tokenizer(folder / "data" / "tokenizer")
    make_set(folder / "data", "pretrain", documents(12), tokenizer)
    questions = [user(f"0123456789 {n} " * 60) for n in range(16)]
    long = [{"chosen": [question, assistant("x")], "rejected": [question, assistant("y")]} for question in questions]
    make_set(folder / "data", "dpo", pairs(16) + long, tokenizer, max_seq_len=2000)
    make_set(folder / "data", "lora", [{"conversations": [user(f"who {n}"), assistant(f"{n}")]} for n in range(16)], tokenizer)
    make_set(folder / "data", "rlaif", prompts(40), tokenizer)
    system = {"role": "system", "content": "", "tools": [tool_schema("calculate_math", "en")]}
    tasks = [{"conversations": [system, user(f"{n}+1?"), assistant("")], "gt": [str(n + 1)]} for n in range(12)]
    tasks += [{"conversations": [system, user(f"no answer {n}"), assistant("")], "gt": []} for n in range(12)]
    make_set(folder / "data", "agent", tasks, tokenizer)
    (folder / "data" / "code").mkdir()
    (folder / "data" / "code" / "eval.json").write_text("{}", encoding="utf-8")
    for seed, name in enumerate(MODELS):
        save_policy(folder, name, tokenizer, seed=seed)
    return tokenizer


def save_policy(folder: Path, name: str, tokenizer: Tokenizer, *, seed: int) -> None:
    model = make_model(tokenizer, seed=seed, sharpness=4.0, max_position_embeddings=1024)
    path = folder / "checkpoints" / f"{name}.pth"
    if name == "reward":
        reward = RewardModel.from_causal_lm(model, seed=1)
        meta = model_meta("reward", model.config, tokenizer.digest, score={"offset": 0.0, "scale": 1.0})
        save_model(path, reward.state_dict(), meta)
    elif name == "lora":
        add_lora(model, rank=2, alpha=4.0, targets=["q_proj"], seed=seed)
        with torch.no_grad():
            for name_, tensor in lora_state_dict(model).items():
                if name_.endswith("B.weight"):
                    tensor += 0.5
        meta = lora_meta(model.config, tokenizer.digest, rank=2, alpha=4.0, targets=["q_proj"])
        save_model(path, lora_state_dict(model), meta)
    else:
        save_model(path, model.state_dict(), model_meta("causal_lm", model.config, tokenizer.digest))


DEPS = [f"data/encoded/{name}" for name in ("pretrain", "dpo")] + [
    f"data/prepared/{name}" for name in ("lora", "dpo", "rlaif", "agent")
]
DEPS += ["data/tokenizer", *(f"checkpoints/{name}.{end}" for name in MODELS for end in ("pth", "json"))]


@pytest.fixture(scope="module")
def params(root: Path) -> Params:
    loaded = load_params(root / "profiles" / "micro.yaml")
    runtime = loaded.runtime.model_copy(update={"device": "cpu", "dtype": "float32", "threads": 1})
    reward = loaded.reward.model_copy(update={"external": None})
    return loaded.model_copy(
        update={"eval": make_eval(panel_rows=2, max_new_tokens=6), "rewards": REWARDS, "runtime": runtime, "reward": reward}
    )


@pytest.fixture
def measured_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were measured rather than read from the cache."""
    names: list[str] = []
    original = examiner_module.measure_one

    def spy(name: str, *args: Any) -> Examination:
        names.append(name)
        return original(name, *args)

    monkeypatch.setattr(examiner_module, "measure_one", spy)
    return names


def test_only_changed_models_are_measured(
    tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch, measured_names: list[str]
) -> None:
    tokenizer = make_repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def measure(changed: Params = params) -> tuple[dict[str, Examination], list[str]]:
        measured_names.clear()
        declared = {"eval": changed.eval.model_dump(), "rewards": {"length": changed.rewards.length.model_dump()}}
        examined = measure_all(changed, DEPS, declared, tmp_path / "cache", announce=said.append)
        return examined, list(measured_names)

    first, names = measure()
    assert names == list(MODELS) == list(first) and [line.partition(":")[0] for line in said] == names
    assert measure() == (first, [])
    assert len(said) == len(MODELS)  # nothing is announced that does not happen
    everything = {"bits", "bytes", "preference_accuracy", "qa_exact", "qa_exact_greedy", "stops_frac", "reward_mean"}
    everything |= {BY_LENGTH, "tool_success", "tool_success_greedy", "tool_earned", "tool_valid_frac", f"{OFFERED}1"}
    everything |= {"qa_exact_tools_greedy", "subject_exact_greedy"}
    everything |= {f"{name}{BASELINE}constant" for name in ("qa_exact", "qa_exact_tools", "subject_exact")}
    tool_metrics = ("tool_success", "tool_earned", "tool_valid_frac", f"{OFFERED}1")
    everything |= {f"{name}{BASELINE}{rule}" for name in tool_metrics for rule in ("constant", "echo")}
    for name, examined in first.items():
        wanted = {"preference_accuracy", BY_LENGTH} if name == "reward" else everything
        assert {key for key in examined.values if not key.startswith("reward_term_")} == wanted
        assert {sample["task"] for sample in examined.samples} == (
            set() if name == "reward" else {"question", "prompt", "tool task"}
        )
    assert first["lora"].values["bits"] != first["full_sft"].values["bits"] != first["pretrain"].values["bits"]

    save_policy(tmp_path, "grpo", tokenizer, seed=50)
    second, names = measure()
    assert names == ["grpo"] and second["grpo"] != first["grpo"]
    assert {name: examined for name, examined in second.items() if name != "grpo"} == {
        k: v for k, v in first.items() if k != "grpo"
    }
    save_policy(tmp_path, "full_sft", tokenizer, seed=51)
    assert measure()[1] == ["full_sft", "lora"]  # adapters stand on it
    save_policy(tmp_path, "reward", tokenizer, seed=52)
    assert measure()[1] == list(MODELS)  # rewards of all are its scores
    (tmp_path / "data" / "code" / "eval.json").write_text('{"a": 1}', encoding="utf-8")
    assert measure()[1] == list(MODELS)
    other = params.model_copy(update={"eval": make_eval(panel_rows=2, max_new_tokens=6, seed=4)})
    assert measure(other)[1] == list(MODELS) and measure(params)[1] == []
    wider = params.model_copy(update={"eval": params.eval.model_copy(update={"confidence": 0.5})})
    assert measure(wider)[1] == []  # intervals are computed from the rows


def test_the_panel_holds_what_fits_and_can_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = make_model(tokenizer, max_position_embeddings=1024).config
    said: list[str] = []
    panel = open_panel(make_eval(panel_rows=3), tokenizer, config, PRESET_TOOLS, said.append)
    assert (len(panel.questions), len(panel.idle), len(panel.subject), len(panel.prompts)) == (3, 3, 3, 3)
    assert panel.size() == 12 + len(panel.tasks)
    assert 0 < len(panel.tasks) <= 3 and all(task.gt for task in panel.tasks)  # a task without answers is always solved
    whole = open_panel(make_eval(panel_rows=99), tokenizer, config, PRESET_TOOLS, said.append)
    assert [task.prompt_ids for task in panel.prompts] == [task.prompt_ids for task in whole.prompts[:3]]
    assert {task.open_thinking for task in whole.prompts} == {False, True}
    assert {task.open_thinking for task in whole.tasks} == {False}

    lengths = sorted(len(question.prompt_ids) for question in whole.questions)
    assert len(lengths) == 8 and 700 < lengths[-1] < 1000
    exact = open_panel(
        make_eval(panel_rows=99, max_new_tokens=1024 - lengths[-1]), tokenizer, config, PRESET_TOOLS, said.append
    ).questions
    tight = open_panel(
        make_eval(panel_rows=99, max_new_tokens=1025 - lengths[-1]), tokenizer, config, PRESET_TOOLS, said.append
    ).questions
    assert len(exact) == 8 > len(tight) > 0

    assert said == []
    longest = max(len(task.prompt_ids) for task in whole.prompts)
    kept = open_held_out("rlaif", make_eval(), tokenizer, longest - 1, 0.5, said.append)
    assert len(kept) < len(whole.prompts) and len(said) == 1
    assert "held-out rows of rlaif dropped" in said[0] and ".jsonl:" in said[0]


def test_logprob_metrics_are_those_of_single_rows(tmp_path: Path) -> None:
    tokenizer = make_repository(tmp_path)
    folder = tmp_path / "data" / "encoded"
    text = SupervisedBatches(folder / "pretrain" / "held_out.arrow", batch_size=2, seed=1, tokenizer=tokenizer)
    both = PairBatches(folder / "dpo" / "held_out.arrow", batch_size=3, seed=1, tokenizer=tokenizer)
    model = make_model(tokenizer, sharpness=4.0, max_position_embeddings=1024)
    examiner = make_examiner(tokenizer, empty_panel(text=text, pairs=both))

    def logprob(model: CausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
        end = int((labels != -100).nonzero().max()) + 1
        logprobs = torch.log_softmax(model(ids[None, :end])[0], dim=-1)
        return sum(float(logprobs[t, labels[t]]) for t in range(end) if labels[t] != -100)

    with torch.no_grad():
        values = examiner.text_values(model)
        expected = [
            -logprob(model, ids, labels) / math.log(2)
            for batch in text.in_order()
            for ids, labels in zip(batch.input_ids, batch.labels, strict=True)
        ]
        assert values["bits"] == pytest.approx(expected, rel=1e-5) and sum(values["bytes"]) == sum(
            size for batch in text.in_order() for size in batch.row_bytes
        )
        wins = []
        for batch in both.in_order():
            totals = [logprob(model, *row) for row in zip(batch.input_ids, batch.labels, strict=True)]
            wins += [float(totals[pair] > totals[pair + batch.num_pairs]) for pair in range(batch.num_pairs)]
        shorter = []
        for batch in both.in_order():
            lengths = [sum(label != -100 for label in row) for row in batch.labels.tolist()]
            sides = zip(lengths[: batch.num_pairs], lengths[batch.num_pairs :], strict=True)
            shorter += [1.0 if chosen < rejected else 0.5 if chosen == rejected else 0.0 for chosen, rejected in sides]
        measured = examiner.preference_values(model)
        assert measured[BY_LENGTH] == shorter and measured["preference_accuracy"] == wins and 0 < sum(wins) < len(wins)
        reward = RewardModel.from_causal_lm(model, seed=1)
        scored = examiner.score_values(RewardModelling(reward, CPU)).values
        scores = scored["preference_accuracy"]
        assert len(scored[BY_LENGTH]) == len(shorter)
    assert len(scores) == len(wins) and set(scores) <= {0.0, 1.0}


def test_episodes_end_at_the_window_instead_of_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns of 12 tokens and their tool results do not fit behind a prompt that nearly fills the window."""
    tokenizer = make_repository(tmp_path)
    monkeypatch.chdir(tmp_path)
    panel = open_panel(make_eval(), tokenizer, make_model(tokenizer, max_position_embeddings=1024).config, PRESET_TOOLS, print)
    window = max(len(task.prompt_ids) for task in panel.tasks) + 50
    call = '<call>{"name": "calculate_math", "arguments": {"expression": "1"}}</call>'
    examiner = make_examiner(tokenizer, panel, max_new_tokens=100)
    examiner.window = window
    engine = ScriptedEngine(tokenizer, [[call] * len(panel.tasks)] * 3)
    trajectories = examiner.episodes(engine, panel.tasks, "tool", greedy=False, max_turns=3)
    assert all(trajectory.stop is StopReason.CONTEXT for trajectory in trajectories) and len(engine.keys) == 1


# --- cache and report


def test_a_measurement_is_kept_until_something_changes(tmp_path: Path) -> None:
    calls: list[str] = []

    def measure(name: str) -> Examination:
        calls.append(name)
        return Examination({"qa_exact": [1.0, float(len(calls))]}, [{"prompt": "p", "score": 1.0}])

    folder = tmp_path / "a" / "cache"
    expected = Examination({"qa_exact": [1.0, 1.0]}, [{"prompt": "p", "score": 1.0}])
    first = cached(folder, "digest 1", lambda: measure("one"))
    assert cached(folder, "digest 1", lambda: measure("again")) == first == expected
    assert cached(folder, "digest 2", lambda: measure("two")).values == {"qa_exact": [1.0, 2.0]}
    assert calls == ["one", "two"] and len(list(folder.iterdir())) == 2
    for path in folder.iterdir():  # a disk flips a digit
        path.write_text(path.read_text().replace("1.0]", "0.0]"))
    calls.clear()
    assert cached(folder, "digest 1", lambda: measure("again")) == expected and calls == ["again"]
    for torn in ("", '{"values": {"qa_exact": [1.0', '{"qa_exact": [1.0]}', "\udcff"):
        for path in folder.iterdir():
            path.write_bytes(torn.encode("utf-8", errors="surrogateescape"))
        calls.clear()
        cached(folder, "digest 1", lambda: measure("after damage"))
        assert calls == ["after damage"]
        assert cached(folder, "digest 1", lambda: measure("again")) == expected


ESTIMATES = {
    "full_sft": {"qa_exact": Estimate(0.5, 0.4, 0.6, 9), "reward_mean": Estimate(1.0, 0.5, 1.5, 8)},
    "grpo": {"qa_exact": Estimate(0.75, 0.7, 0.8, 9), "reward_term_length": Estimate(-0.25, -0.5, 0.0, 8)},
}


def test_the_tree_holds_values_bounds_and_counts() -> None:
    tree = metrics_tree(ESTIMATES)
    assert tree["full_sft"]["qa_exact"] == 0.5 and tree["full_sft"]["qa_exact_low"] == 0.4
    assert tree["grpo"] == {
        **{"qa_exact": 0.75, "qa_exact_low": 0.7, "qa_exact_high": 0.8, "qa_exact_n": 9.0},
        **{"reward_term_length": -0.25, "reward_term_length_low": -0.5, "reward_term_length_high": 0.0},
        "reward_term_length_n": 8.0,
    }


def test_the_report_reads_as_tables() -> None:
    verdicts = {"grpo": {"qa_exact": "better", "reward_mean": "no clear difference", "stops_frac": "worse"}}
    text = markdown(ESTIMATES, verdicts, PARENTS, 0.95, ["curves/grpo.png"], {})  # type: ignore[arg-type]
    lines = text.splitlines()
    assert "| model | qa_exact | reward_mean |" in lines
    assert "| full_sft | 0.500 [0.400, 0.600] n=9 | 1.000 [0.500, 1.500] n=8 |" in lines
    assert "| grpo | 0.750 [0.700, 0.800] n=9 | - |" in lines
    assert "| model | length |" in lines and "| grpo | -0.250 [-0.500, 0.000] n=8 |" in lines
    assert "| grpo | full_sft | qa_exact | stops_frac | reward_mean |" in lines
    assert "![grpo](curves/grpo.png)" in lines and "95% intervals" in text
    assert "99.9% intervals" in markdown(ESTIMATES, verdicts, PARENTS, 0.999, [], {})  # type: ignore[arg-type]
    widths = {line.count("|") for line in lines if line.startswith("| model | qa_exact") or line.startswith("| grpo | 0.750")}
    assert len(widths) == 1


def write_curves(folder: Path) -> None:
    folder.mkdir()
    for stage, keys in CURVES.items():
        rows = [",".join(["step", *keys])]
        rows += [",".join([str(step), *("" if step % 3 == place else f"{step / (place + 1)}" for place in range(len(keys)))])
                 for step in range(5)]  # fmt: skip
        (folder / f"{stage}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_curves_are_pictures_with_the_same_bytes_every_time(tmp_path: Path) -> None:
    write_curves(tmp_path / "plots")
    source = tmp_path / "plots" / "ppo.csv"
    pictures = []
    for name in ("one", "two"):
        draw_curves(source, tmp_path / name / "ppo.png", CURVES["ppo"])
        pictures.append((tmp_path / name / "ppo.png").read_bytes())
    assert pictures[0] == pictures[1] and pictures[0].startswith(b"\x89PNG")
    draw_curves(source, tmp_path / "few.png", ["reward/mean", "nowhere"])  # a key that a stage does not have
    assert (tmp_path / "few.png").read_bytes() != pictures[0]
    source.write_text("step,reward/mean\n", encoding="utf-8")
    draw_curves(source, tmp_path / "none.png", CURVES["ppo"])
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")


def test_the_files_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_curves(tmp_path / "plots")
    drawn = {stage: CURVES[stage] for stage in ("lora", "grpo")}
    monkeypatch.setattr(report_module, "CURVES", drawn)
    rows = {
        "bits": [8.0, 6.0],
        "bytes": [4.0, 4.0],
        "qa_exact": [1.0, 0.0],
        "reward_mean": [0.1, 1 / 3],
        "reward_term_a": [0.0, 1.0],
        "qa_exact_by_constant": [0.0, 1.0],
        f"{OFFERED}2": [1.0],
        f"{OFFERED}2_by_echo": [0.0],
    }
    measured: dict[str, RowValues] = {
        "pretrain": rows,
        "full_sft": rows,
        "reward": {"preference_accuracy": [1.0, 1.0], BY_LENGTH: [0.5, 0.0]},
    }
    written = []
    for name in ("one", "two"):
        folder = tmp_path / name
        paths = {"metrics": folder / "metrics" / "eval.json", "folder": folder / "reports", "plots": tmp_path / "plots"}
        estimates = write_report(measured, make_eval(), **paths)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    assert written[0] == written[1]
    assert set(written[0]) == {"metrics/eval.json", "reports/eval.md", *(f"reports/curves/{stage}.png" for stage in drawn)}
    tree = json.loads(written[0]["metrics/eval.json"])
    assert set(tree) == {"pretrain", "full_sft", "reward"} and tree["pretrain"]["bits_per_byte"] == 1.75
    assert tree["full_sft"]["reward_mean"] == 0.216667  # six decimals
    assert estimates["reward"]["preference_accuracy"] == proportion([True, True], 0.95)
    report = written[0]["reports/eval.md"].decode()
    chance = [line for line in report.splitlines() if line.startswith("| *chance* |")]
    assert chance == [
        "| *chance* | - | 0.500 by always the same answer, the most frequent one | "
        "0.750 by length (always the longer); 0.500 by position; 0 by equal scores | - |",
        "| *chance* | 0.000 by repeating the question |",
    ]
    assert not any("_by_" in name for own in tree.values() for name in own)
    assert "| full_sft | pretrain | - | - | bits_per_byte, qa_exact, reward_mean |" in report
    assert all(f"- `{name}`: {METRICS[name][0]}" in report for name in ("bits_per_byte", "qa_exact", "preference_accuracy"))


def test_every_metric_is_documented(root: Path) -> None:
    text = (root / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}`" not in text] == []
