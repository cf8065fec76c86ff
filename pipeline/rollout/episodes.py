"""Multi-turn episodes: the trajectories of a batch advance together, each as fast as it can, and a context only ever grows.

A context is the prompt ids plus all ids so far, sampled or appended. Nothing is decoded and encoded again on the way, so the
ids that are trained are the ids that were sampled from.
"""

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.data.prompts import PromptTask
from pipeline.rollout.records import Completion, Continuation, NextTurn, RolloutEngine, StopReason, Trajectory, Turn
from pipeline.rollout.sampling import fold_key
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.text.turns import parse_turn
from pipeline.tools.registry import ToolResult
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox

TOOL_THREADS = 32
"""Most tool calls that are answered together."""
MALFORMED = ToolResult(json.dumps({"error": "malformed tool call, must be a JSON object with name and arguments"}), is_error=True)


def run_episodes(
    engine: RolloutEngine,
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    tasks: Sequence[PromptTask],
    *,
    keys: Sequence[int],
    max_turns: int,
    max_new_tokens: int,
    max_total_len: int,
    temperature: float,
    greedy: bool | Sequence[bool] = False,
    toolbox: Toolbox = PRESET_TOOLS,
) -> list[Trajectory]:
    """One trajectory per task, in order; repeat a task (with another key) for a group.

    A turn that calls no tool ends its trajectory; one that calls tools has all its calls answered, malformed ones by an error
    the policy can read, and goes on beside what else is sampled. Whatever a policy writes ends up in a trajectory with its
    `StopReason`, never in an exception. Tools run in threads of their own as soon as they are called, while other trajectories
    are still sampled; a tool is a function of its arguments, so nobody can tell.

    Args:
        engine: What samples.
        encoder: What turns tool results into ids.
        tokenizer: What turns sampled ids into text.
        tasks: N prompts with the tools they offer.
        keys: N random streams, one per trajectory; each turn draws from its own.
        max_turns: Most assistant turns, >= 1.
        max_new_tokens: Most ids of one turn; less where `max_total_len` leaves less room.
        max_total_len: Most ids of prompt and everything after it. A prompt that fills it alone leaves no room for a first id:
            its trajectory is empty, without turns, and stops with `CONTEXT`.
        temperature: See `RolloutEngine.generate`.
        greedy: See `RolloutEngine.generate`.
        toolbox: What answers the calls.
    """
    flags = [greedy] * len(tasks) if isinstance(greedy, bool) else greedy
    limits = _Limits(max_turns, max_new_tokens, max_total_len)
    threads = ThreadPoolExecutor(TOOL_THREADS, "tools")

    def call(name: str, arguments: Any, offered: Collection[str]) -> Future[ToolResult]:
        return threads.submit(toolbox.call, name, arguments, offered)

    episodes = [_Episode(task, key, encoder, tokenizer, limits, call) for task, key in zip(tasks, keys, strict=True)]
    begun = [index for index, episode in enumerate(episodes) if episode.room]
    turns = [episodes[index].next_turn() for index in begun]
    try:
        engine.generate(
            [turn.prompt for turn in turns],
            keys=[turn.key for turn in turns],
            max_new_tokens=[turn.max_new_tokens for turn in turns],
            temperature=temperature,
            greedy=[flags[index] for index in begun],
            finished=lambda number, completion: episodes[begun[number]].take(completion),
        )
    finally:  # all calls have answered, or a stop leaves the step, which waits for none of them
        threads.shutdown(wait=False, cancel_futures=True)
    return [episode.trajectory for episode in episodes]


def read_turn(tokenizer: Tokenizer, completion: Completion, *, open_thinking: bool) -> Turn:
    """What a completion says, its closing `<|im_end|>` left out; every other control token stays visible as text."""
    ids = completion.ids[:-1] if completion.stop is StopReason.EOS else completion.ids
    text = tokenizer.decode(ids, skip_special=False)
    return Turn(text, parse_turn(text, open_thinking=open_thinking))


@dataclass(frozen=True, slots=True)
class _Limits:
    """See `run_episodes`."""

    max_turns: int
    max_new_tokens: int
    max_total_len: int


class _Episode:
    """A trajectory under way."""

    def __init__(
        self,
        task: PromptTask,
        key: int,
        encoder: ChatEncoder,
        tokenizer: Tokenizer,
        limits: _Limits,
        call: Callable[[str, Any, Collection[str]], Future[ToolResult]],
    ) -> None:
        self.trajectory = Trajectory(
            prompt_ids=list(task.prompt_ids),
            ids=[],
            sampled=[],
            logprobs=[],
            turns=[],
            tool_results=[],
            stop=StopReason.CONTEXT,
            open_thinking=task.open_thinking,
        )
        self._key = key
        self._encoder, self._tokenizer = encoder, tokenizer
        self._limits = limits
        self._call = call
        self._offered = [tool["function"]["name"] for tool in task.tools or []]

    @property
    def room(self) -> int:
        """How many more ids fit."""
        return max(0, self._limits.max_total_len - len(self.trajectory.prompt_ids) - len(self.trajectory.ids))

    def next_turn(self) -> NextTurn:
        """What the next turn is sampled from."""
        trajectory = self.trajectory
        key = fold_key(self._key, len(trajectory.turns))
        return NextTurn(trajectory.prompt_ids + trajectory.ids, key, min(self._limits.max_new_tokens, self.room))

    def take(self, completion: Completion) -> Continuation | None:
        """Appends a sampled turn; what gives the next one, where it ended by itself and calls tools."""
        trajectory = self.trajectory
        turn = read_turn(self._tokenizer, completion, open_thinking=trajectory.open_thinking)
        self._append(completion.ids, completion.logprobs, sampled=True)
        trajectory.turns.append(turn)
        trajectory.stop = completion.stop
        if completion.stop is not StopReason.EOS or not (turn.parsed.calls or turn.parsed.malformed_calls):
            return None
        if len(trajectory.turns) == self._limits.max_turns:
            trajectory.stop = StopReason.MAX_TURNS
            return None
        return partial(self._go_on, [self._call(each.name, each.arguments, self._offered) for each in turn.parsed.calls])

    def _go_on(self, answers: Sequence[Future[ToolResult]]) -> NextTurn | None:
        """Appends the results of the last turn's calls, where they leave room for a next turn."""
        trajectory = self.trajectory
        # one per call block of the turn, those of the malformed ones last
        results = [answer.result() for answer in answers] + [MALFORMED] * trajectory.turns[-1].parsed.malformed_calls
        ids = self._encoder.encode_tool_results([each.content for each in results], open_thinking=trajectory.open_thinking)
        if len(ids) >= self.room:
            trajectory.stop = StopReason.CONTEXT
            return None
        self._append(ids, [0.0] * len(ids), sampled=False)
        trajectory.tool_results.append(results)
        return self.next_turn()

    def _append(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.trajectory.ids += ids
        self.trajectory.logprobs += logprobs
        self.trajectory.sampled += [sampled] * len(ids)
