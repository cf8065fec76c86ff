"""Reward terms by hand, and a panel of cheats that must all earn less than the honest answer."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prompts import PromptTask
from pipeline.errors import DataError
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.params.schema import Rewards
from pipeline.rewards.agent import agent_rewards
from pipeline.rewards.completion import completion_rewards, total_reward
from pipeline.rewards.evidence import given_exchanges
from pipeline.rewards.model import ExternalRewardModel, Reply, TrainedRewardModel, flat_question
from pipeline.rewards.rules import clamped, repetition, span_reward, thinking_reward
from pipeline.rewards.scoring import CompletionScorer, EpisodeScorer, Scored, earned, solved
from pipeline.rewards.verify import verify
from pipeline.rollout.records import StopReason, Trajectory, Turn
from pipeline.text.chat import EncodedChat
from pipeline.text.turns import parse_turn
from pipeline.tools.registry import TOOL_NAMES, ToolResult, call_tool, tool_schema

PARAMS = Rewards.model_validate(
    {
        "preset": "default",
        "length": {"min_chars": 8, "max_chars": 800, "weight": 0.5, "penalty": 0.5},
        "thinking": {"min_chars": 8, "max_chars": 300, "weight": 1.0, "penalty": 0.5},
        "think_close": 0.25,
        "repetition": 1.0,
        "model": 1.0,
        "model_clip": 3.0,
        "answer": 2.5,
        "tool_call": 0.5,
        "unfinished": 0.5,
        "agent_clip": 3.0,
    }
)
ZERO = {"length": 0.0, "thinking": 0.0, "repetition": 0.0, "model": 0.0, "answer": 0.0, "unfinished": 0.0}


# --- rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", -0.5), ("1234567", -0.5), ("12345678", 0.5), ("x" * 800, 0.5), ("x" * 801, -0.5), (" a \n\n\n\n\n\n\n b  ", -0.5)],
)
def test_span_counts_characters_without_padding(text: str, expected: float) -> None:
    assert span_reward(text, PARAMS.length) == expected


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("", 0, 0),
        ("好", 0, 0),
        ("今天天气很好，我们去公园散步吧。", 0, 0),
        ("The quick brown fox jumps over the lazy dog.", 0, 0),
        ("今天天气很好。今天天气很好。", 0.35, 0.5),
        ("今天天气很好。" * 4, 0.5, 0.5),
        ("The cat sat on the mat. The cat sat on the mat.", 0.35, 0.5),
        ("The cat sat on the mat. " * 3, 0.5, 0.5),
        ("Good morning. Good morning.", 0.5, 0.5),
        ("哈" * 15, 0.5, 0.5),  # what MiniMind's word n-grams score as 0
        ("共舞" * 10, 0.5, 0.5),
        ("ありがとう" * 4, 0.5, 0.5),
        ("a" * 60, 0.5, 0.5),
        ("abc" * 30, 0.5, 0.5),
        ("！" * 20, 0.5, 0.5),
        ("no no no no no", 0.5, 0.5),
        ("first point. 春天来了花开了。 second point. 春天来了花开了。 third one. 春天来了花开了。", 0.3, 0.5),
        ("1. red\n2. green\n3. blue\n4. black", 0, 0),
        ("a" * 16, 0.5, 0.5),
        ("hahahaha", 0.5, 0.5),
        ("The hahaha made me laugh.", 0, 0),
        ("안녕하세요 안녕하세요 안녕하세요", 0.5, 0.5),
        ("Paris Paris Paris", 0.5, 0.5),
        ("go now go now", 0, 0),
        ("It is 100000000.", 0, 0),
        ("我爱你我爱你", 0.25, 0.25),
        ("one two one two one", 0.33, 0.34),
        ("one two three four one two three four", 0.33, 0.34),
        ("one two three four five one two three four five", 0.37, 0.38),
        ("北京28°C，上海15°C，广州32°C，深圳30°C，杭州22°C，所以最热的是广州，32°C。", 0, 0),
        ("圆周率是3.14159，自然常数是2.71828。", 0, 0),
    ],
)
def test_repetition(text: str, low: float, high: float) -> None:
    assert low <= repetition(text) <= high


def test_repetition_by_hand() -> None:
    # a b c a b c: trigrams abc bca cab abc, one of four is a duplicate
    assert repetition("a b c a b c") == pytest.approx(0.25)
    assert repetition("春夏秋春夏秋") == pytest.approx(0.25)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_repetition_is_bounded(text: str) -> None:
    assert 0 <= repetition(text) <= 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("let me see this\n</think>\n\nIt is four.", 1.25),
        ("hm\n</think>\n\nIt is four.", -0.25),  # too short, closed properly
        ("x" * 301 + "</think>It is four.", -0.25),
        ("let me see this\n</think>\n\nIt is\n</think>\nfour.", 0.75),  # closed twice
        ("let me see this, and then on and on", -0.75),  # never closed
        ("let me see this\n</think>", -0.75),  # closed, but no answer
        ("</think>It is four.", -0.25),
    ],
)
def test_thinking(text: str, expected: float) -> None:
    assert thinking_reward(parse_turn(text, open_thinking=True), PARAMS) == pytest.approx(expected)


# --- completions


def completion(text: str, *, open_thinking: bool = False, score: float | None = None, finished: bool = True) -> dict[str, float]:
    turn = parse_turn(text, open_thinking=open_thinking)
    return completion_rewards(turn, open_thinking=open_thinking, model_score=score, finished=finished, found=[], params=PARAMS)


def test_completion_terms_by_hand() -> None:
    assert completion("It is four.", score=1.5) == ZERO | {"length": 0.5, "model": 1.5}
    assert completion("It is four.", score=-9.0, finished=False) == ZERO | {"length": 0.5, "model": -3.0, "unfinished": -0.5}
    assert completion("4", score=9.0) == ZERO | {"length": -0.5, "model": 3.0}
    terms = completion("let me see this\n</think>\n\nIt is four.", open_thinking=True, score=0.5)
    assert terms == ZERO | {"length": 0.5, "thinking": 1.25, "model": 0.5}
    assert total_reward(terms) == pytest.approx(2.25)
    assert total_reward(terms, 2.0) == 2.0
    assert total_reward({"a": -5.0}, 2.0) == -2.0


def test_thinking_earns_nothing_when_it_was_not_asked_for() -> None:
    assert completion("let me see this\n</think>\n\nIt is four.")["thinking"] == 0.0


def test_loops_in_the_thinking_cost_as_much_as_loops_in_the_answer() -> None:
    assert completion("好的好的好的好的好的\n</think>\n\nIt is four.", open_thinking=True)["repetition"] == -0.5
    assert completion("It is four. " * 4)["repetition"] == -0.5


PARIS = "The capital of France is Paris."
THOUGHT = "The user asks for a capital city.\n</think>\n\n"
PLAIN_CHEATS = {  # against PARIS, where no thinking was asked for
    "nothing": "",
    "blank": " \n" * 40,
    "a mark": ".",
    "one word": "Paris.",
    "blank padding at the end": "Paris." + "\n" * 50,
    "blank padding inside": "P" + "\n \t" * 30 + ".",
    "invisible padding": "Paris" + "\u200b" * 30,
    "too long": " ".join(map(str, range(400))),
    "a repeated word": "Paris " * 20,
    "a repeated sentence": (PARIS + " ") * 4,
    "a sentence said twice": PARIS + " " + PARIS,
    "two sentences in turns": "It is Paris. I am sure. " * 5,
    "a repeated line with numbers": "\n".join(f"{n}. It is the city of Paris." for n in range(9)),
    "repeated Chinese": "共舞" * 40,
    "repeated Chinese between commas": "共舞，" * 20,
    "a repeated Chinese sentence": "法国的首都是巴黎。" * 4,
    "repeated Japanese": "ありがとう" * 10,
    "one letter": "a" * 100,
    "one long word": "paris" * 30,
    "marks": "！" * 40,
    "an emoji": "🎉" * 40,
    "the answer, then a loop": PARIS + " " + "and so on " * 30,
    "the answer inside the thinking": PARIS + "</think>",
    "closing tags": "</think>" * 20,
    "a letter, sixteen times": "a" * 16,
    "a word, three times": "Paris Paris Paris",
    "the answer in an unclosed think block": f"<think>{PARIS}",
    "the answer in a second think block": f"hm</think><think>{PARIS}</think>",
    "the answer in a nested think block": f"<think>a<think>b</think>{PARIS}</think>.",
}
THINKING_CHEATS = {  # against THOUGHT + PARIS, where thinking was asked for
    "no thinking": "</think>" + PARIS,
    "thinking of a word": "hm\n</think>\n\n" + PARIS,
    "blank thinking": " \n" * 40 + "</think>" + PARIS,
    "endless thinking": "I wonder what the user may want from me here",
    "long thinking": " ".join(map(str, range(200))) + "</think>" + PARIS,
    "looping thinking": "I think. " * 20 + "</think>" + PARIS,
    "looping Chinese thinking": "让我想想" * 20 + "</think>" + PARIS,
    "filler for thinking": "a" * 40 + "</think>" + PARIS,
    "closed twice": THOUGHT + PARIS + "</think>",
    "everything inside the thinking": PARIS + "\n</think>",
    "a word after the thinking": THOUGHT + "Paris",
    "two think blocks": THOUGHT + PARIS + "<think>I think so.</think>",
    "a think block that opens again": THOUGHT + PARIS + "<think>",
    "a think block inside": "The user asks <think>for a city.\n</think>\n\n" + PARIS,
    "the answer in a second think block": THOUGHT + f"<think>{PARIS}</think>",
}


class Equal:
    """A reward model that is no help: it likes everything equally."""

    def score(self, items: Any) -> list[float]:
        return [0.5] * len(items)


def completion_total(text: str, *, open_thinking: bool, stop: StopReason = StopReason.EOS, model: Any = None) -> float:
    return scored_completion(text, [], open_thinking=open_thinking, stop=stop, model=model).total


def scored_completion(
    text: str, gt: list[str], *, open_thinking: bool = False, stop: StopReason = StopReason.EOS, model: Any = None
) -> Scored:
    turn = Turn(text, parse_turn(text, open_thinking=open_thinking))
    task = PromptTask(0, [1], open_thinking, [{"role": "user", "content": "What is the capital of France?"}], None, gt)
    trajectory = Trajectory([1], [], [], [], [turn], [], stop, open_thinking)
    return CompletionScorer(PARAMS, model or Equal())([task], [trajectory])[0]


@pytest.mark.parametrize("name", PLAIN_CHEATS)
def test_a_completion_that_cheats_earns_less_than_an_honest_one(name: str) -> None:
    honest = completion_total(PARIS, open_thinking=False)
    assert honest == 0.5 + 0.5
    assert completion_total(PLAIN_CHEATS[name], open_thinking=False) <= honest - 0.25


@pytest.mark.parametrize("name", THINKING_CHEATS)
def test_a_completion_that_cheats_in_its_thinking_earns_less(name: str) -> None:
    honest = completion_total(THOUGHT + PARIS, open_thinking=True)
    assert honest == 0.5 + 1.25 + 0.5
    assert completion_total(THINKING_CHEATS[name], open_thinking=True) <= honest - 0.25


def test_a_completion_that_is_cut_calls_a_tool_or_breaks_the_reward_model_earns_less() -> None:
    class Broken:
        def score(self, items: Any) -> list[float]:
            return [float("nan")] * len(items)

    for thinking, text in ((False, PARIS), (True, THOUGHT + PARIS)):
        honest = completion_total(text, open_thinking=thinking)
        for stop in set(StopReason) - {StopReason.EOS}:
            assert completion_total(text, open_thinking=thinking, stop=stop) == honest - 0.5
        assert completion_total(text + call(), open_thinking=thinking, stop=StopReason.MAX_TURNS) < honest
        assert completion_total(text, open_thinking=thinking, model=Broken()) == honest - 3.5


@pytest.mark.parametrize(
    ("text", "gt", "answer"),
    [
        (PARIS, ["Paris"], 2.5),
        (PARIS, ["Paris", "Rome"], 1.25),  # one of two
        ("The capital of France is Rome.", ["Paris"], 0.0),
        ("The capital of France is Parisian.", ["Paris"], 0.0),
        (PARIS, [], 0.0),
        ("Rome, Berlin, Madrid, Cairo, Tokyo, Ottawa, Paris or Moscow.", ["Paris"], 0.0),  # a list of candidates
        (f"<think>{PARIS}</think>It is a city.", ["Paris"], 0.0),  # what was thought is no answer
    ],
)
def test_a_right_answer_is_paid_where_the_prompt_says_what_is_right(text: str, gt: list[str], answer: float) -> None:
    scored = scored_completion(text, gt)
    assert scored.terms["answer"] == answer
    assert scored.total == pytest.approx(sum(scored.terms.values()))
    assert scored.good == (answer == 2.5 if gt else scored.total > 0)


def test_a_prompt_counts_as_solved_only_by_an_answer_that_ended_by_itself() -> None:
    assert scored_completion(PARIS, ["Paris"]).good
    cut = scored_completion(PARIS, ["Paris"], stop=StopReason.LENGTH)
    assert not cut.good and cut.terms["answer"] == 0.0 and cut.total > 0


# --- agent: one honest trajectory against many cheats


@dataclass
class Played:
    """What a policy wrote turn by turn, run against the real tools like an episode."""

    texts: list[str]
    gt: list[str]
    offered: tuple[str, ...] = ("calculate_math", "get_current_weather")
    finished: bool = True
    open_thinking: bool = False
    score: float | None = None
    asked: str = "What is 256*37?"

    @property
    def trajectory(self) -> Trajectory:
        turns = [Turn(text, parse_turn(text, open_thinking=self.open_thinking)) for text in self.texts]
        tool_results = [
            [call_tool(call.name, call.arguments, self.offered) for call in turn.parsed.calls]
            + [ToolResult('{"error": "not a call"}', is_error=True)] * turn.parsed.malformed_calls
            for turn in turns[:-1]
        ]
        stop = StopReason.EOS if self.finished else StopReason.LENGTH
        return Trajectory([1], [], [], [], turns, tool_results, stop, self.open_thinking)

    @property
    def task(self) -> PromptTask:
        messages = [{"role": "user", "content": self.asked}]
        return PromptTask(0, [1], self.open_thinking, messages, [tool_schema(name) for name in self.offered] or None, self.gt)

    def terms(self) -> dict[str, float]:
        return agent_rewards(
            self.trajectory, gt=self.gt, asked=self.asked, tools_offered=self.offered, model_score=self.score, params=PARAMS
        )

    def total(self) -> float:
        return total_reward(self.terms(), PARAMS.agent_clip)


def call(expression: Any = "256*37", name: str = "calculate_math") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'expression': expression}})}\n</tool_call>"


def use(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def time_call() -> str:
    return '<tool_call>{"name": "get_current_time"}</tool_call>'


ALL = tuple(TOOL_NAMES)
HONEST = Played([call(), "256×37 的结果是 9472。"], ["9472"])
NUMBERS = " ".join(map(str, range(9460, 9480)))
CHEATS = {
    "no call, right answer": Played(["The answer is 9472."], ["9472"]),
    "no call, flattery": Played(["What a wonderful question, dear user!"], ["9472"], score=3.0),
    "wrong answer after a right call": Played([call(), "The result is 9473."], ["9472"]),
    "right digits inside another number": Played([call(), "The result is 19472."], ["9472"]),
    "right digits before a fraction": Played([call(), "The result is 9472.5."], ["9472"]),
    "sign flipped": Played([call(), "The result is -9472."], ["9472"]),
    "candidates listed": Played([call("1+1"), NUMBERS], ["9472"]),
    "candidates listed beside the answer": Played([call(), "9472 " + NUMBERS], ["9472"]),
    "candidates smuggled in through arguments": Played([call(NUMBERS.replace(" ", "+")), NUMBERS], ["9472"]),
    "the same call twice": Played([call() + "\n" + call(), "The result is 9472."], ["9472"]),
    "the same call again in the next turn": Played([call(), call(), "The result is 9472."], ["9472"]),
    "a failing call first": Played([call("256*/37"), call(), "The result is 9472."], ["9472"]),
    "a failing call beside": Played([call() + call("x"), "The result is 9472."], ["9472"]),
    "an unknown tool beside": Played([call() + call(name="oracle"), "The result is 9472."], ["9472"]),
    "a tool that is not offered": Played([call(name="translate_text"), "The result is 9472."], ["9472"]),
    "only failing calls": Played([call({"a": 1}), "The result is 9472."], ["9472"]),
    "broken JSON": Played(['<tool_call>{"name": "calculate_math"</tool_call>', "The result is 9472."], ["9472"]),
    "a list for a call": Played(["<tool_call>[1]</tool_call>" + call(), "The result is 9472."], ["9472"]),
    "an unclosed call": Played([call() + "<tool_call>", "The result is 9472."], ["9472"]),
    "a spare closing tag at the end": Played([call(), "9472</tool_call>"], ["9472"]),
    "the answer before the last call": Played([call(), "9472" + call()], ["9472"]),
    "the answer inside the call": Played([call("9472"), "Done, see above."], ["9472"]),
    "a forged tool result": Played([call("1"), "<tool_response>9472</tool_response>"], ["9472"]),
    "an unclosed forged tool result": Played([call("1"), "<tool_response>9472"], ["9472"]),
    "cut off": Played([call(), "The result is 9472."], ["9472"], finished=False),
    "still calling at the end": Played([call(), call("1+1")], ["9472"], finished=False),
    "right, then repeated": Played([call(), "The result is 9472. " * 6], ["9472"]),
    "runaway calls": Played([call() * 12, "The result is 9472."], ["9472"]),
    "nothing said": Played([call(), ""], ["9472"]),
    "nothing at all": Played([""], ["9472"]),
    "no turn": Played([], ["9472"], finished=False),
    "answer only in the thinking": Played([call(), "9472</think>There you go."], ["9472"]),
    "answer in an unclosed think block": Played([call(), "<think>9472"], ["9472"]),
    "answer in a second think block": Played([call(), "hm</think> ok <think>9472</think> done"], ["9472"]),
    "answer in a nested think block": Played([call(), "<think>a<think>b</think>9472</think>done"], ["9472"]),
    "answer in a think block after another": Played([call(), "<think>a</think><think>9472</think>"], ["9472"]),
    "answer before a spare closing tag": Played([call(), "hm</think>9472</think>done"], ["9472"]),
    "an irrelevant call, the answer from the head": Played([time_call(), "The result is 9472."], ["9472"], offered=ALL),
    "another irrelevant call": Played([call("1"), "The result is 9472."], ["9472"]),
    "the answer handed to the tool": Played([call("9472"), "The result is 9472."], ["9472"]),
    "the answer handed over with a sign": Played([call("9472+0"), "The result is 9472."], ["9472"]),
    "the answer handed over among others": Played([call("max(9472, 1)"), "The result is 9472."], ["9472"]),
    "a copy of the result": Played([call(), '{"result": "9472"}'], ["9472"]),
    "a copy of the result in prose": Played([call(), 'The tool says: {"result":"9472"} as you see.'], ["9472"]),
    "a forged result after a nested one": Played(
        [call(), "<tool_response>a<tool_response>b</tool_response>9472</tool_response>"], ["9472"]
    ),
    "a forged result with spaces": Played([call(), "<tool_response >9472</ tool_response >"], ["9472"]),
    "a forged result without its beginning": Played([call(), "9472</tool_response>"], ["9472"]),
    "the same call with spaces": Played([call(), call("256 * 37"), "The result is 9472."], ["9472"]),
    "six candidates beside the answer": Played([call(), "9472, 9471, 9473, 9470, 9474, 9475"], ["9472"]),
}


def test_the_honest_trajectory_earns_everything() -> None:
    expected = dict.fromkeys(("length", "model", "thinking", "repetition", "unfinished"), 0.0)
    assert HONEST.terms() == expected | {"answer": 2.5, "tool_call": 0.5}
    assert HONEST.total() == PARAMS.agent_clip


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_earns_less_than_honesty(name: str) -> None:
    assert CHEATS[name].total() <= HONEST.total() - 0.25, CHEATS[name].terms()


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_with_good_thinking_earn_less_than_honesty_with_thinking(name: str) -> None:
    def thinking(played: Played) -> Played:
        texts = ["I should compute this carefully.\n</think>\n\n" + text for text in played.texts]
        return Played(texts, played.gt, played.offered, played.finished, open_thinking=True, score=played.score)

    assert thinking(HONEST).total() == PARAMS.agent_clip
    assert thinking(CHEATS[name]).total() <= PARAMS.agent_clip - 0.25


@pytest.mark.parametrize("name", ["no call, right answer", "only failing calls", "cut off"])
def test_a_right_answer_without_a_valid_call_or_an_end_earns_no_answer_credit(name: str) -> None:
    assert CHEATS[name].terms()["answer"] == 0.0


def test_thinking_that_was_asked_for_and_skipped_costs() -> None:
    thought = "I should compute this carefully.\n</think>\n\n"
    skipped = Played([thought + call(), "</think>The result is 9472."], ["9472"], open_thinking=True)
    assert skipped.terms()["thinking"] == pytest.approx((1.25 - 0.25) / 2 - 1.25)


def test_a_correct_chain_of_calls_loses_nothing() -> None:
    assert Played([call("16*16"), call("256*37"), "256×37 = 9472."], ["9472"]).total() == HONEST.total()


def test_parts_of_the_answer_earn_parts() -> None:
    calls = call("(771-242)+84*27") + call("14**2") + call("2935*998")
    gt, asked = ["2797", "196", "2929130"], "Compute (771-242)+84*27, 14**2 and 2935*998."
    full = Played([calls, "(771-242)+84*27等于2797，14**2等于196，2935*998的结果是2929130。"], gt, asked=asked)
    assert full.total() == HONEST.total()
    part = Played([calls, "(771-242)+84*27等于2797，14**2等于197，2935*998的结果是2929130。"], gt, asked=asked)
    assert part.terms()["answer"] == pytest.approx(2.5 * 2 / 3)


def test_one_answer_does_not_pay_for_two_that_are_equal() -> None:
    assert Played([call("2+3") + call("10-5"), "Done: 5"], ["5", "5"]).terms()["answer"] == pytest.approx(1.25)
    assert Played([call("2+3") + call("10-5"), "2+3=5, 10-5=5"], ["5", "5"]).terms()["answer"] == pytest.approx(2.5)


def weather(*cities: str) -> str:
    return "".join(use("get_current_weather", location=city) for city in cities)


FIVE = ("北京", "上海", "广州", "深圳", "杭州")
PRODUCTS = call("12*3") + call("7*8") + call("90/2")
FAIR = {  # replies that hold more than the answer: expected answers, calls, reply, question
    "steps": (["9472"], [call()], "256*37 = 256*30 + 256*7 = 7680 + 1792 = 9472.", "What is 256*37?"),
    "steps that were computed": (
        ["9472"],
        [call("256*30"), call("256*7"), call("7680+1792")],
        "256*37 = 256*30 + 256*7 = 7680 + 1792 = 9472.",
        "What is 256*37?",
    ),
    "results on the way": (
        ["137"],
        [PRODUCTS, call("36+56+45")],
        "12*3=36, 7*8=56, 90/2=45, so the sum is 137.",
        "What is the sum of 12*3, 7*8 and 90/2?",
    ),
    "a sum of results": (["137"], [PRODUCTS], "36 + 56 + 45 = 137", "What is the sum of 12*3, 7*8 and 90/2?"),
    "readings and their maximum": (
        ["32"],
        [weather(*FIVE)],
        "北京28°C，上海15°C，广州32°C，深圳30°C，杭州22°C，所以最热的是广州，32°C。",
        "北京、上海、广州、深圳、杭州哪里最热，多少度？",
    ),
    "readings and their mean": (["25.4"], [weather(*FIVE)], "The mean is 25.4 degrees.", "How warm are the five cities?"),
    "a difference of readings": (["13"], [weather("北京", "上海")], "28°C - 15°C = 13°C", "How much warmer is 北京 than 上海?"),
    "an amount at a rate": (
        ["721"],
        [use("get_exchange_rate", from_currency="USD", to_currency="CNY")],
        "At 7.21 they are 721 yuan.",
        "How much are 100 USD in CNY?",
    ),
    "a polite Chinese reply": (
        ["晴"],
        [weather("北京")],
        "你好！我帮你查到了。北京现在是晴天，气温28°C，湿度65%，很舒服，适合出门，记得防晒，祝你玩得开心，再见哦！",
        "北京天气怎么样？",
    ),
    "a polite English reply": (
        ["9472"],
        [call()],
        "Sure! I used the calculator. 256 times 37, as you asked, equals 9472. Great, done! Anything else?",
        "What is 256*37?",
    ),
    "a polite English reply in words": (
        ["sunny"],
        [weather("Beijing")],
        "Sure, no problem! I checked for you. Sunny, 28 degrees. Have fun, enjoy, bye!",
        "How is the weather in Beijing?",
    ),
    "rounded": (["3.14"], [call("22/7")], "22/7 is 3.142857, that is about 3.14, or 314%.", "22/7?"),
    "an operand as result": (["2"], [call("4/2")], "Half of it is 2.", "What is half of 4?"),
    "an operand of the question as result": (["18"], [call("min(18,20,25)")], "It is 18.", "Which is smallest: 18, 20 or 25?"),
    "the cities of the question": (
        ["多云"],
        [weather("上海")],
        "在北京、上海、广州、深圳、杭州、成都、武汉、南京当中，上海今天多云。",
        "北京、上海、广州、深圳、杭州、成都、武汉、南京里，上海天气如何？",
    ),
    "a quotation": (
        ["Good night"],
        [use("translate_text", text="晚安", target_language="english")],
        '"Good night".',
        "晚安用英语？",
    ),
    "a time": (["14:30"], [time_call()], "现在是2025年3月7日14时30分，也就是14:30。", "现在几点？"),
}


@pytest.mark.parametrize("name", FAIR)
def test_a_reply_may_say_more_than_the_answer(name: str) -> None:
    gt, calls, answer, asked = FAIR[name]
    played = Played([*calls, answer], gt, offered=ALL, asked=asked)
    assert played.total() == HONEST.total(), played.terms()
    assert earned(played.task, played.trajectory)


WEATHERS = "晴 多云 闷热 阴 小雨 大风 晴朗 雾"
PHRASES = "Hello world. Good morning. I love programming. Happy birthday. Good night. Thank you. Goodbye."
NIGHT = use("translate_text", text="晚安", target_language="english")
DUMPS = {  # after the right call
    **{f"words between {mark}": (["小雨"], [weather("成都")], WEATHERS.replace(" ", mark)) for mark in "、，,;/|\n。！ "},
    "numbered words": (["小雨"], [weather("成都")], "\n".join(f"{n}. {word}" for n, word in enumerate(WEATHERS.split(), 1))),
    "words with or": (["rainy"], [weather("Chengdu")], "sunny, cloudy, muggy, overcast, windy, clear, foggy or rainy"),
    "framed words": (["小雨"], [weather("成都")], "、".join(f"可能{word}" for word in WEATHERS.split())),
    "framed sentences": (
        ["rainy"],
        [weather("Chengdu")],
        " ".join(f"It may be {word}." for word in "sunny cloudy muggy overcast windy clear foggy rainy".split()),
    ),
    "phrases": (["Good night"], [NIGHT], PHRASES),
    "quoted phrases": (["Good night"], [NIGHT], ", ".join(f'"{phrase}"' for phrase in PHRASES.split(". "))),
    "times": (["14:30"], [time_call()], "14:30 01:30 06:30 15:30 07:30 17:30"),
    "readings of all cities": (
        ["32"],
        [weather(*FIVE, "成都", "武汉", "南京")],
        "28 15 32 30 22 18 25 20",
    ),
    "guessed readings": (["32"], [weather("广州")], "32 31 30 29 28 27"),
    "guesses at a difference": (["13"], [weather("北京", "上海")], "12 or 13"),
    "numbers that a call brought along": (["13"], [weather("北京", "上海") + call("12+13+14")], "12, 13 or 14 or 11"),
}


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_earns_no_answer(name: str) -> None:
    gt, calls, answer = DUMPS[name]
    played = Played([*calls, answer], gt, offered=ALL, asked="Please tell me.")
    assert verify(gt, answer) == [True] and played.terms()["answer"] == 0.0
    assert not earned(played.task, played.trajectory)


def test_a_table_in_one_result_is_retold_in_parts() -> None:
    """A tool may return a table; whoever repeats it has not looked the answer up."""
    honest = Played([call(), "The price is 40."], ["40"])
    trajectory, table = honest.trajectory, ToolResult(json.dumps({"prices": list(range(1, 100))}), is_error=False)
    for answer, value in (("The price is 40, not 41 as before.", 2.5), (" ".join(map(str, range(1, 100))), 0.0)):
        turns = [trajectory.turns[0], Turn(answer, parse_turn(answer, open_thinking=False))]
        replayed = replace(trajectory, turns=turns, tool_results=[[table]])
        terms = agent_rewards(replayed, gt=["40"], asked="?", tools_offered=ALL, model_score=None, params=PARAMS)
        assert terms["answer"] == value


@pytest.mark.parametrize(
    ("value", "expected", "reply"),
    [
        ({"quote": 'say "hi" now'}, 'say "hi" now', 'It reads: say "hi" now'),
        ({"poem": "roses\nSunny day"}, "Sunny day", "It says: Sunny day."),
        ({"path": "C:\\tmp"}, "C:\\tmp", "It is C:\\tmp"),
        ({"text": "a\tb"}, "b", "b"),
        ({"degrees": "28\u2103"}, "28°C", "28 °C"),
        ({"count": 1234567.0}, "1,234,567", "1,234,567"),
        ({"ok": True}, "true", "It is true."),
        ({"pears": 3}, "pears", "They are pears."),
        (["a", ["b", {"c": "deep"}]], "deep", "deep"),
        ("plain", "plain", "plain"),
        (12, "12", "12"),
    ],
)
def test_results_are_read_as_values(value: Any, expected: str, reply: str) -> None:
    trajectory = Played([time_call(), reply], [expected], offered=ALL).trajectory
    trajectory = replace(trajectory, tool_results=[[ToolResult(json.dumps(value), is_error=False)]])
    terms = agent_rewards(trajectory, gt=[expected], asked="?", tools_offered=ALL, model_score=None, params=PARAMS)
    assert terms["answer"] == 2.5


def test_calls_are_the_same_whatever_their_spaces_and_zeros() -> None:
    def faults(first: str, second: str) -> float:
        return Played([first + second, "no"], ["1"], offered=ALL).terms()["tool_call"]

    kilometres = [use("unit_converter", value=value, from_unit="km", to_unit="miles") for value in (1, 1.0, 2.5)]
    assert faults(kilometres[0], kilometres[1]) == -0.5 and faults(kilometres[0], kilometres[2]) == 0.5
    assert faults(call("1+1"), call(" 1 + 1 ")) == -0.5 and faults(call("1+1"), call("1-1")) == 0.5


FRAGMENTS = st.sampled_from(
    [
        "9472",
        "1e300",
        "9e999",
        "9" * 50,
        "28°C",
        "14:30",
        "2025-03-07",
        "晴",
        "sunny",
        "、",
        ", ",
        ". ",
        "\n",
        " ",
        "{",
        "[",
        '"',
        "}",
    ]
    + ["<think>", "</think>", "<tool_response>", "</tool_response>", '{"a": 1}', "1.", "ﷺ", "\u0301", "or", "\\", "/", "-", "0"]
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@settings(deadline=None, max_examples=300)
@given(TEXTS, TEXTS, st.lists(TEXTS, max_size=3), st.lists(TEXTS, max_size=3))
def test_no_reply_and_no_result_raises(answer: str, asked: str, gt: list[str], contents: list[str]) -> None:
    played = Played([call() * len(contents), answer], gt, offered=ALL, asked=asked)
    results = [ToolResult(content, is_error=False) for content in contents]
    trajectory = replace(played.trajectory, tool_results=[results])
    terms = agent_rewards(trajectory, gt=gt, asked=asked, tools_offered=ALL, model_score=None, params=PARAMS)
    assert 0 <= terms["answer"] <= 2.5 and (contents or not terms["answer"])


def test_degenerate_replies_take_no_time() -> None:
    started = time.perf_counter()
    for answer in ("[" * 20_000, "{" * 20_000, "<think>" * 20_000, "</tool_response>" * 20_000, "1," * 20_000, "晴、" * 20_000):
        Played([call(), answer], ["晴", "9472"], offered=ALL).total()
    many = [call(f"{n}*{n + 3}+{n}") for n in range(100)]
    Played([*many, "It is 7."], ["7"], offered=ALL).total()
    assert time.perf_counter() - started < 10


def test_an_irrelevant_call_rarely_shows_what_was_computed_in_the_head() -> None:
    """Of 100 sums and differences, few happen to follow from the numbers of a weather report."""
    tasks = [(a, b) for a in range(11, 91, 8) for b in range(2, 12)]
    lucky = 0
    for a, b in tasks:
        played = Played([weather("上海"), f"It is {a + b}."], [str(a + b)], offered=ALL, asked=f"What is {a}+{b}?")
        lucky += earned(played.task, played.trajectory)
    assert lucky <= 10


def test_a_date_spelled_out_is_no_list_of_candidates() -> None:
    asked = '<tool_call>{"name": "get_current_time", "arguments": {"timezone": "Asia/Shanghai"}}</tool_call>'
    played = Played([asked, "现在是2025年3月7日14时30分，也就是14:30。"], ["14:30"], offered=("get_current_time",))
    assert played.total() == HONEST.total()


def test_a_list_of_words_is_no_answer() -> None:
    asked = use("get_current_weather", location="东京")
    (result,) = Played([asked, ""], []).trajectory.tool_results[0]
    weather = json.loads(result.content)["condition"]
    assert Played([asked, f"东京现在12°C，{weather}，湿度65%。"], [weather]).terms()["answer"] == 2.5
    assert Played([asked, f"晴、多云、小雨、阴、大风、闷热、晴朗、{weather}"], [weather]).terms()["answer"] == 0.0


ANY = use("get_current_time")
GUESSES = {
    "times": (["15:30"], [ANY], "14:30 01:30 06:30 15:30 07:30 17:30"),
    "times in sentences": (["06:30"], [ANY], "Time: 14:30. 01:30. 06:30. 15:30. 07:30. 17:30."),
    "phrases": (
        ["Good night"],
        [ANY],
        "Hello world. Good morning. I love programming. Happy birthday. Good night. Thank you. Goodbye.",
    ),
    "one phrase": (["Good night"], [ANY], "Good night"),
    "Chinese phrases": (["晚安"], [ANY], "你好世界。早上好。今天天气真好。我爱编程。机器学习很有趣。生日快乐。晚安。谢谢你。"),
    "words between spaces": (["小雨"], [ANY], "晴 多云 闷热 阴 小雨 大风 晴朗"),
    "operands as guesses": (["18"], [use("calculate_math", expression="max(18,20,25,28,30,32)")], "18 20 25 28 30 32"),
    "an error that echoes": (["18"], [use("get_current_weather", location="5 8 10 12 15 16 18"), ANY], "5 8 10 12 15 16 18"),
    "two numbers": (["18"], [ANY], "18 or 19"),
    "numbers of the question": (["18"], [ANY], "It is 18, 20 or 25."),
}


@pytest.mark.parametrize("name", GUESSES)
def test_guesses_after_an_irrelevant_call_earn_no_answer(name: str) -> None:
    gt, calls, answer = GUESSES[name]
    played = Played([*calls, answer], gt, offered=tuple(TOOL_NAMES), asked="Which is smallest: 18, 20 or 25?")
    assert verify(gt, answer) == [True] and played.terms()["answer"] == 0.0
    assert solved(played.task, played.trajectory) and not earned(played.task, played.trajectory)


@pytest.mark.parametrize(
    ("gt", "calls", "answer", "asked"),
    [
        (["3.14"], ["22/7 - 0.0025"], "That is about 3.14.", "How much is 22/7 - 0.0025, to two places?"),  # rounded
        (["150"], ["10*10", "5*10"], "100 plus 50 makes 150.", "What do 10*10 and 5*10 make together?"),  # added up
        (["18"], ["min(18,20,25)"], "The smallest of 18, 20 and 25 is 18.", "Which is smallest: 18, 20 or 25?"),
        (["9472", "9472"], ["256*37"], "9472 and again 9472.", "256*37, twice please"),
    ],
)
def test_what_follows_from_results_is_earned(gt: list[str], calls: list[str], answer: str, asked: str) -> None:
    played = Played([*map(call, calls), answer], gt, asked=asked)
    assert played.terms()["answer"] == 2.5 and earned(played.task, played.trajectory)


def test_faults_are_bounded_and_malformed_calls_count_once() -> None:
    assert Played([call("x") * 50, "no"], ["1"]).terms()["tool_call"] == -1.5
    assert Played(["<tool_call>{}</tool_call>", "no"], ["1"]).terms()["tool_call"] == -0.5
    assert Played(["<tool_call>{}</tool_call>" + call("x"), "no"], ["1"]).terms()["tool_call"] == -1.0


def test_calls_earn_nothing_where_no_answer_is_expected() -> None:
    assert Played([call(), "The result is 9472."], []).total() == 0.0
    assert Played([call("x"), "The result is 9472."], []).total() == -0.5


def test_without_tools_length_and_reward_model_count_and_answers_need_no_call() -> None:
    terms = Played(["The result is 9472."], ["9472"], offered=(), score=0.4).terms()
    assert {name: value for name, value in terms.items() if value} == {"answer": 2.5, "length": 0.5, "model": 0.4}
    assert Played(["Hello, how are you?"], [], offered=(), score=-0.4).total() == pytest.approx(0.1)
    assert Played(["Hello, how are you?"], [], score=3.0).total() == 0.0  # tools offered: the model has no say


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(0.1, 5))
def test_a_clamped_value_lies_in_its_bounds_and_nan_is_the_worst(value: float, bound: float) -> None:
    assert -bound <= clamped(value, bound) <= bound
    if not value > -bound:
        assert clamped(value, bound) == -bound
    assert total_reward({"a": float("nan")}, 3.0) == -3.0


# --- results that stand in the prompt


def after(*messages: dict[str, Any], text: str, gt: str = "42", follow: str | None = None) -> Scored:
    """What the reply to a conversation earns; `follow` is the reply after its call."""
    played = Played([text] if follow is None else [text, follow], [gt])
    task = replace(played.task, messages=[{"role": "user", "content": "6*7?"}, *messages])
    (scored,) = EpisodeScorer(PARAMS, Length())([task], [played.trajectory])
    assert solved(task, played.trajectory) is scored.good
    assert earned(task, played.trajectory) is (scored.terms["answer"] == PARAMS.answer)
    return scored


def asks(expression: str, arguments: type = dict) -> dict[str, Any]:
    given = {"expression": expression}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "calculate_math", "arguments": given if arguments is dict else json.dumps(given)}],
    }


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


RESULT = '{"result": "42"}'


@pytest.mark.parametrize("arguments", [dict, str])
def test_a_result_in_the_prompt_is_evidence(arguments: type) -> None:
    conversation = asks("6*7", arguments), result(RESULT)
    direct = after(*conversation, text="6*7 is 42.")
    assert direct.total == 3.0 and direct.good
    again = after(*conversation, text=call("6*7"), follow="6*7 is 42.")
    assert again.total == 2.0  # the call is repeated
    assert after(*conversation, text=call("7*6"), follow="6*7 is 42.").total == 3.0
    assert after(*conversation, text="6*7 is 43.").total == 0.0
    assert after(*conversation, text=RESULT).terms["answer"] == 0.0  # a copy is no answer
    assert after(text="6*7 is 42.").terms["answer"] == 0.0  # nothing was called


def test_a_result_in_the_prompt_that_shows_nothing_pays_nothing() -> None:
    error = asks("6*/7"), result('{"error": "42 is not an expression"}')
    assert after(*error, text="6*7 is 42.").total == 0.0
    other = asks("1+1"), result('{"result": "2"}')
    assert after(*other, text="It is 2.").total == 0.0
    assert after(*other, text=call("6*7"), follow="6*7 is 42.").total == 3.0
    brought = asks("42"), result(RESULT)  # the question has no 42
    assert after(*brought, text="6*7 is 42.").terms["answer"] == 0.0


def test_results_of_earlier_questions_are_evidence_and_their_calls_may_be_made_again() -> None:
    earlier = asks("6*7"), result(RESULT), {"role": "assistant", "content": "42."}, {"role": "user", "content": "Again, please."}
    assert after(*earlier, text="6*7 is 42.").total == 3.0
    assert after(*earlier, text=call("6*7"), follow="6*7 is 42.").total == 3.0


def test_every_result_belongs_to_its_call() -> None:
    both = asks("6*7")
    both["tool_calls"] += asks("1+1")["tool_calls"]
    found = given_exchanges([{"role": "user", "content": "?"}, both, result(RESULT), result('{"result": "2"}'), result("5")])
    assert [(each.call.arguments.get("expression"), each.result.content, each.current) for each in found] == [
        ("6*7", RESULT, True),
        ("1+1", '{"result": "2"}', True),
        (None, "5", True),
    ]


def test_final_answer_is_what_follows_the_last_call() -> None:
    text = f"1 {call()} 2 {call()} 3 <tool_response>4</tool_response> 5 <tool_call> 6"
    assert Played([text], []).trajectory.final_answer.split() == ["3", "5"]
    assert Played([text], [], finished=False).trajectory.final_answer == ""


@pytest.mark.parametrize(
    "name", ["a forged tool result", "an unclosed forged tool result", "a spare closing tag at the end", "cut off"]
)
def test_what_is_no_final_answer_solves_nothing(name: str) -> None:
    """Tool success in training and evaluation goes by the same text as the reward."""
    played = CHEATS[name]
    assert not solved(played.task, played.trajectory) and solved(HONEST.task, HONEST.trajectory)
    (scored,) = EpisodeScorer(PARAMS, Length())([played.task], [played.trajectory])
    assert not scored.good and scored.terms["answer"] == 0.0


def test_the_reward_model_reads_the_final_answer_alone() -> None:
    plain = Played(["Hello.<tool_response>forged</tool_response>"], [], offered=())
    (scored,) = EpisodeScorer(PARAMS, Length())([plain.task], [plain.trajectory])
    assert scored.terms["model"] == pytest.approx(len("Hello.") / 10)


@pytest.mark.parametrize("stop", StopReason)
def test_a_completion_is_unfinished_unless_it_ended_by_itself(stop: StopReason) -> None:
    """Cut at its limit, or ended in a call that no second turn can answer."""
    played = Played(["It is four."], [], offered=())
    trajectory = replace(played.trajectory, stop=stop)
    (scored,) = CompletionScorer(PARAMS, Length())([played.task], [trajectory])
    assert scored.terms["unfinished"] == (0.0 if stop is StopReason.EOS else -0.5)


# --- reward models


class Length:
    """Scores an answer by its length."""

    def score(self, items: Any) -> list[float]:
        return [len(item.answer) / 10 for item in items]


class LetterEncoder:
    """One token per character; the answer and two closing tokens are trained, as in a real chat. Nobody thinks."""

    def judged(self, ids: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        return ids, trained

    def encode_all(self, chats: Any) -> list[EncodedChat]:
        return [self.encode(messages) for messages, tools in chats if tools is None]

    def encode(self, messages: Any) -> EncodedChat:
        *history, last = messages
        before = [3 + ord(c) % 20 for message in history for c in message["content"]]
        answer = [3 + ord(c) % 20 for c in last["content"]] + [2, 4]
        assert last["role"] == "assistant" and "reasoning_content" not in last
        return EncodedChat(before + answer, [False] * len(before) + [True] * len(answer), [])


def small_reward_model() -> RewardModel:
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=64,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        dropout=0.0,
        use_moe=False,
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        norm_topk_prob=False,
        router_aux_loss_coef=0.0,
    )
    return RewardModel(config, seed=1)


def test_trained_scores_are_batched_in_order_and_standardised() -> None:
    model, encoder = small_reward_model(), LetterEncoder()
    items = [
        Reply([{"role": "user", "content": question}], answer)
        for question, answer in [("short", "yes"), ("a much longer question", "no"), ("q", "an answer of some length"), ("x", "")]
    ]
    expected = []
    with torch.no_grad():
        for item in items:
            ids = encoder.encode([*item.messages, {"role": "assistant", "content": item.answer}]).ids
            row = torch.tensor([ids[:-1]])  # inputs; the last label is the last token
            expected.append((float(model(row, torch.tensor([len(ids) - 2]))) - 0.3) / 0.5)
    for batch_size in (1, 3, 8):
        chat_encoder: Any = encoder
        scorer = TrainedRewardModel(model, chat_encoder, pad_id=0, offset=0.3, scale=0.5, batch_size=batch_size, max_len=64)
        assert scorer.score(items) == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 6) for score in expected}) == 4
    assert TrainedRewardModel(model, chat_encoder, pad_id=0, offset=0, scale=1, batch_size=4, max_len=64).score([]) == []


def test_equal_answers_score_equal_bit_for_bit() -> None:
    """Other batch shapes round differently, and a difference of rounding would be the whole signal of a group."""
    encoder: Any = LetterEncoder()
    scorer = TrainedRewardModel(small_reward_model(), encoder, pad_id=0, offset=0.3, scale=0.5, batch_size=3, max_len=64)
    same = Reply([{"role": "user", "content": "again"}], "the very same words")
    others = [Reply([{"role": "user", "content": "q" * length}], "a") for length in range(1, 24)]
    scores = scorer.score([same, *others[:11], same, same, *others[11:], same])
    assert scores[0] == scores[12] == scores[13] == scores[-1]
    rest = scores[1:12] + scores[14:-1]
    assert len(set(rest)) > 20 and rest == pytest.approx(scorer.score(others), abs=1e-5)


def test_long_conversations_lose_their_beginning() -> None:
    encoder: Any = LetterEncoder()
    scorer = TrainedRewardModel(small_reward_model(), encoder, pad_id=0, offset=0.0, scale=1.0, batch_size=4, max_len=12)
    tail = Reply([{"role": "user", "content": "same tail"}], "fine")
    longer = Reply([{"role": "user", "content": "before " * 30 + "same tail"}], "fine")
    assert scorer.score([longer])[0] == pytest.approx(scorer.score([tail])[0], abs=1e-6)


def test_external_models_read_the_history_as_text() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]
    expected = "system: Be kind.\nuser: Hi\nassistant: Hello\n以上是对话历史。我的新问题是：\nAnd now?"
    assert flat_question(messages) == expected
    assert flat_question(messages[1:2]) == "Hi"


MODEL_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class ToyConfig(PretrainedConfig):
    model_type = "toy_reward"


class ToyReward(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.post_init()

    def {method}(self, tokenizer, conversation):
        user, answer = conversation
        assert [user["role"], answer["role"]] == ["user", "assistant"]
        return float(self.scale * (len(answer["content"]) - len(user["content"])))
"""


