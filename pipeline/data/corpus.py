"""The text a tokenizer is trained on: documents, and chats as the template renders them, cut at control tokens."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pipeline.data.prepared import iter_prepared
from pipeline.text.chat import render_chat
from pipeline.text.tokenizer import CONTROL_TOKENS

_CONTROL = re.compile("|".join(re.escape(text) for text, _ in CONTROL_TOKENS))


def corpus_texts(prepared: Path, max_rows: int) -> Iterator[str]:
    """Texts of the first `max_rows` training rows of a text or chat set.

    Tool schemas, tool calls and reasoning are in it (MiniMind's corpus has message contents only): they are what an agent's
    context mostly consists of, so they should not cost one token per character.
    """
    for row in islice(iter_prepared(prepared, "train"), max_rows):
        if "text" in row:
            yield row["text"]
        else:
            yield from filter(None, _CONTROL.split(render_chat(row["conversations"], row["tools"])))
