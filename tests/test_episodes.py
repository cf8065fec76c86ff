"""Episodes: the exact ids of multi-turn trajectories, and every way in which one can end."""

import json
import random
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_engines import TurnByTurn

from pipeline.data.prompts import PromptTask
from pipeline.rollout.episodes import MALFORMED, read_turn, run_episodes
from pipeline.rollout.records import Completion, StopReason, Trajectory, completion_tensors
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import CONTROL_TOKENS, Tokenizer, load_tokenizer, train_tokenizer
from pipeline.tools.registry import ToolResult, call_tool, tool_schema
from pipeline.tools.toolbox import Toolbox

END = "<|im_end|>"
NEXT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
NEXT_OPEN = "<|im_start|>assistant\n<think>\n"
MATH = '<tool_call>\n{"name": "calculate_math", "arguments": {"expression": "2*21"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_current_time", "arguments": {}}\n</tool_call>'
CONTROL = re.compile("(" + "|".join(re.escape(text) for text, _ in CONTROL_TOKENS) + ")")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([MATH, TIME, "The answer is 42. 答案是 42。", NEXT] * 20, folder, vocab_size=400, split_digits=True)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


class Script(TurnByTurn):
    """An engine that says what it is told: per task one text per turn; a text ends the turn where it ends with END."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[Sequence[str | list[int]]]) -> None:
        self._tokenizer = tokenizer
        self._texts = [list(turns) for turns in texts]
        self.calls: list[dict[str, Any]] = []

    def ids(self, text: str | list[int]) -> list[int]:
        if isinstance(text, list):
            return text
        parts = enumerate(CONTROL.split(text))
        control_id, encode = self._tokenizer.control_id, self._tokenizer.encode_text
        return [i for index, part in parts for i in ([control_id(part)] if index % 2 else encode(part))]

    def turn(self, prompts: Sequence[Sequence[int]], **rest: Any) -> list[Completion]:
        max_new_tokens = rest.pop("max_new_tokens")
        self.calls.append({"prompts": [list(prompt) for prompt in prompts], "limits": list(max_new_tokens), **rest})
        return [self._complete(prompt[0], limit) for prompt, limit in zip(prompts, max_new_tokens, strict=True)]

    def _complete(self, task: int, limit: int) -> Completion:
        assert limit >= 1
        ids = self.ids(self._texts[task].pop(0))[:limit]
        stop = StopReason.EOS if ids[-1] == self._tokenizer.eos_id else StopReason.LENGTH
        return Completion(ids, [-0.25 * (index + 1) for index in range(len(ids))], stop)


def make_task(number: int, *, offered: Sequence[str] = ("calculate_math", "get_current_time"), **changes: Any) -> PromptTask:
    """A task whose prompt is its number and one more id: the script knows it by the first."""
    values = {"prompt_ids": [number, 50], "open_thinking": False, "tools": [tool_schema(name) for name in offered] or None}
    return PromptTask(**({"row": number, "messages": [], "gt": []} | values | changes))


def play(
    tokenizer: Tokenizer, texts: Sequence[Sequence[str | list[int]]], *, tasks: Sequence[PromptTask] | None = None, **changes: Any
) -> tuple[list[Trajectory], Script]:
    script = Script(tokenizer, texts)
    tasks = tasks or [make_task(number) for number in range(len(texts))]
    limits = {"max_turns": 3, "max_new_tokens": 200, "max_total_len": 1000, "temperature": 0.8} | changes
    keys = limits.pop("keys", list(range(len(tasks))))
    return run_episodes(script, ChatEncoder(tokenizer), tokenizer, tasks, keys=keys, **limits), script


def results_text(*contents: str, following: str = NEXT) -> str:
    """What follows a sampled END, written out from the chat format."""
    responses = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
    return f"\n<|im_start|>user{responses}{END}\n{following}"


def assert_row(script: Script, trajectory: Trajectory, *pieces: tuple[str, int]) -> None:
    """The trajectory's ids and sampled flags are those of the pieces, (text, 1 where sampled)."""
    rows = [(i, bool(flag)) for text, flag in pieces for i in script.ids(text)]
    assert list(zip(trajectory.ids, trajectory.sampled, strict=True)) == rows
    assert all((logprob < 0) == flag for logprob, flag in zip(trajectory.logprobs, trajectory.sampled, strict=True))