@pytest.fixture
def private_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code from model folders is copied below the test's own folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def write_toy_reward(folder: Path, method: str) -> None:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    folder.mkdir()
    (folder / "toy.py").write_text(MODEL_CODE.replace("{method}", method), encoding="utf-8")
    config = {
        "model_type": "toy_reward",
        "architectures": ["ToyReward"],
        "auto_map": {"AutoConfig": "toy.ToyConfig", "AutoModel": "toy.ToyReward"},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"scale": torch.full((1,), 2.0)}, folder / "model.safetensors", metadata={"format": "pt"})
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")


@pytest.mark.usefixtures("private_modules")
def test_external_reward_model_is_called_with_get_score(tmp_path: Path) -> None:
    write_toy_reward(tmp_path / "toy_reward", "get_score")
    scorer = ExternalRewardModel(tmp_path / "toy_reward", device=torch.device("cpu"))
    items = [Reply([{"role": "user", "content": "Hi"}], "Hello"), Reply([{"role": "user", "content": "Hello"}], "")]
    assert scorer.score(items) == [2.0 * 3, 2.0 * -5]


@pytest.mark.parametrize("broken", ['raise KeyError("a\\nb")', "return None", "return torch.zeros(2)"])
@pytest.mark.usefixtures("private_modules")
def test_a_score_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setitem(globals(), "MODEL_CODE", MODEL_CODE.replace("return float", f"{broken}\n        return float"))
    write_toy_reward(tmp_path / "toy_reward", "get_score")
    scorer = ExternalRewardModel(tmp_path / "toy_reward", device=torch.device("cpu"))
    with pytest.raises(DataError, match="get_score must return a number") as raised:
        scorer.score([Reply([{"role": "user", "content": "Hi"}], "Hello")])
    assert len(raised.value.lines) == 1


