"""Exclusive locks that die with their holder."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from pipeline.errors import HeldError, PipelineError
from pipeline.supervise.forks import undone_in_children

POLL_S = 0.5


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds an exclusive lock on `path` until the block ends; the kernel frees it when the process dies, however it dies.

    A child that is forked meanwhile does not hold it, too.

    Args:
        path: the lock's file; its content is the holder's process id.
        wait: wait for the present holder instead of raising.

    Raises:
        HeldError: another live process holds the lock.
        PipelineError: a file lies in place of the lock's folder, or a folder in place of the lock, or permission is missing.
    """
    with _locked(path, wait) as file, undone_in_children(file.close):
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def hold_unless(stop: threading.Event, path: Path) -> Iterator[bool]:
    """As `hold`, waiting for the present holder until `stop` is set; gives whether the lock is held."""
    with ExitStack() as stack:
        held = False
        while not held and not stop.is_set():
            try:
                stack.enter_context(hold(path, wait=False))
                held = True
            except HeldError:
                stop.wait(POLL_S)
        yield held


def _locked(path: Path, wait: bool) -> TextIO:
    """The file, open and locked. One that was moved away meanwhile (`pipeline gc`) locks nothing: the next is taken."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+", encoding="utf-8")
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise PipelineError(
                f"{error.filename}: {error.strerror}, but {path} must be a file in a folder; make way for it"
            ) from None
        except FileNotFoundError:  # the folder went between the two lines
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise HeldError(f"{path}: held by the live process {holder}; wait for it, or stop it with `kill {holder}`") from None
        except FileNotFoundError:
            pass
        lock.close()


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock on `path`."""
    if not path.exists():
        return False
    with path.open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
