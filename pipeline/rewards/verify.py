"""Whether a reply contains the expected answers: numbers as numbers, everything else as text."""

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from pipeline.rewards.rules import CJK

TOLERANCE = 1e-6
MAX_NUMBER_CHARS = 40  # longer runs of digits are degenerate output, not answers

# Full-width digits, stops and signs. The full-width comma and colon stay: they separate clauses, not thousands or minutes.
_DASHES = str.maketrans(dict.fromkeys("－−﹣\u2010\u2011\u2012\u2013", "-"))  # hyphens and the en dash; the em dash parts clauses
_HALF_WIDTH = _DASHES | str.maketrans("０１２３４５６７８９．＋’＄￡￥", "0123456789.+'$£¥")
_CURRENCY = "[$£¥€]"  # a sign may stand before it: -$42
_GROUPING = "[,'\u00a0\u2009\u202f]"  # between thousands; a plain space parts numbers
_LETTER = rf"[^\W{CJK}]"  # of an alphabet, or a digit
_NO_SIGN_BEFORE = rf"(?<!{_LETTER})(?<![)\].%+-])"  # a minus there is one of a difference, a range or a bullet
_CLUSTER = re.compile("(?s).[\u0300-\u036f\u3099\u309a\uff9e\uff9f]*")  # a character and the marks that combine with it
_NUMBER = re.compile(
    rf"""(?: \d{{1,2}}:\d\d(?::\d\d)?(?!\d) | \d{{4}}([-/])\d\d?\1\d\d?(?!\d) | \d+(?:\.\d+){{2,}} )  # time, date, version
      | (?P<number>
            (?:{_NO_SIGN_BEFORE}[+-]{_CURRENCY}?)?
            (?: (?: \d{{1,3}}(?:{_GROUPING}\d{{3}})+(?!\d) | \d+ ) (?:\.\d+)?  # thousands or plain digits, a fraction
              | (?<![0-9.])(?<!{_LETTER})\.\d+ )                           # the stop of No.5 ends a word
            (?: [eE][+-]?\d{{1,3}}(?![0-9A-Za-z_]) )?
        )""",
    re.VERBOSE,
)

Number = int | float
Span = tuple[int, int]


def verify(expected: Sequence[str], text: str) -> list[bool]:
    """Which of the expected answers the text contains.

    Numbers are equal as numbers, whatever stands beside them: `9,472`, `9472.` and `结果是9472元` all hold 9472, but `2025`, `15`
    and `5.3` do not hold 5, nor does `-5`. Where one of the two is a whole number they may differ by a millionth, otherwise by a
    millionth of their size. Any other answer must occur literally, ignoring case, width, the kind of dash, the amount of white
    space and any between a number and its unit, and as whole words where its ends are letters or digits of an alphabet.

    No two answers share a place of the text: one expected twice must be there twice, and `晴` is not found in the `晴朗` that
    serves another. Texts choose first, the longest of all first: what a short one could take from a long one is no place of its
    own, while a long one never has another. A text contains numbers (`28°C`), never the other way round.

    Args:
        expected: the answers; an empty one is never found.
        text: the final answer alone: without thinking, tool calls and echoed tool results.

    Returns:
        One flag per expected answer, in order.
    """
    text = unicodedata.normalize("NFC", text)
    values = [as_number(answer) for answer in expected]
    keys = [normalised(answer) if value is None else "" for answer, value in zip(expected, values, strict=True)]
    found = [False] * len(expected)
    taken: list[Span] = []

    def take(place: int, spans: Iterable[Span]) -> None:
        free = (span for span in spans if all(span[1] <= start or end <= span[0] for start, end in taken))
        if (span := next(free, None)) is not None:
            taken.append(span)
            found[place] = True

    if any(keys):
        characters, spans = _mapped(text)
        for place in sorted(range(len(keys)), key=lambda place: -len(keys[place])):
            if keys[place]:
                matches = _pattern(keys[place]).finditer(characters)
                take(place, ((spans[match.start()][0], spans[match.end() - 1][1]) for match in matches))
    there = list(_numbers(text))
    for place, value in enumerate(values):
        if value is not None:
            take(place, (span for number, span in there if equal(number, value)))
    return found


def numbers(text: str) -> list[Number]:
    """All numbers of a text in order; times, dates and version numbers hold none."""
    return [number for number, _ in _numbers(text)]


def _numbers(text: str) -> Iterator[tuple[Number, Span]]:
    for match in _NUMBER.finditer(text.translate(_HALF_WIDTH)):
        digits = match["number"]
        if digits and len(digits) <= MAX_NUMBER_CHARS:
            value = _value(digits)
            if math.isfinite(value):
                yield value, match.span()


def quantities(text: str) -> list[Number | str]:
    """All numbers of a text, and its times, dates and version numbers as text, in no particular order."""
    return [*numbers(text), *(m[0] for m in _NUMBER.finditer(text.translate(_HALF_WIDTH)) if not m["number"])]


def as_number(answer: str) -> Number | None:
    """The number that an answer is, None where it is anything else."""
    match = _NUMBER.fullmatch(answer.translate(_HALF_WIDTH).strip())
    if not (match and match["number"]) or len(match["number"]) > MAX_NUMBER_CHARS:
        return None
    value = _value(match["number"])
    return value if math.isfinite(value) else None


def equal(a: Number, b: Number) -> bool:
    """Whether two numbers are the same answer: whole numbers exactly, apart from the noise of floats."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    close = math.isclose(a, b, rel_tol=TOLERANCE)
    return close and (abs(a - b) <= TOLERANCE or isinstance(a, float) and isinstance(b, float))


def normalised(text: str) -> str:
    """The text as texts are compared: case, width, dashes and the amount of white space do not matter."""
    return _mapped(unicodedata.normalize("NFC", text))[0].strip()


def _value(digits: str) -> Number:
    digits = re.sub(f"{_GROUPING}|{_CURRENCY}", "", digits)
    if re.fullmatch(r"[+-]?\d+", digits):
        return int(digits)
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _mapped(text: str) -> tuple[str, list[Span]]:
    """The normalised characters, and where in the text each of them stands."""
    characters: list[str] = []
    spans: list[Span] = []
    for cluster in _CLUSTER.finditer(text):
        for character in unicodedata.normalize("NFKC", cluster[0].translate(_DASHES)).casefold():
            if not character.isspace():
                characters.append(character)
                spans.append(cluster.span())
            elif characters[-1:] != [" "]:
                characters.append(" ")
                spans.append(cluster.span())
    return "".join(characters), spans


def _pattern(key: str) -> re.Pattern[str]:
    """Finds normalised text; an end that is a letter of an alphabet or a digit must also end a word there."""
    before = rf"(?<!{_LETTER})" if _is_word(key[0]) else ""
    after = rf"(?!{_LETTER})" if _is_word(key[-1]) else ""
    if re.match(rf"{_CURRENCY}?\d", key):  # 5°C is neither in 3.5°C nor in -5°C, but in 1-5°C
        before += rf"(?<!\d[.,:])(?:(?<!-)|(?<={_LETTER}-)|(?<=[)\].%+-]-))"
    if key[-1].isdigit():
        after += r"(?![.,]\d)"  # 14:30 is in 14:30:00
    parts = re.split(r"(?<=\d) ?(?=[^\W\d_]|[°%‰])", key)  # a number and its unit
    return re.compile(before + " ?".join(map(re.escape, parts)) + after)


def _is_word(character: str) -> bool:
    return re.fullmatch(_LETTER, character) is not None
