"""How well a tokenizer fits a text: compression, round trip, and a table of pieces to look at."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from pipeline.text.tokenizer import Tokenizer

PROBES = (
    "你好，请介绍一下你自己。",
    "The capital of France is Paris.",
    "计算 12+34 = 46",
    '{"name": "calculate_math", "arguments": {}}',
)


def tokenizer_metrics(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics over `texts` (vocabulary size, compression, share that survives a round trip) and sample rows."""
    texts = list(texts)
    encoded = tokenizer.encode_texts(texts)
    tokens = max(sum(map(len, encoded)), 1)
    intact = sum(tokenizer.decode(ids, skip_special=False) == text for ids, text in zip(encoded, texts, strict=True))
    metrics = {
        "tokenizer/vocab_size": float(tokenizer.vocab_size),
        "tokenizer/bytes_per_token": sum(len(text.encode("utf-8")) for text in texts) / tokens,
        "tokenizer/chars_per_token": sum(map(len, texts)) / tokens,
        "tokenizer/round_trip_frac": intact / max(len(texts), 1),
    }
    samples = [
        {
            "step": 0,
            "prompt": text,
            "completion": " | ".join(tokenizer.decode([token], skip_special=False) for token in tokenizer.encode_text(text)),
        }
        for text in (*PROBES, *islice(texts, 4))
    ]
    return metrics, samples
