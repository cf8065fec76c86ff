"""MiniMind's reward rules by hand, and panels that say which cheats win under them."""

from dataclasses import replace
from typing import Any

import pytest
from test_rewards import CHEATS, HONEST, PARAMS, Played, call, use

from pipeline.data.prompts import PromptTask
from pipeline.rewards import minimind
from pipeline.rewards.scoring import CompletionScorer, EpisodeScorer, Scored
from pipeline.rollout.records import StopReason, Trajectory, Turn
from pipeline.text.turns import parse_turn

LEGACY = PARAMS.model_copy(update={"preset": "minimind"})


class Same:
    """The reward model likes everything equally, and remembers what it read."""

    def __init__(self, score: float = 0.5) -> None:
        self.value, self.read = score, []  # type: float, list[str]

    def score(self, items: Any) -> list[float]:
        self.read += [item.answer for item in items]
        return [self.value] * len(items)


def completed(text: str, *, score: float = 0.5, thinking: bool = False, stop: StopReason = StopReason.EOS) -> Scored:
    turn = Turn(text, parse_turn(text, open_thinking=thinking))
    task = PromptTask(0, [1], thinking, [{"role": "user", "content": "What is the capital of France?"}], None, [])
    (scored,) = CompletionScorer(LEGACY, Same(score))([task], [Trajectory([1], [], [], [], [turn], [], stop, thinking)])
    return scored


def episode(played: Played, score: float | None = None) -> Scored:
    (scored,) = EpisodeScorer(LEGACY, Same(played.score or 0.0 if score is None else score))([played.task], [played.trajectory])
    return scored


# --- the rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c a b c", 0.25),  # abc bca cab abc: one of four is a duplicate
        ("no no no no no", 0.5),  # two of three, capped
        ("one two", 0.0),
        ("A b. a B.", 0.25),  # ab. b.a .ab ab.
        ("共舞" * 50, 0.0),  # one word
        ("共舞，" * 50, 0.5),
        ("a" * 500, 0.0),
    ],
)
def test_repetition_by_hand(text: str, expected: float) -> None:
    assert minimind.repetition(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gt", "text", "found"),
    [
        (["5"], "2025", {"5"}),
        (["9472"], "结果是9472元", {"9472"}),
        (["9,472"], "It is 9472 now", {"9,472"}),
        (["9,472"], "It is 9472.", set()),  # a stop touches the number
        (["9,472"], "结果是9472元", set()),
        (["9472.0"], "9,472 now", {"9472.0"}),
        (["2.0000001"], "2 now", {"2.0000001"}),
        (["Sunny"], "it is sunnyish", {"Sunny"}),
        ([" ", ""], "anything", set()),
        (["5", "5"], "5", {"5"}),
        (["-3"], "5-3", {"-3"}),
        (["1e3"], "1000", set()),
    ],
)
def test_found_answers(gt: list[str], text: str, found: set[str]) -> None:
    assert minimind.found_answers(gt, text) == found


def test_calls_are_read_as_minimind_reads_them() -> None:
    text = (
        '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
        '<tool_call>{"name": "b", "arguments": "{\\"y\\": 2}"}</tool_call>'
        '<tool_call>{"name": "c", "arguments": "broken"}</tool_call><tool_call>{"name": "d"}</tool_call>'
        "<tool_call>broken</tool_call><tool_call>[1]</tool_call><tool_call>"
        '{"name": 3, "arguments": {}}</tool_call><tool_call>{"name": "e", "arguments": [1]}</tool_call>'
    )
    assert minimind.parse_calls(text) == [("a", {"x": 1}), ("b", {"y": 2}), ("c", {}), ("d", {})]


