"""A conversation with a trained model in the terminal."""

import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pipeline.data.prompts import PromptTask
from pipeline.model.transformer import CausalLM
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.truncation import Truncation
from pipeline.text.chat import ChatEncoder, Message
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.registry import TOOL_NAMES, tool_schema
from pipeline.training.device import Device
from pipeline.training.policy_setup import open_engine

MAX_TURNS = 4
TURN_TOKENS = 512


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how replies are sampled.

    Attributes:
        thinking: whether the model is asked to think before it answers.
        tools: whether it is offered the six simulated tools.
        greedy: always the most probable token; otherwise sampled at `temperature`.
        truncation: what is ruled out of the distribution; None for nothing.
    """

    model: CausalLM
    tokenizer: Tokenizer
    device: Device
    temperature: float
    thinking: bool = False
    tools: bool = False
    greedy: bool = False
    truncation: Truncation | None = None
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """The lines of a reply: tool calls with their results as they happened, then the answer; both sides are remembered."""
        encoder = ChatEncoder(self.tokenizer)
        offered = [tool_schema(name) for name in TOOL_NAMES] if self.tools else None
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
        )
        for turn, results in zip(trajectory.turns, trajectory.tool_results, strict=False):
            yield from (f"[call] {call.name} {call.arguments}" for call in turn.parsed.calls)
            yield from (f"[result] {result.content}" for result in results)
        last = trajectory.turns[-1].parsed
        if last.thinking:
            yield f"[thinks] {last.thinking}"
        yield last.answer
        self.messages.append({"role": "assistant", "content": last.answer})


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
