"""Samples of several runs side by side: what each answered to the same prompt at the same step."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

_TOLD = ("step", "prompt", "completion")
_ASKED = ("model", "task", "prompt")

Row = Mapping[str, Any]
_Question = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where answers part.

    Attributes:
        at: the character with which the first difference begins.
        token: its token, from 1; None where only characters are known.
        texts: that token of each answer, empty for one that has ended; none where only characters are known.
    """

    at: int
    token: int | None = None
    texts: tuple[str, ...] = ()


Part = Callable[[Sequence[Row]], Parting | None]
"""Where rows, one per run, part; None when they are equal."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run generated.

    Attributes:
        step: when.
        text: the completion.
        facts: reward, its terms, advantage, stop reason and whatever else its row holds.
    """

    step: int
    text: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Aligned:
    """One prompt and an answer of each run.

    Attributes:
        prompt: as it was sampled from.
        subject: which model or task, where one run asks for several; else empty.
        answers: one per run.
        parting: where they part; None when they are equal.
    """

    prompt: str
    subject: str
    answers: tuple[Answer, ...]
    parting: Parting | None


def align(tables: Sequence[Iterable[Row]], part: Part | None = None) -> list[Aligned]:
    """Pairs up the rows of the runs' sample tables, in the order of the first run.

    Rows belong together when prompt and step are equal; the n-th row of a prompt in a step (reinforcement samples several) goes
    with the n-th. A prompt that the runs share at no step is compared at each one's last.

    Args:
        tables: per run, rows with `step`, `prompt` and `completion`.
        part: what finds where rows that belong together part; by character when left out.
    """
    sides = [_by_question(table) for table in tables]
    if not sides:
        return []
    found = []
    for question, own in sides[0].items():
        others = [side.get(question) for side in sides[1:]]
        if all(others):
            every = [own, *(other for other in others if other)]
            shared = [step for step in own if all(step in rows for rows in every)]
            picks = [[rows[step] for rows in every] for step in shared] or [[rows[max(rows)] for rows in every]]
            found += [_aligned(question, rows, part or _part_by_character) for rows in picks]
    return sorted(found, key=lambda each: each.answers[0].step)  # stable: prompts stay in order


def _by_question(rows: Iterable[Row]) -> dict[_Question, dict[int, Row]]:
    """Question (model, task, prompt, how often it came before in the step) -> step -> row."""
    found: dict[_Question, dict[int, Row]] = {}
    times: Counter[tuple[int, _Question]] = Counter()
    for row in rows:
        asked = tuple(str(row.get(name, "")) for name in _ASKED)
        found.setdefault((*asked, str(times[row["step"], asked])), {})[row["step"]] = row
        times[row["step"], asked] += 1
    return found


def _aligned(question: _Question, rows: Sequence[Row], part: Part) -> Aligned:
    answers = tuple(Answer(row["step"], text_of(row), dict(_facts(row))) for row in rows)
    return Aligned(_text(question[2]), " ".join(filter(None, question[:2])), answers, part(rows))


def _part_by_character(rows: Sequence[Row]) -> Parting | None:
    texts = [text_of(row) for row in rows]
    same = common_prefix(texts)
    return None if all(len(text) == same for text in texts) else Parting(same)


def common_prefix(sequences: Sequence[Sequence[Any]]) -> int:
    """How many elements are the same at the beginning of all."""
    return sum(1 for _ in takewhile(lambda column: all(each == column[0] for each in column), zip(*sequences, strict=False)))


def text_of(row: Row) -> str:
    """The completion of a row."""
    return _text(row.get("completion"))


def _text(value: Any) -> str:
    """A sample's text without lone surrogates, which cut generations hold and no file can."""
    return str(value or "").encode("utf-8", errors="replace").decode("utf-8")


def _facts(row: Row) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in row.items() if key not in (*_TOLD, *_ASKED) and value not in ("", None))
