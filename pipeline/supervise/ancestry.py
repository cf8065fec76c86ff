"""The processes that a stage belongs to: when one of them is gone, however far up, nobody waits for its result.

The kernel's parent-death signal reaches one generation: a flow that is killed leaves `dvc` alive, and `dvc` its trainer. So a
process that starts others hands down who it is, and who it belongs to itself, and a stage looks at all of them.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psutil

VARIABLE = "MINIMIND_ANCESTORS"
POLL_S = 2.0
_CLOCK_S = 2.0  # a start time is told again with the boot time's rounding


class Ancestor(NamedTuple):
    """A process by number and start: numbers are given again."""

    pid: int
    started_s: float

    @classmethod
    def of(cls, pid: int) -> "Ancestor":
        """The process that has this number now.

        Raises:
            psutil.NoSuchProcess: none has.
        """
        return cls(pid, psutil.Process(pid).create_time())

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs; one that ended and that nobody waited for (a zombie) does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_s) < _CLOCK_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def inherited() -> list[Ancestor]:
    """The processes that this one was told to belong to; what is not well-formed is no ancestor."""
    found = []
    for entry in os.environ.get(VARIABLE, "").split(","):
        pid, _, started = entry.partition(":")
        try:
            found.append(Ancestor(int(pid), float(started)))
        except ValueError:
            continue
    return found


def handed_down() -> dict[str, str]:
    """The environment variable that makes a child belong to this process and to all that this one belongs to."""
    own = Ancestor.of(os.getpid())
    return {VARIABLE: ",".join(f"{pid}:{started_s}" for pid, started_s in [*inherited(), own])}


@contextmanager
def watched(ancestors: Sequence[Ancestor], on_death: Callable[[], None]) -> Iterator[None]:
    """Looks at the ancestors every `POLL_S` seconds from a thread of its own; calls `on_death` once when one is gone."""
    done = threading.Event()

    def look() -> None:
        while all(ancestor.is_alive for ancestor in ancestors):
            if done.wait(POLL_S):
                return
        on_death()

    if ancestors:
        threading.Thread(target=look, name="ancestors", daemon=True).start()
    try:
        yield
    finally:
        done.set()