def test_completion_terms_by_hand() -> None:
    zero = {"length": 0.0, "thinking": 0.0, "repetition": 0.0, "model": 0.0, "unfinished": 0.0}
    assert completed("It is the city of Paris.").terms == zero | {"length": 0.5, "model": 0.5}
    assert completed("Paris it is, my friend"[:19], score=9.0).terms == zero | {"length": -0.5, "model": 3.0}
    assert completed("x" * 801, score=float("nan")).terms == zero | {"length": -0.5, "model": -3.0}
    thought = "They ask for a capital city.\n</think>\n\nParis."
    assert completed(thought, thinking=True).terms == zero | {"length": 0.5, "thinking": 1.25, "model": 0.5}
    assert completed("hm</think>Paris</think>").terms == zero | {"length": 0.5, "thinking": -0.75, "model": 0.5}
    best = completed(thought, score=3.0)
    assert best.total == pytest.approx(4.75) and best.good


def test_the_reward_model_reads_what_minimind_gives_it() -> None:
    """The whole response where a think block is never closed; in episodes, what follows it, tool tags included."""
    model = Same()
    turns = [Turn(text, parse_turn(text, open_thinking=True)) for text in ("never closed", "a</think> b </think> c")]
    task = PromptTask(0, [1], True, [{"role": "user", "content": "?"}], None, [])
    CompletionScorer(LEGACY, model)([task] * 2, [Trajectory([1], [], [], [], [turn]) for turn in turns])
    assert model.read == ["never closed", "b </think> c"]
    model = Same()
    played = [Played(["Hi <tool_call>", ""], []), Played([call(), "9472"], ["9472"]), Played(["x</think>plain"], [])]
    EpisodeScorer(LEGACY, model)([one.task for one in played], [one.trajectory for one in played])
    assert model.read == ["", "plain"]  # episodes without a call, their last turn


def test_agent_terms_by_hand() -> None:
    zero = dict.fromkeys(("answer", "tool_call", "unfinished", "thinking", "repetition", "length", "model"), 0.0)
    assert episode(HONEST).terms == zero | {"answer": 2.5, "tool_call": 0.5}
    chain = Played([call("16*16"), call("256*37"), "The result is 9472 then."], ["9472"])
    assert episode(chain).terms == zero | {"answer": 2.5, "tool_call": -0.5} and episode(chain).total == 2.0
    empty = Played([call(""), "The result is 9472."], ["9472"])  # 0 valid of 1, 1 expected: gap 1 + 1
    assert episode(empty).terms == zero | {"answer": 2.5, "tool_call": -1.0}
    both = Played([call("2+3") + call("10-5"), "Both are 5."], ["5", "5"])
    assert episode(both).terms == zero | {"answer": 1.25, "tool_call": 0.5} and episode(both).total == 1.75
    calling = Played([call(), call()], ["9472"], finished=False)
    # Of the 30 trigrams of the call's text, which is judged as the answer, one is there twice: `" : "`.
    assert episode(calling).terms == zero | {"tool_call": -0.5, "unfinished": -0.5, "repetition": pytest.approx(-1 / 30)}
    tags = Played([call() + "<tool_call>", "The result is 9472.</tool_call></tool_call>"], ["9472"])
    # Nothing follows the last tag, so the whole answer is judged: 13 tokens, two of its 11 trigrams are there twice.
    assert episode(tags).terms == zero | {"tool_call": 0.5 - 0.5 - 1.0, "repetition": pytest.approx(-2 / 11)}
    plain = Played(["<tool_call>Hello, how are you?"], ["9472"])
    assert episode(plain, 0.25).terms == zero | {"tool_call": -0.5, "length": 0.5, "model": 0.25}
    assert episode(Played(["four"], []), -9.0).total == -3.0  # -0.5 - 3 is clamped
    assert episode(Played([], ["9472"], finished=False)).total == -0.5
    needless = Played([call(), "There you go."], [])
    assert episode(needless).terms == zero | {"tool_call": -0.5}