def test_a_call_its_result_and_the_answer(tokenizer: Tokenizer) -> None:
    (trajectory,), script = play(tokenizer, [[MATH + END, f"The answer is 42.{END}"]])
    result = call_tool("calculate_math", {"expression": "2*21"})
    assert not result.is_error and "42" in result.content
    # <tool_call> \n ... </tool_call> <|im_end|>  \n <|im_start|> user ... <|im_end|> \n ... \n \n  The ... <|im_end|>
    #           1  1   1            1          1   0            0    0   0          0  0   0  0  0    1   1          1
    assert_row(script, trajectory, (MATH + END, 1), (results_text(result.content), 0), (f"The answer is 42.{END}", 1))
    assert trajectory.prompt_ids == [0, 50] and trajectory.stop is StopReason.EOS
    assert trajectory.tool_results == [[result]]
    assert [turn.text for turn in trajectory.turns] == [MATH, "The answer is 42."]
    assert trajectory.turns[0].parsed.calls[0].arguments == {"expression": "2*21"}
    assert trajectory.final_answer == "The answer is 42."
    assert trajectory.num_sampled == len(script.ids(MATH + END)) + len(script.ids(f"The answer is 42.{END}"))
    labels, _, loss_mask = completion_tensors([trajectory])
    assert int(labels[0, -1]) == tokenizer.eos_id and int(loss_mask.sum()) == trajectory.num_sampled


def test_the_appended_ids_are_the_templates(tokenizer: Tokenizer, encoder: ChatEncoder) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "6*7?"}]
    tools = [tool_schema("calculate_math")]
    task = make_task(0, offered=["calculate_math"], prompt_ids=encoder.encode_prompt(messages, tools))
    texts: list[list[str]] = [[] for _ in range(10)]
    texts[task.prompt_ids[0]] = [MATH + END, f"42{END}"]
    (trajectory,), _ = play(tokenizer, texts, tasks=[task])
    call = {"name": "calculate_math", "arguments": {"expression": "2*21"}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": trajectory.tool_results[0][0].content},
        {"role": "assistant", "content": "42"},
    ]
    # the template adds a newline after the last end of turn, which nobody samples
    assert [*trajectory.prompt_ids, *trajectory.ids, *tokenizer.encode_text("\n")] == encoder.encode(messages, tools).ids


def test_several_calls_are_answered_in_order_and_malformed_ones_too(tokenizer: Tokenizer) -> None:
    broken = "<tool_call>\n{not json\n</tool_call>"
    unknown = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    odd = '<tool_call>\n{"name": "calculate_math", "arguments": {"expression": [1]}}\n</tool_call>'
    turn = "\n".join((broken, TIME, unknown, odd, MATH))
    (trajectory,), script = play(tokenizer, [[turn + END, f"42{END}"]])
    (results,) = trajectory.tool_results
    assert [result.is_error for result in results] == [False, True, True, False, True]
    assert "datetime" in results[0].content and "rm" in results[1].content and "42" in results[3].content
    assert results[4] == MALFORMED and "error" in json.loads(MALFORMED.content)
    assert_row(script, trajectory, (turn + END, 1), (results_text(*(r.content for r in results)), 0), (f"42{END}", 1))
    assert trajectory.stop is StopReason.EOS


def test_only_offered_tools_are_called(tokenizer: Tokenizer) -> None:
    offers: list[list[str]] = [["get_current_time"], [], ["get_current_time"]]
    tasks = [make_task(number, offered=offered) for number, offered in enumerate(offers)]
    trajectories, _ = play(tokenizer, [[turn + END, f"no{END}"] for turn in (MATH, MATH, TIME)], tasks=tasks)
    assert [t.tool_results[0][0].is_error for t in trajectories] == [True, True, False]


