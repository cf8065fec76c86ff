"""Multi-turn episodes: every trajectory of a batch advances together, turn by turn, and its context only ever grows.

A context is the prompt ids plus all ids so far, sampled or appended. Nothing is decoded and encoded again on the way, so the
ids that are trained are the ids that were sampled from.
"""

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from pipeline.data.prompts import PromptTask
from pipeline.rollout.records import Completion, RolloutEngine, StopReason, Trajectory, Turn
from pipeline.rollout.sampling import fold_key
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.text.turns import parse_turn
from pipeline.tools.registry import ToolResult
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox

SubmitCall = Callable[[str, Any, Collection[str]], Future[ToolResult]]
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

    Turn t of every unfinished trajectory is one `engine.generate`. A turn that calls no tool ends its trajectory; one that
    calls tools has all its calls answered, malformed ones by an error the policy can read, and goes on. Whatever a policy
    writes ends up in a trajectory with its `StopReason`, never in an exception. Tools run in threads of their own as soon as
    they are called, while other trajectories are still sampled; a tool is a function of its arguments, so nobody can tell.

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
    episodes = [_Episode(task, key, flag) for task, key, flag in zip(tasks, keys, flags, strict=True)]
    with ThreadPoolExecutor(TOOL_THREADS, "tools") as threads:

        def submit(name: str, arguments: Any, offered: Collection[str]) -> Future[ToolResult]:
            return threads.submit(toolbox.call, name, arguments, offered)

        for turn in range(max_turns):
            running = [episode for episode in episodes if episode.running and episode.room(max_total_len)]
            if not running:
                break
            last_turn = turn + 1 == max_turns
            call: SubmitCall | None = None if last_turn else submit
            completions = engine.generate(
                [episode.context for episode in running],
                keys=[fold_key(episode.key, turn) for episode in running],
                max_new_tokens=[min(max_new_tokens, episode.room(max_total_len)) for episode in running],
                temperature=temperature,
                greedy=[episode.greedy for episode in running],
                previous=[episode.completion for episode in running],
                remember=not last_turn,
                finished=partial(_take, running, tokenizer, call),
            )
            for episode, completion in zip(running, completions, strict=True):
                episode.take(tokenizer, completion, call)  # where the engine has not said so before
            for episode in running:
                if episode.running:
                    episode.end_turn(encoder, max_total_len, last_turn=last_turn)
    return [episode.trajectory for episode in episodes]


def _take(
    running: "Sequence[_Episode]", tokenizer: Tokenizer, call: SubmitCall | None, number: int, completion: Completion
) -> None:
    running[number].take(tokenizer, completion, call)


def read_turn(tokenizer: Tokenizer, completion: Completion, *, open_thinking: bool) -> Turn:
    """What a completion says, its closing `<|im_end|>` left out; every other control token stays visible as text."""
    ids = completion.ids[:-1] if completion.stop is StopReason.EOS else completion.ids
    text = tokenizer.decode(ids, skip_special=False)
    return Turn(text, parse_turn(text, open_thinking=open_thinking))


class _Episode:
    """A trajectory under way."""

    def __init__(self, task: PromptTask, key: int, greedy: bool) -> None:
        self.key = key
        self.greedy = greedy
        self.running = True
        self.completion: Completion | None = None
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
        self._taken: Completion | None = None
        self._answers: list[Future[ToolResult]] = []
        self._offered = [tool["function"]["name"] for tool in task.tools or []]

    @property
    def context(self) -> list[int]:
        """What the next turn is sampled from."""
        return self.trajectory.prompt_ids + self.trajectory.ids

    def room(self, max_total_len: int) -> int:
        """How many more ids fit."""
        return max(0, max_total_len - len(self.trajectory.prompt_ids) - len(self.trajectory.ids))

    def take(self, tokenizer: Tokenizer, completion: Completion, call: SubmitCall | None) -> None:
        """Appends a sampled turn, once; the episode goes on when it ended by itself and calls tools.

        Args:
            tokenizer: What turns its ids into text.
            completion: The turn.
            call: Has a tool call answered beside others; None where no turn can follow that would read it.
        """
        if completion is self._taken:
            return
        self._taken = completion
        trajectory = self.trajectory
        turn = read_turn(tokenizer, completion, open_thinking=trajectory.open_thinking)
        self._append(completion.ids, completion.logprobs, sampled=True)
        trajectory.turns.append(turn)
        trajectory.stop = completion.stop
        calls_tools = turn.parsed.calls or turn.parsed.malformed_calls
        self.running = completion.stop is StopReason.EOS and bool(calls_tools)
        # what is over needs no memory
        self.completion = completion if self.running else None
        if self.running and call is not None:
            self._answers = [call(each.name, each.arguments, self._offered) for each in turn.parsed.calls]

    def end_turn(self, encoder: ChatEncoder, max_total_len: int, *, last_turn: bool) -> None:
        """Appends the results of the last turn's calls, or ends the episode where no turn can follow them."""
        trajectory = self.trajectory
        if last_turn:
            self._end(StopReason.MAX_TURNS)
            return
        # one per call block of the turn, those of the malformed ones last
        results = [answer.result() for answer in self._answers] + [MALFORMED] * trajectory.turns[-1].parsed.malformed_calls
        ids = encoder.encode_tool_results([result.content for result in results], open_thinking=trajectory.open_thinking)
        if len(ids) >= self.room(max_total_len):
            self._end(StopReason.CONTEXT)
            return
        self._append(ids, [0.0] * len(ids), sampled=False)
        trajectory.tool_results.append(results)

    def _append(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.trajectory.ids += ids
        self.trajectory.logprobs += logprobs
        self.trajectory.sampled += [sampled] * len(ids)

    def _end(self, stop: StopReason) -> None:
        self.trajectory.stop = stop
        self.running = False
