"""Prompts and tasks for the stages that sample: drawn, encoded and batched from a prepared set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.draws import permutation, uniforms
from pipeline.data.prepared import iter_prepared, read_report, refuse_many_dropped
from pipeline.text.chat import ChatEncoder, Message
from pipeline.text.system_prompts import SYSTEM_PROMPTS
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class PromptTask:
    """One prompt to complete.

    Attributes:
        row: its number (from 0) among the kept rows of the split; with seed and step it keys the sampling.
        prompt_ids: the encoded conversation with the generation prompt.
        open_thinking: True when the generation prompt leaves the think block open.
        messages: the conversation, an added system prompt included.
        tools: the offered function objects, or None.
        gt: the expected answers; empty for plain prompts.
    """

    row: int
    prompt_ids: list[int]
    open_thinking: bool
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    gt: list[str]


class PromptSet:
    """The prompts of a split of rlaif or agent (stages ppo, grpo, agent, and evaluation)."""

    def __init__(
        self,
        prepared: Path,
        split: str,
        *,
        batch_size: int,
        seed: int,
        tokenizer: Tokenizer,
        max_prompt_len: int,
        max_dropped_frac: float,
        thinking_ratio: float,
        system_prompt_frac: float = 0.0,
        toolbox: Toolbox | None = None,
        beside: str | None = None,
    ) -> None:
        """Reads all rows; those whose longest variant does not fit are dropped, and those whose tools nothing answers.

        Args:
            prepared: the folder that `prepare` wrote.
            split: `train` or `held_out`.
            batch_size: prompts per batch; the last batch of an epoch may be smaller.
            seed: with the epoch it decides order, thinking and system prompts.
            tokenizer: what turns text into ids.
            max_prompt_len: the longest prompt in tokens, generation prompt included.
            max_dropped_frac: the largest share of dropped rows, in [0, 1].
            thinking_ratio: chance per row and epoch of an open think block.
            system_prompt_frac: chance per row and epoch that a prompt without system message (so without tools) is given one.
            toolbox: what answers calls; None where none are answered.
            beside: the parameter that leaves `max_prompt_len` tokens of the window, where that is none of its own.

        Raises:
            DataError: more rows dropped than allowed, or all of them.
        """
        self._encoder = ChatEncoder(tokenizer)
        self._batch_size, self._seed = batch_size, seed
        self._thinking_ratio, self._system_prompt_frac = thinking_ratio, system_prompt_frac
        report = read_report(prepared)
        longest = max(SYSTEM_PROMPTS, key=lambda prompt: len(self._encoder.encode_system(prompt)))
        self._rows: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        limit, longer = f"max_prompt_len={max_prompt_len}", "raise the stage's max_prompt_len"
        if beside is not None:
            limit, longer = f"the {max_prompt_len} that {beside} leaves of the window", f"lower {beside}"
        remedies = []
        for row in iter_prepared(prepared, split):
            fault, remedy = None, f"shorten or remove them, or {longer}"
            if (length := self._longest_variant(row, longest)) > max_prompt_len:
                fault = f"{length} tokens > {limit}"
            elif toolbox and row["tools"] and (fault := toolbox.offer_fault(row["tools"])):
                remedy = "offer tools as the toolbox has them, or add them to the file of tools.extra"
            if fault is None:
                self._rows.append(row)
                continue
            self.dropped.append(f"{report['source']}:{row['line']}: {fault}")
            remedies.append(remedy)
        remedy = "; ".join(dict.fromkeys(remedies))
        total = len(self._rows) + len(self.dropped)
        refuse_many_dropped(f"{report['set']} ({split})", self.dropped, total, max_dropped_frac, remedy)
        self.batches_per_epoch = -(-len(self._rows) // batch_size)
        self._plan: tuple[int, list[int], list[bool], list[str | None]] | None = None

    def __len__(self) -> int:
        """How many rows were kept."""
        return len(self._rows)

    def batch(self, epoch: int, index: int) -> list[PromptTask]:
        """Batch `index` (0 <= index < batches_per_epoch) of an epoch: a function of the seed and its arguments."""
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of {self.batches_per_epoch}")
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, *self._draw(epoch)
        _, order, thinking, systems = self._plan
        rows = order[index * self._batch_size : (index + 1) * self._batch_size]
        return [self._task(row, thinking[row], systems[row]) for row in rows]

    def _draw(self, epoch: int) -> tuple[list[int], list[bool], list[str | None]]:
        size = len(self._rows)
        order = permutation(self._seed, epoch, "rows", size).tolist()
        thinking = (uniforms(self._seed, epoch, "thinking", size) < self._thinking_ratio).tolist()
        given = uniforms(self._seed, epoch, "system", size) < self._system_prompt_frac
        choice = (uniforms(self._seed, epoch, "which system", size) * len(SYSTEM_PROMPTS)).astype(int)
        systems = [SYSTEM_PROMPTS[choice[row]] if given[row] and _takes_system(self._rows[row]) else None for row in range(size)]
        return order, thinking, systems

    def _task(self, number: int, open_thinking: bool, system: str | None) -> PromptTask:
        row = self._rows[number]
        messages, tools = _with_system(row["conversations"], system), row["tools"]
        prompt_ids = self._encoder.encode_prompt(messages, tools, open_thinking=open_thinking)
        return PromptTask(number, prompt_ids, open_thinking, messages, tools, row["gt"])

    def _longest_variant(self, row: dict[str, Any], longest_system: str) -> int:
        system = longest_system if self._system_prompt_frac > 0 and _takes_system(row) else None
        messages = _with_system(row["conversations"], system)
        return max(
            len(self._encoder.encode_prompt(messages, row["tools"], open_thinking=open_thinking))
            for open_thinking in ((False, True) if self._thinking_ratio > 0 else (False,))
        )


def _takes_system(row: dict[str, Any]) -> bool:
    return bool(row["conversations"][0]["role"] != "system")


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]
