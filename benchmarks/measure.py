"""Rates of several ways to do the same work, taken in turns so that a machine's moods strike all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], float]
"""Does the work once and says how much it was, in the benchmark's unit (tokens, pairs, steps)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Units per second of one way, one per repeat."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the range between the slowest and the fastest repeat over the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median


def interleaved(ways: Mapping[str, Work], *, repeats: int, device: torch.device) -> dict[str, Rates]:
    """Runs every way once to warm up, then all of them in turns.

    Args:
        ways: by name; each call is one repeat.
        repeats: >= 1.
        device: waited for before a clock is read.
    """
    for work in ways.values():
        work()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            amount, seconds = timed(work, device)
            rates[name].append(amount / seconds)
    return {name: Rates(values) for name, values in rates.items()}


def timed(work: Work, device: torch.device) -> tuple[float, float]:
    """What `work` returned, and its seconds."""
    settle(device)
    started = time.perf_counter()
    amount = work()
    settle(device)
    return amount, time.perf_counter() - started


def settle(device: torch.device) -> None:
    """Waits until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