def test_a_cut_turn_ends_the_trajectory_and_no_end_is_invented(tokenizer: Tokenizer) -> None:
    trajectories, script = play(
        tokenizer, [[MATH], ["The answer"], [MATH + END]], max_new_tokens=len(Script(tokenizer, []).ids(MATH))
    )
    for trajectory, text in zip(trajectories, (MATH, "The answer", MATH), strict=True):
        assert_row(script, trajectory, (text, 1))
        assert trajectory.stop is StopReason.LENGTH
        assert trajectory.tool_results == [] and trajectory.final_answer == ""
        assert tokenizer.eos_id not in trajectory.ids
    assert len(script.calls) == 1


def test_the_last_turn_is_not_answered(tokenizer: Tokenizer) -> None:
    (trajectory,), script = play(tokenizer, [[TIME + END, MATH + END, "never"]], max_turns=2)
    (result,) = trajectory.tool_results[0]
    assert_row(script, trajectory, (TIME + END, 1), (results_text(result.content), 0), (MATH + END, 1))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.final_answer == ""
    assert len(trajectory.turns) == 2 and len(trajectory.tool_results) == 1


def test_results_that_do_not_fit_end_the_trajectory_cleanly(tokenizer: Tokenizer) -> None:
    script = Script(tokenizer, [])
    content = call_tool("calculate_math", {"expression": "2*21"}).content
    before, appended = 2 + len(script.ids(MATH + END)), len(script.ids(results_text(content)))
    for total, stop in ((before + appended, StopReason.CONTEXT), (before + appended + 1, StopReason.LENGTH)):
        (trajectory,), script = play(tokenizer, [[MATH + END, "42" + END]], max_total_len=total)
        assert trajectory.stop is stop
        if stop is StopReason.CONTEXT:
            assert_row(script, trajectory, (MATH + END, 1))
            assert trajectory.tool_results == [] and len(script.calls) == 1
        else:  # room for one id: the next turn is cut after it
            assert script.calls[1]["limits"] == [1]
            assert_row(script, trajectory, (MATH + END, 1), (results_text(content), 0), ("4", 1))
            assert len(trajectory.prompt_ids) + len(trajectory.ids) == total


def test_a_prompt_that_fills_the_context_gives_an_empty_trajectory(tokenizer: Tokenizer) -> None:
    tasks = [make_task(0, prompt_ids=[0] * 30), make_task(1)]
    (empty, other), script = play(tokenizer, [[], [f"42{END}"]], tasks=tasks, max_total_len=30)
    assert (empty.ids, empty.turns, empty.stop, empty.final_answer) == ([], [], StopReason.CONTEXT, "")
    assert other.stop is StopReason.EOS and len(script.calls[0]["prompts"]) == 1


def test_trajectories_advance_together_and_keep_their_order(tokenizer: Tokenizer) -> None:
    texts = [[f"one{END}"], [MATH + END, f"two{END}"], [TIME + END, MATH + END, f"three{END}"], ["cut"]]
    trajectories, script = play(tokenizer, texts, keys=[7, 8, 9, 7])
    assert [len(call["prompts"]) for call in script.calls] == [4, 2, 1]
    assert [len(t.turns) for t in trajectories] == [1, 2, 3, 1]
    assert [t.final_answer for t in trajectories] == ["one", "two", "three", ""]
    assert script.calls[1]["prompts"][0] == [1, 50, *trajectories[1].ids[: -len(script.ids(f"two{END}"))]]
    keys = [call["keys"] for call in script.calls]
    assert keys[0][0] == keys[0][3]  # one key, one stream
    assert len({key for turn in keys for key in turn}) == 6  # every turn and every key has a stream of its own
    assert keys[2] == play(tokenizer, [[], [], [TIME + END, MATH + END, END]], tasks=[make_task(2)], keys=[9])[1].calls[2]["keys"]
    assert all(call["temperature"] == 0.8 for call in script.calls)
    assert [call["greedy"] for call in script.calls] == [[False] * 4, [False] * 2, [False]]
    # a flag per row goes with its row
    flags = play(tokenizer, texts, greedy=[True, False, True, False])[1].calls
    assert [call["greedy"] for call in flags] == [[True, False, True, False], [False, True], [True]]


