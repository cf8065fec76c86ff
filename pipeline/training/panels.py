"""Sample tables of the supervised stages: the same held-out prompts at every validation, answered greedily."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.labels import IGNORED_LABEL
from pipeline.data.prepared import iter_prepared
from pipeline.model.transformer import CausalLM
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.device import Device
from pipeline.training.policy_setup import open_engine

PANEL_ROWS = 8
DOCUMENT_PROMPT_LEN = 16

Rows = list[dict[str, Any]]


def greedy_panel(
    model: CausalLM, tokenizer: Tokenizer, device: Device, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> Callable[[], Rows]:
    """A callable that answers `prompts` with the model's current weights: rows of prompt, completion, stop reason.

    Prompts that leave no room for `max_new_tokens` in the model's window are left out.
    """
    window = model.config.max_position_embeddings
    prompts = [prompt for prompt in prompts if len(prompt) + max_new_tokens <= window]
    engine = open_engine(model, tokenizer, device, max_rows=PANEL_ROWS)

    def rows() -> Rows:
        completions = engine.generate(
            prompts, keys=range(len(prompts)), max_new_tokens=max_new_tokens, temperature=1.0, greedy=True
        )
        return [
            {"prompt": tokenizer.decode_all(prompt), "completion": tokenizer.decode_all(done.ids), "stop": done.stop.value}
            for prompt, done in zip(prompts, completions, strict=True)
        ]

    return rows


def document_prompts(held_out: SupervisedBatches) -> list[list[int]]:
    """The openings of a few held-out documents, spread over their lengths."""
    rows = [
        ids[: min(length, DOCUMENT_PROMPT_LEN)]
        for batch in held_out.in_order()
        for ids, length in zip(batch.input_ids.tolist(), (batch.labels != IGNORED_LABEL).sum(dim=1).tolist(), strict=True)
    ]
    return rows[:: max(1, len(rows) // PANEL_ROWS)][:PANEL_ROWS]


def chat_prompts(prepared: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """A few held-out chats up to their first assistant turn, with the generation prompt."""
    encoder = ChatEncoder(tokenizer)
    prompts = []
    for row in islice(iter_prepared(prepared, "held_out"), PANEL_ROWS):
        roles = [message["role"] for message in row["conversations"]]
        prompts.append(encoder.encode_prompt(row["conversations"][: roles.index("assistant")], row["tools"]))
    return prompts


def pair_prompts(held_out: PairBatches) -> list[list[int]]:
    """What stands before the answers of a few held-out pairs."""
    prompts = []
    for batch in islice(held_out.in_order(), PANEL_ROWS):
        first_trained = int((batch.labels[0] != IGNORED_LABEL).int().argmax())
        prompts.append(batch.input_ids[0, : first_trained + 1].tolist())
    return prompts
