"""What a rollout leaves behind: the ids that were sampled, what the policy thought of them, and why it ended.

Dimensions: N rows, L ids of one row, B sequences, T positions.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.labels import IGNORED_LABEL
from pipeline.text.turns import ParsedTurn, split_blocks
from pipeline.tools.registry import ToolResult

_TOOL_TAG = re.compile(r"(<\s*+/?\s*+tool_(?:call|response)\b[^<>]*>)")  # spelled loosely: a policy forges them as text, too
_DECODER = json.JSONDecoder()
_CLOSING_CALL = re.compile(r"<\s*/\s*tool_call\b[^<>]*>")
_CLOSING = re.compile(r"<\s*/\s*tool_(?:call|response)\b[^<>]*>")


class StopReason(StrEnum):
    """Why a completion or a trajectory ended; only `EOS` is an end that the policy chose."""

    EOS = "eos"
    """It sampled the end of turn and asked for no tool."""
    LENGTH = "length"
    """A turn was cut: by `max_new_tokens`, or by what `max_total_len` left of it."""
    MAX_TURNS = "max_turns"
    """The last allowed turn still called a tool."""
    CONTEXT = "context"
    """The tool results would not have fitted into `max_total_len`, so the turn after them was never sampled."""


@dataclass(slots=True)
class Completion:
    """One sampled turn.

    Attributes:
        ids: L sampled ids; a sampled `<|im_end|>` is the last of them.
        logprobs: L natural logarithms of the probability each id was drawn with (temperature applied).
        stop: `EOS` or `LENGTH`.
    """

    ids: list[int]
    logprobs: list[float]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class NextTurn:
    """What follows a completion in the same context.

    Attributes:
        prompt: The context to go on from: the completion's prompt, its ids, and at least one id more.
        key: The random stream of the next completion.
        max_new_tokens: The most ids of it, at least 1.
    """

    prompt: Sequence[int]
    key: int
    max_new_tokens: int


Continuation = Callable[[], NextTurn | None]
"""Waits, where it must, for what is to follow a completion, and gives it; None where nothing does after all."""


class RolloutEngine(Protocol):
    """Samples completions; what trains, evaluates or chats needs no more of it than this."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        greedy: bool | Sequence[bool] = False,
        finished: Callable[[int, Completion], Continuation | None] | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in the order of the prompts: of its last turn, where it has several.

        Args:
            prompts: N contexts, each at least one id long. Equal ones (a group's) share their prefill.
            keys: N random streams; a completion depends on its prompt, its key and the weights, not on its neighbours.
            max_new_tokens: The most ids to sample, at least 1: for all rows, or one number per row.
            temperature: Divides the logits, > 0. The distribution is not truncated otherwise, and no id is ruled out.
            greedy: Take the most probable id instead of drawing one: for all rows, or one flag per row.
            finished: What the engine calls with a prompt's number and its completion as soon as that has its last id. What it
                returns is called in turn when the engine is ready to read on; meanwhile other rows are decoded. Keys and values
                of the context are kept until then, so that only what is new in a next turn is read.
        """
        ...


@dataclass(slots=True)
class Turn:
    """One assistant turn: its text without `<|im_end|>`, and what the text says."""

    text: str
    parsed: ParsedTurn


@dataclass(slots=True)
class Trajectory:
    """A prompt and everything that followed it, as ids that were really sampled from and are trained on.

    A two-turn example, one column per id (`c` a tool call, `E` `<|im_end|>`, `r` what the tools and the template add, `a` the
    answer)::

        prompt_ids  p p p
        ids               c c E r r r r a a E
        sampled           1 1 1 0 0 0 0 1 1 1
        logprobs          x x x 0 0 0 0 x x x

    Attributes:
        prompt_ids: The first context, generation prompt included.
        ids: L ids after it. Each turn was sampled from `prompt_ids` and all `ids` before it; nothing is ever re-encoded.
        sampled: L flags, True = the policy wrote it.
        logprobs: L logprobs of the sampling distribution, 0.0 where not sampled.
        turns: The assistant turns in order; none only where the prompt left no room for one.
        tool_results: What the policy read after its turns but the last: `tool_results[i]` answers every call of `turns[i]`,
            well-formed ones first and in order, then one error per malformed one.
        stop: Why it ended.
        open_thinking: Whether each generation prompt ended with `<think>`.
    """

    prompt_ids: list[int]
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    turns: list[Turn]
    tool_results: list[list[ToolResult]] = field(default_factory=list)
    stop: StopReason = StopReason.EOS
    open_thinking: bool = False

    @property
    def num_sampled(self) -> int:
        """How many ids the policy wrote."""
        return sum(self.sampled)

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it, of a turn or of the whole."""
        return self.stop in (StopReason.LENGTH, StopReason.CONTEXT)

    @property
    def final_answer(self) -> str:
        """What the policy tells the user in the end, without tool results that it echoes or forges."""
        return self.answer_beside(())

    def answer_beside(self, given: Sequence[ToolResult]) -> str:
        """`final_answer`, also without copies of results that are `given` in the prompt.

        It stands in what `parse_turn` calls the answer of the last turn, outside tool tags, after the last one that closes a call
        or a result, and is no copy of a result's JSON object or list. Empty unless the trajectory ended by itself, for a cut
        answer is none.
        """
        if self.stop is not StopReason.EOS:
            return ""
        text = without_tool_blocks(_CLOSING_CALL.split(self.turns[-1].parsed.answer)[-1])
        return _without_copies(_CLOSING.split(text)[-1], [*self.tool_results, given]).strip()


def without_tool_blocks(text: str) -> str:
    """The text without tool calls and tool results, nested ones too; a block that is never closed reaches to the end."""
    return split_blocks(text, _TOOL_TAG)[0]


def _without_copies(text: str, tool_results: Sequence[Sequence[ToolResult]]) -> str:
    """The text without the JSON objects and lists that are equal to a tool result."""
    contents = {result.content for results in tool_results for result in results if result.content[:1] in ("{", "[")}
    known = [decoded[0] for content in contents if (decoded := _json_at(content, 0))]
    # where one may begin; not at every bracket, for a policy may write thousands
    begins = {rf"{re.escape(content[0])}\s*{re.escape(content[1:].lstrip()[:1])}" for content in contents}
    kept, end = [], 0
    for bracket in re.finditer("|".join(begins), text) if known else ():
        if bracket.start() >= end and (decoded := _json_at(text, bracket.start())) and decoded[0] in known:
            kept.append(text[end : bracket.start()])
            end = decoded[1]
    return " ".join([*kept, text[end:]])


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `start`, and where it ends; None where there is none (a cut result, prose)."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def completion_tensors(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    """Training tensors of the ids behind the prompts, rows right-padded to the longest.

    Args:
        trajectories: B trajectories.

    Returns:
        labels: [B, L] int64, the ids; -100 where the policy did not sample one.
        old_logprobs: [B, L] float32, of the sampling distribution; 0 where not sampled.
        loss_mask: [B, L] bool, True = the policy sampled the id.
    """
    shape = len(trajectories), max((len(trajectory.ids) for trajectory in trajectories), default=0)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    old_logprobs = torch.zeros(shape)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for index, trajectory in enumerate(trajectories):
        length = len(trajectory.ids)
        sampled = torch.tensor(trajectory.sampled, dtype=torch.bool)
        labels[index, :length] = torch.where(sampled, torch.tensor(trajectory.ids), IGNORED_LABEL)
        old_logprobs[index, :length] = torch.where(sampled, torch.tensor(trajectory.logprobs), 0.0)
        loss_mask[index, :length] = sampled
    return labels, old_logprobs, loss_mask
