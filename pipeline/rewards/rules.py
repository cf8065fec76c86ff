"""Rules that read text alone: length, thinking, repetition."""

import math
import re
from collections.abc import Hashable, Sequence

from pipeline.params.schema import Rewards, Span
from pipeline.text.turns import ParsedTurn

REPETITION_CAP = 0.5
FREE_DUPLICATES = 0.15  # names, units and set phrases recur in honest text, too
NGRAM = 3
MAX_WORD = 16
MIN_STUTTER = 8

# Scripts written without spaces between words: kana, CJK ideographs (extensions A and B on) and compatibility forms.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_TOKEN = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
_STUTTER = re.compile(r"([^\W\d]{1,16}?)\1{2,}+")  # hahaha; of longer ones the search would take the square of their length
_SENTENCE_END = re.compile(r"[。！？；!?;\n]+|\.(?=\s|$)")


def clamped(value: float, bound: float) -> float:
    """The value between +- `bound`; NaN is the worst, which `min` and `max` would make the best."""
    return -bound if math.isnan(value) else max(-bound, min(bound, value))


def span_reward(text: str, span: Span) -> float:
    """`span.weight` when the text's length in characters lies in the closed span, otherwise `-span.penalty`.

    A run of white space counts as one character and none at the ends, so blank padding lengthens nothing.
    """
    inside = span.min_chars <= len(" ".join(text.split())) <= span.max_chars
    return span.weight if inside else -span.penalty


def thinking_reward(turn: ParsedTurn, params: Rewards) -> float:
    """Reward of the think block of a turn that was asked to think; never call it for one that was not.

    Two parts: the length of the thinking, and +-`think_close` for exactly one closing tag. A block that is never closed, or
    closed with nothing after it, fails both.
    """
    answered = turn.thinking is not None and bool(turn.answer)
    length = span_reward(turn.thinking, params.thinking) if answered and turn.thinking is not None else -params.thinking.penalty
    return length + (params.think_close if answered and turn.closed_once else -params.think_close)


def repetition(text: str) -> float:
    """How much a text repeats itself, in [0, 0.5]: the larger share of duplicates among its 3-grams or its sentences.

    A share up to 0.15 counts as none: an honest list of readings says its unit again and again.

    Tokens are single characters where no spaces separate words (Chinese, Japanese; "words" beyond 16 characters, and those that
    say letters three times in a row, 8 or more in all) and words or punctuation marks elsewhere, all lower-case. MiniMind's word
    n-grams take a whole Chinese run for one word and see none of its repetition. Sentences of a single token (list numbers,
    brackets) are not compared. A text of one token said three times or more is all repetition.
    """
    tokens = _tokens(text)
    if len(tokens) >= NGRAM and len(set(tokens)) == 1:
        return REPETITION_CAP
    trigrams = list(zip(*(tokens[offset:] for offset in range(NGRAM)), strict=False))
    sentences = [tuple(t for t in _tokens(part) if t.isalnum()) for part in _SENTENCE_END.split(text)]
    duplicates = max(_duplicate_frac(trigrams), _duplicate_frac([sentence for sentence in sentences if len(sentence) > 1]))
    return min(REPETITION_CAP, duplicates) if duplicates > FREE_DUPLICATES else 0.0


def _tokens(text: str) -> list[str]:
    tokens = []
    for token in _TOKEN.findall(text.lower()):
        tokens += list(token) if len(token) > MAX_WORD or _stutters(token) else [token]
    return tokens


def _stutters(word: str) -> bool:
    return len(word) >= MIN_STUTTER and any(len(match[0]) >= MIN_STUTTER for match in _STUTTER.finditer(word))


def _duplicate_frac(items: Sequence[Hashable]) -> float:
    return 1 - len(set(items)) / len(items) if items else 0.0
