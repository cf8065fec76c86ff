"""Whatever a policy writes, taking it apart takes time in proportion to its length."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.rewards import lists, minimind, rules
from pipeline.rewards.verify import numbers, quantities, verify
from pipeline.rollout.records import without_tool_blocks
from pipeline.text.turns import parse_turn

PARSERS: dict[str, Callable[[str], Any]] = {
    "turn": lambda text: parse_turn(text, open_thinking=False),
    "tool blocks": without_tool_blocks,
    "repetition": rules.repetition,
    "numbers": numbers,
    "quantities": quantities,
    "verify": lambda text: verify(["5", "Paris"], text),
    "list": lambda text: lists.is_list(["Paris"], text, asked="where?", found=[]),
    "minimind's calls": minimind.parse_calls,
    "minimind's repetition": minimind.repetition,
}
UNITS = [
    "\n",
    " ",
    "< ",
    "<",
    "<tool_call>",
    "<think>",
    "</think>",
    "1",
    "1.",
    "1,",
    "-",
    "a",
    "ab",
    "a ",
    "Paris, ",
    "\n- ",
    "{",
    "。",
    "7:",
]
LENGTH, GROWTH = 4_000, 4


@pytest.mark.parametrize("name", PARSERS)
def test_time_grows_with_the_length_and_no_faster(name: str) -> None:
    for unit in UNITS:
        short, long = (seconds(PARSERS[name], unit * (length // len(unit)) + "x") for length in (LENGTH, LENGTH * GROWTH))
        assert long < 2.5 * GROWTH * short + 0.02, (unit, short, long)


def seconds(parse: Callable[[str], Any], text: str) -> float:
    """The least of three, of this process alone: the machine may be busy."""

    def once() -> float:
        began = time.process_time()
        parse(text)
        return time.process_time() - began

    return min(once() for _ in range(3))
