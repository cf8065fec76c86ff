"""Whether a reply contains the expected answers: numbers as numbers, everything else as text."""

import math
import re
import unicodedata
from collections.abc import Sequence

from pipeline.rewards.rules import CJK

RELATIVE_TOLERANCE = 1e-6
MAX_NUMBER_CHARS = 40  # longer runs of digits are degenerate output, not answers

# Full-width digits, stops and signs. The full-width comma and colon stay: they separate clauses, not thousands or minutes.
_HALF_WIDTH = str.maketrans("０１２３４５６７８９．＋－−﹣", "0123456789.+---")
_NUMBER = re.compile(
    r"""(?: \d{1,2}:\d\d(?::\d\d)?(?!\d) | \d{4}([-/])\d\d?\1\d\d?(?!\d) | \d+(?:\.\d+){2,} )  # time, date, version
      | (?P<number>
            (?:(?<![0-9A-Za-z_)\].%+-])[+-])?                    # a sign, not the minus of a difference, a range or a bullet
            (?: (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)?    # thousands or plain digits; a stop after them ends a sentence
              | (?<![0-9.])\.\d+ )
            (?: [eE][+-]?\d{1,3}(?![0-9A-Za-z_]) )?
        )""",
    re.VERBOSE,
)


def verify(expected: Sequence[str], text: str) -> list[bool]:
    """Which of the expected answers the text contains.

    Numbers are equal as numbers, whatever stands beside them: `9,472`, `9472.` and `结果是9472元` all hold 9472, but `2025`, `15`
    and `5.3` do not hold 5, nor does `-5`. Integers must be equal; others may differ by a millionth. Any other answer must
    occur literally, ignoring case, width and the amount of white space, and as whole words where its ends are letters or digits
    of the Latin script. Every occurrence counts once: an answer expected twice must be there twice.

    Args:
        expected: the answers; an empty one is never found.
        text: the final answer alone: without thinking, tool calls and echoed tool results.

    Returns:
        One flag per expected answer, in order.
    """
    left = numbers(text)
    normalised = _normalised(text)
    used: dict[str, int] = {}
    found = []
    for answer in expected:
        value = as_number(answer)
        if value is None:
            key = _normalised(answer)
            used[key] = used.get(key, 0) + 1
            found.append(bool(key) and _count(key, normalised) >= used[key])
            continue
        match = next((number for number in left if _equal(number, value)), None)
        found.append(match is not None)
        if match is not None:
            left.remove(match)
    return found


def numbers(text: str) -> list[int | float]:
    """All numbers of a text in order; times, dates and version numbers hold none."""
    found: list[int | float] = []
    for match in _NUMBER.finditer(text.translate(_HALF_WIDTH)):
        digits = match["number"]
        if digits and len(digits) <= MAX_NUMBER_CHARS:
            value = _value(digits)
            if math.isfinite(value):
                found.append(value)
    return found


def quantities(text: str) -> list[int | float | str]:
    """All numbers of a text, and its times, dates and version numbers as text, in no particular order."""
    return [*numbers(text), *(m[0] for m in _NUMBER.finditer(text.translate(_HALF_WIDTH)) if not m["number"])]


def as_number(answer: str) -> int | float | None:
    """The number that an answer is, None where it is anything else."""
    match = _NUMBER.fullmatch(answer.translate(_HALF_WIDTH).strip())
    return _value(match["number"]) if match and match["number"] else None


def _value(digits: str) -> int | float:
    digits = digits.replace(",", "")
    if re.fullmatch(r"[+-]?\d+", digits):
        return int(digits)
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _equal(a: int | float, b: int | float) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE)


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _count(answer: str, text: str) -> int:
    """Occurrences of normalised text; an end that is a Latin letter or a digit must also end a word there."""
    before = rf"(?<![^\W{CJK}])" if _is_word(answer[0]) else ""
    after = rf"(?![^\W{CJK}])" if _is_word(answer[-1]) else ""
    if answer[0].isdigit():  # 5°C is neither in 3.5°C nor in -5°C
        before += r"(?<!\d[.,:])(?<!-)"
    if answer[-1].isdigit():
        after += r"(?![.,]\d)"  # 14:30 is in 14:30:00
    return len(re.findall(before + re.escape(answer) + after, text))


def _is_word(character: str) -> bool:
    return re.fullmatch(rf"[^\W{CJK}]", character) is not None
