"""The processes that a stage belongs to: when one of them is gone, however far up, nobody waits for its result.

The kernel's parent-death signal reaches one generation: a flow that is killed leaves `dvc` alive, and `dvc` its trainer. So a
process that starts others hands down who it is, and who it belongs to itself, and a stage looks at all of them.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

VARIABLE = "MINIMIND_ANCESTORS"
POLL_S = 2.0
_ROUNDING_S = 0.02  # a start is told in hundredths


class Ancestor(NamedTuple):
    """A process by number and start (of `began`): numbers are given again."""

    pid: int
    began: float

    @classmethod
    def of(cls, pid: int) -> "Ancestor":
        """The process that has this number now.

        Raises:
            psutil.NoSuchProcess: none has.
        """
        return cls(pid, began(pid))

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs; one that ended and that nobody waited for (a zombie) does not."""
        try:
            same = abs(began(self.pid) - self.began) < _ROUNDING_S
            return same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def began(pid: int) -> float:
    """When the process that has this number now began: on Linux in seconds since boot, elsewhere in Unix time.

    psutil tells Unix time on Linux, too: it adds the time of the boot, which moves with every step of the clock, and no process
    began at another moment for that.

    Raises:
        psutil.NoSuchProcess: none has.
    """
    if not sys.platform.startswith("linux"):
        return psutil.Process(pid).create_time()
    try:
        said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    after_name = said.rpartition(")")[2].split()  # proc(5): a name may hold anything; from field 3 on
    return int(after_name[22 - 3]) / os.sysconf("SC_CLK_TCK")


def inherited() -> list[Ancestor]:
    """The processes that this one was told to belong to; what is not well-formed is no ancestor."""
    found = []
    for entry in os.environ.get(VARIABLE, "").split(","):
        pid, _, start = entry.partition(":")
        try:
            found.append(Ancestor(int(pid), float(start)))
        except ValueError:
            continue
    return found


def handed_down() -> dict[str, str]:
    """The environment variable that makes a child belong to this process and to all that this one belongs to."""
    own = Ancestor.of(os.getpid())
    return {VARIABLE: ",".join(f"{pid}:{start}" for pid, start in [*inherited(), own])}


@contextmanager
def watched(ancestors: Sequence[Ancestor], on_death: Callable[[], None]) -> Iterator[None]:
    """Looks at the ancestors every `POLL_S` s from a thread; calls `on_death` once when one is gone, never after the block."""
    done = threading.Event()

    def look() -> None:
        while all(ancestor.is_alive for ancestor in ancestors):
            if done.wait(POLL_S):
                return
        on_death()

    if not ancestors:
        yield
        return
    looker = threading.Thread(target=look, name="ancestors", daemon=True)
    looker.start()
    try:
        yield
    finally:
        done.set()
        looker.join()  # what it does on a death has no place after the block