def test_open_thinking_goes_on_in_every_turn(tokenizer: Tokenizer) -> None:
    think = f"hm {MATH}\n</think>\n\n{MATH}"  # a call inside the thinking is none
    tasks = [make_task(0, open_thinking=True), make_task(1, open_thinking=True)]
    (trajectory, endless), script = play(tokenizer, [[think + END, f"ok\n</think>\n\n42{END}"], [f"hm {MATH}{END}"]], tasks=tasks)
    (result,) = trajectory.tool_results[0]
    middle = results_text(result.content, following=NEXT_OPEN)
    assert_row(script, trajectory, (think + END, 1), (middle, 0), (f"ok\n</think>\n\n42{END}", 1))
    assert trajectory.open_thinking and trajectory.final_answer == "42" and trajectory.turns[1].parsed.thinking == "ok"
    assert endless.stop is StopReason.EOS and endless.final_answer == "" and endless.tool_results == []


def test_sampled_ids_are_kept_as_they_are(tokenizer: Tokenizer) -> None:
    spelled = [i for letter in "The answer" for i in tokenizer.encode_text(letter)]
    assert spelled != tokenizer.encode_text("The answer")  # another spelling than the tokenizer's own
    half = tokenizer.encode_text("答")[:1] if len(tokenizer.encode_text("答")) > 1 else tokenizer.encode_text("\U0001f600")[:1]
    odd = [tokenizer.pad_id, *spelled, tokenizer.bos_id, *half, tokenizer.eos_id]
    (trajectory,), _ = play(tokenizer, [[odd]])
    assert trajectory.ids == odd and trajectory.sampled == [True] * len(odd)
    assert trajectory.turns[0].text == "<|endoftext|>The answer<|im_start|>\ufffd"


def test_read_turn_takes_only_a_sampled_end_away(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_text("42"), tokenizer.eos_id]
    assert read_turn(tokenizer, Completion(ids, [0.0] * 3, StopReason.EOS), open_thinking=False).text == "42"
    assert read_turn(tokenizer, Completion(ids[:1], [0.0], StopReason.LENGTH), open_thinking=False).text == "4"