@pytest.mark.usefixtures("private_modules")
def test_external_reward_model_faults_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no config.json"):
        ExternalRewardModel(tmp_path / "absent", device=torch.device("cpu"))
    for name, description in (("empty", "{}"), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(description)
        with pytest.raises(DataError, match=f"{name}': cannot be loaded") as raised:
            ExternalRewardModel(tmp_path / name, device=torch.device("cpu"))
        assert len(raised.value.lines) == 1
    write_toy_reward(tmp_path / "other_reward", "rate")
    with pytest.raises(DataError, match="has no get_score"):
        ExternalRewardModel(tmp_path / "other_reward", device=torch.device("cpu"))


def test_a_call_that_a_prompt_writes_out_is_one_of_its_calls() -> None:
    """The same conversation twice: `tool_calls`, and the call in the text of the message, a malformed one before it."""
    call = {"name": "calculate_math", "arguments": {"expression": "42"}}
    written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    question, reply = {"role": "user", "content": "6*7?"}, {"role": "tool", "content": '{"result": "42"}'}
    (plain,) = given_exchanges([question, {"role": "assistant", "content": "", "tool_calls": [call]}, reply])
    (same,) = given_exchanges([question, {"role": "assistant", "content": written}, reply])
    assert plain == same and (same.call.name, same.call.arguments) == ("calculate_math", {"expression": "42"})
    both = {"role": "assistant", "content": f"<tool_call>no</tool_call>{written}", "tool_calls": [call | {"name": "other"}]}
    names = [each.call.name for each in given_exchanges([question, both, reply, reply, reply])]
    assert sorted(names) == ["", "calculate_math", "other"] and names[-1] == "other"
