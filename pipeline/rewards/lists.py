"""Whether a reply lists candidates instead of answering."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from pipeline.rewards.evidence import Finding, all_quantities, is_rounding
from pipeline.rewards.rules import CJK
from pipeline.rewards.verify import as_number, normalised, quantities

MAX_OTHERS_PER_ANSWER = 4
MAX_RETOLD_PER_ANSWER = 6
MAX_ITEMS_PER_ANSWER = 6
QUANTITIES_PER_RESULT = 8  # a date spelled out has six
ITEM_CHARS = 24

_NUMBERING = re.compile(r"(?m)^[^\S\n]*+(?:\d+[.、)](?!\d)|[-*•])")
_MARK = re.compile(
    rf"(?P<list>[、，;；/|\n]|,(?!\d)|\bor\b|或者?)|(?P<stop>[。！？!?]|\.(?!\d))|(?P<space>(?<=[{CJK}])\s+(?=[{CJK}]))",
    re.IGNORECASE,
)


def is_list(gt: Sequence[str], answer: str, *, asked: str, found: Sequence[Finding]) -> bool:
    """Whether the answer lists candidates.

    Per expected answer it may hold 4 quantities (numbers, times, dates, versions) that are neither expected nor in the question
    nor in a result (rounded or not), retell 6 results, and hold no enumeration of more than 6 texts with the expected one.

    Args:
        gt: expected answers.
        answer: the final answer.
        asked: what the user wrote.
        found: the successful calls.
    """
    said = set(quantities(answer)).difference(quantities(asked), *map(quantities, gt))
    retold = {frozenset(said & finding.quantities) for finding in found}
    num_retold = sum(-(-len(part) // QUANTITIES_PER_RESULT) for part in retold)
    return (
        len(others(gt, answer, asked=asked, found=found)) > MAX_OTHERS_PER_ANSWER * len(gt)
        or num_retold > MAX_RETOLD_PER_ANSWER * len(gt)
        or any(_enumerates(expected, answer, asked, MAX_ITEMS_PER_ANSWER * len(gt)) for expected in gt)
    )


def others(gt: Sequence[str], answer: str, *, asked: str, found: Sequence[Finding]) -> set[float | str]:
    """The quantities of the answer that are neither expected nor in the question nor in a result, rounded or not."""
    known = {quantity for finding in found for quantity in finding.quantities}
    exact = [quantity for quantity in known if not isinstance(quantity, str)]
    rest = set(quantities(answer)).difference(all_quantities(asked), known, *map(quantities, gt))
    return {one for one in rest if isinstance(one, str) or not any(is_rounding(one, number) for number in exact)}


def _enumerates(expected: str, answer: str, asked: str, most: int) -> bool:
    """Whether an expected text is one of more than `most` short items between marks of one kind.

    Clauses and sentences of a polite reply are no enumeration: the answer is part of one of them, but not all of it. Items
    that all say the same around it (`it may be rain, it may be snow`) are. Numbers have rules of their own.
    """
    key, question = normalised(expected), normalised(asked)
    if as_number(expected) is not None or not key:
        return False
    for run in _runs(_NUMBERING.sub("", answer)):
        items = {normalised(item).strip(" *'\"“”‘’") for item in run if len(item.strip()) <= ITEM_CHARS}
        items = {item for item in items if item and item not in question and not re.search(r"\d", item)}
        for item in items:
            head, there, tail = item.partition(key)
            if there and sum(one.startswith(head) and one.endswith(tail) for one in items) > most:
                return True
    return False


def _runs(text: str) -> Iterator[list[str]]:
    """The items of each stretch of the text that marks of one kind part."""
    items, kinds, start = [], [], 0
    for mark in _MARK.finditer(text):
        item = text[start : mark.start()]
        start = mark.end()
        if item.strip():
            items.append(item)
            kinds.append(mark.lastgroup)
    items.append(text[start:])
    place = 0
    for _, kind in groupby(kinds):
        length = len(list(kind))
        yield items[place : place + length + 1]
        place += length
