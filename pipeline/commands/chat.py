"""A conversation with a trained model in the terminal."""

import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.prompts import PromptTask
from pipeline.errors import DataError
from pipeline.model.transformer import CausalLM
from pipeline.rewards.rules import CJK
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.truncation import Truncation
from pipeline.text.chat import ChatEncoder, Message
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.registry import tool_schema
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox
from pipeline.training.device import Device
from pipeline.training.policy_setup import open_engine

MAX_TURNS = 4
TURN_TOKENS = 512


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how replies are sampled.

    Attributes:
        thinking: whether the model is asked to think before it answers.
        offered: names of the tools that it may call, of those in `toolbox`.
        toolbox: what answers its calls.
        greedy: always the most probable token; otherwise sampled at `temperature`.
        truncation: what is ruled out of the distribution; None for nothing.
    """

    model: CausalLM
    tokenizer: Tokenizer
    device: Device
    temperature: float
    thinking: bool = False
    offered: Sequence[str] = ()
    toolbox: Toolbox = PRESET_TOOLS
    greedy: bool = False
    truncation: Truncation | None = None
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """The lines of a reply: tool calls with their results as they happened, then the answer; both sides are remembered."""
        encoder = ChatEncoder(self.tokenizer)
        offered = self.schemas(question) or None
        window = self.model.config.max_position_embeddings
        self.messages.append({"role": "user", "content": question})
        while len(prompt_ids := encoder.encode_prompt(self.messages, offered, open_thinking=self.thinking)) >= window:
            if len(self.messages) == 1:
                self.messages.clear()
                yield f"(that is longer than the model's window of {window} tokens)"
                return
            del self.messages[:2]  # the oldest question and its answer
        (trajectory,) = run_episodes(
            open_engine(self.model, self.tokenizer, self.device, max_rows=1, truncation=self.truncation),
            encoder,
            self.tokenizer,
            [PromptTask(0, prompt_ids, self.thinking, self.messages, offered, [])],
            keys=[secrets.randbits(62)],
            max_turns=MAX_TURNS,
            max_new_tokens=TURN_TOKENS,
            max_total_len=window,
            temperature=self.temperature,
            greedy=self.greedy,
            toolbox=self.toolbox,
        )
        for turn, results in zip(trajectory.turns, trajectory.tool_results, strict=False):
            yield from (f"[call] {call.name} {call.arguments}" for call in turn.parsed.calls)
            yield from (f"[result] {result.content}" for result in results)
        last = trajectory.turns[-1].parsed
        if last.thinking:
            yield f"[thinks] {last.thinking}"
        yield last.answer
        self.messages.append({"role": "assistant", "content": last.answer})

    def schemas(self, question: str) -> list[dict[str, Any]]:
        """What the model reads of the offered tools; the simulated ones are described in the language of the first question."""
        first = self.messages[0]["content"] if self.messages else question
        language = "zh" if re.search(f"[{CJK}]", first) else "en"
        return [
            dict(self.toolbox.tools[name].schema) if name in self.toolbox.own else tool_schema(name, language)
            for name in self.offered
        ]


def chosen_tools(toolbox: Toolbox, names: Sequence[str], *, every: bool) -> list[str]:
    """The tools to offer: those named, or all there are.

    Raises:
        DataError: no such tool.
    """
    if unknown := [name for name in names if name not in toolbox.tools]:
        raise DataError(f"--tool {unknown[0]}: no such tool; known are {', '.join(toolbox.tools)}")
    return list(toolbox.tools) if every else list(dict.fromkeys(names))


def converse(conversation: Conversation, questions: Iterable[str]) -> Iterator[str]:
    """Lines to print for a stream of questions; empty ones are passed over, those that are no text are named.

    Args:
        questions: lines; bytes that could not be decoded stand in them as lone surrogates (`surrogateescape`).
    """
    for number, question in enumerate(questions, start=1):
        if any("\ud800" <= character <= "\udfff" for character in question):
            yield f"(line {number} was not asked: it is not {sys.stdin.encoding} text; {ascii(question.strip()[:40])})"
        elif question.strip():
            yield from conversation.ask(question.strip())