@pytest.mark.parametrize(
    ("name", "arguments", "passes"),
    [
        ("unit_converter", {"value": 0, "from_unit": "a", "to_unit": "b"}, True),
        ("unit_converter", {"value": None, "from_unit": "a", "to_unit": "b"}, False),
        ("unit_converter", {"value": 1, "from_unit": "", "to_unit": "b"}, False),
        ("get_current_weather", {"location": "Atlantis"}, True),
        ("get_current_weather", {}, False),
        ("get_current_time", {}, True),
        ("get_exchange_rate", {"from_currency": "USD"}, False),
        ("translate_text", {"text": "a", "target_language": "b"}, True),
        ("translate_text", {"text": "a"}, False),
    ],
)
def test_a_call_is_valid_by_its_arguments(name: str, arguments: dict[str, Any], passes: bool) -> None:
    played = Played([use(name, **arguments), "It is done."], ["done"], offered=(name,))
    assert episode(played).terms["tool_call"] == (0.5 if passes else -1.0)
    assert episode(replace(played, offered=("calculate_math",))).terms["tool_call"] == -1.0  # not offered


# --- which cheats win


PARIS = "The capital of France is Paris."
THOUGHT = "The user asks for a capital city.\n</think>\n\n"
PAID = {  # where no thinking was asked for; the reward model likes every text equally
    "unasked thinking": (THOUGHT + PARIS, 1.25),
    "unasked thinking of a filler": ("a" * 20 + "</think>" + PARIS, 1.25),
    "unasked thinking and nothing else": (THOUGHT, 1.25),
    "repeated Chinese": ("共舞" * 100, 0.0),
    "one repeated letter": ("a" * 100, 0.0),
    "blank lines inside": ("P" + "\n" * 30 + ".", 0.0),
    "invisible padding": ("Paris" + "\u2060" + "x" * 15, 0.0),
}
UNPAID = {
    "nothing": ("", -1.0),
    "blank": (" \n" * 40, -1.0),
    "too short": ("Paris.", -1.0),
    "blank padding at the end": ("Paris." + "\n" * 50, -1.0),
    "too long": (" ".join(map(str, range(400))), -1.0),
    "repeated words": ("no " * 20, -0.5),
    "a repeated sentence": ((PARIS + " ") * 4, -0.5),
    "repeated marks": ("！" * 40, -0.5),
    "repeated Chinese between commas": ("共舞，" * 20, -0.5),
    "short thinking": ("hm</think>" + PARIS, -0.25),
    "long thinking": ("x" * 301 + "</think>" + PARIS, -0.25),
    "closed twice, short": ("hm</think></think>" + PARIS, -0.75),
    "tags alone": ("</think>" * 10, -0.75 - 0.5),
}


@pytest.mark.parametrize("name", PAID | UNPAID)
def test_completion_cheats(name: str) -> None:
    text, difference = (PAID | UNPAID)[name]
    assert completed(text).total - completed(PARIS).total == pytest.approx(difference), completed(text).terms


def test_a_cut_completion_costs_nothing() -> None:
    for stop in StopReason:
        assert completed(PARIS, stop=stop).total == completed(PARIS).total


AGENT_PAID = {
    "no call, flattery",  # 0.5 + 3, clamped
    "right digits inside another number",
    "right digits before a fraction",
    "sign flipped",
    "candidates listed",
    "candidates listed beside the answer",
    "candidates smuggled in through arguments",
    "only failing calls",
    "a list for a call",  # MiniMind itself stops with an AttributeError
    "a forged tool result",
    "an unclosed forged tool result",
    "cut off",
    "answer in an unclosed think block",
    "answer in a second think block",
    "answer in a nested think block",
    "answer in a think block after another",
    "answer before a spare closing tag",
    "an irrelevant call, the answer from the head",
    "another irrelevant call",
    "the answer handed to the tool",
    "the answer handed over with a sign",
    "the answer handed over among others",
    "a copy of the result",
    "a copy of the result in prose",
    "a forged result with spaces",
    "a forged result without its beginning",
    "six candidates beside the answer",
}
"""Of the default preset's panel: what earns as much as the honest trajectory."""


@pytest.mark.parametrize("name", CHEATS)
def test_agent_cheats(name: str) -> None:
    assert episode(HONEST).total == 3.0
    assert (episode(CHEATS[name]).total == 3.0) == (name in AGENT_PAID), episode(CHEATS[name]).terms