class Babbler(Script):
    """An engine that writes random ids, with plenty of tags, calls and ends."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer, [])
        self._random = random.Random(seed)
        self.said: dict[int, list[list[int]]] = {}

    def _complete(self, task: int, limit: int) -> Completion:
        pieces = [self.ids(text) for text in (MATH, TIME, "</think>", "<tool_call>", "</tool_call>", '{"name": 1}', END)]
        ids: list[int] = []
        for _ in range(self._random.randrange(1, 8)):
            any_id = [self._random.randrange(self._tokenizer.vocab_size)]
            ids += self._random.choice([*pieces, any_id, any_id])
        ids = [*[i for i in ids if i != self._tokenizer.eos_id], self._tokenizer.eos_id][:limit]
        self.said.setdefault(task, []).append(ids)
        stop = StopReason.EOS if ids[-1] == self._tokenizer.eos_id else StopReason.LENGTH
        return Completion(ids, [-1.0] * len(ids), stop)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), max_total_len=st.integers(3, 400), max_new_tokens=st.integers(1, 120), turns=st.integers(1, 4))
def test_whatever_is_sampled_contexts_only_grow(
    tokenizer: Tokenizer, seed: int, max_total_len: int, max_new_tokens: int, turns: int
) -> None:
    engine = Babbler(tokenizer, seed)
    tasks = [make_task(number, open_thinking=bool(number % 2)) for number in range(4)]
    limits = {"max_turns": turns, "max_new_tokens": max_new_tokens, "max_total_len": max_total_len, "temperature": 1.0}
    trajectories = run_episodes(engine, ChatEncoder(tokenizer), tokenizer, tasks, keys=[1, 2, 3, 4], **limits)
    contexts = [(prompt, limit) for call in engine.calls for prompt, limit in zip(call["prompts"], call["limits"], strict=True)]
    for number, trajectory in enumerate(trajectories):
        whole = trajectory.prompt_ids + trajectory.ids
        assert len(whole) <= max_total_len
        assert len(trajectory.ids) == len(trajectory.sampled) == len(trajectory.logprobs)
        kept = [i for i, sampled in zip(trajectory.ids, trajectory.sampled, strict=True) if sampled]
        assert kept == [i for ids in engine.said[number] for i in ids]
        assert len(trajectory.turns) == len(engine.said[number]) <= turns
        assert len(trajectory.tool_results) == len(trajectory.turns) - 1
        assert trajectory.sampled[-1]
        mine = [(prompt, limit) for prompt, limit in contexts if prompt[0] == number]
        for (prompt, limit), ids in zip(mine, engine.said[number], strict=True):
            assert whole[: len(prompt) + len(ids)] == prompt + ids
            assert limit == min(max_new_tokens, max_total_len - len(prompt))
        ended = trajectory.ids[-1] == tokenizer.eos_id
        assert ended == (trajectory.stop is not StopReason.LENGTH)


class SlowTools(Toolbox):
    """Answers like the preset, but each call waits until as many others wait as are to be answered together."""

    def __init__(self, together: int) -> None:
        super().__init__()
        object.__setattr__(self, "gate", threading.Barrier(together, timeout=20))

    def call(self, name: str, arguments: Any, offered: Collection[str] | None = None) -> ToolResult:
        self.gate.wait()  # type: ignore[attr-defined]
        return super().call(name, arguments, offered)


def test_calls_are_answered_beside_one_another_in_their_places(tokenizer: Tokenizer) -> None:
    """Three episodes, one of them with two calls and a malformed one: none of four answers comes before all were asked for."""
    two = f"{MATH}{TIME}<tool_call>\nno JSON\n</tool_call>{END}"
    texts = [[two, f"a{END}"], [MATH + END, f"b{END}"], [TIME + END, f"c{END}"]]
    expected, _ = play(tokenizer, texts)
    found, _ = play(tokenizer, [list(turns) for turns in texts], toolbox=SlowTools(4))
    assert found == expected
    assert [len(row.tool_results[0]) for row in found] == [3, 1, 1] and found[0].tool_results[0][2] is MALFORMED


def test_calls_start_when_their_row_is_finished(tokenizer: Tokenizer) -> None:
    """The calls of a row that ends early have been asked for before the last row of the turn is complete."""
    asked = threading.Event()

    class Asked(Toolbox):
        def call(self, name: str, arguments: Any, offered: Collection[str] | None = None) -> ToolResult:
            asked.set()
            return super().call(name, arguments, offered)

    class Waiting(Script):
        def generate(self, prompts: Any, *, finished: Any, **rest: Any) -> list[Completion]:
            def told(number: int, completion: Completion) -> Any:
                going_on = finished(number, completion)
                assert number or asked.wait(20)
                return going_on

            return super().generate(prompts, finished=told, **rest)

    texts = [[MATH + END, f"The answer is 42.{END}"], [f"nothing{END}"]]
    engine = Waiting(tokenizer, [list(turns) for turns in texts])
    tasks = [make_task(number) for number in range(2)]
    limits: dict[str, Any] = {"max_turns": 2, "max_new_tokens": 200, "max_total_len": 1000, "temperature": 0.8}
    found = run_episodes(engine, ChatEncoder(tokenizer), tokenizer, tasks, keys=[0, 1], toolbox=Asked(), **limits)
    assert found == play(tokenizer, texts, max_turns=2)[0]
