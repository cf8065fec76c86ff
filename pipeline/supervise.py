"""A stage's process: stop signals, the death of its parent, exclusive locks, and exit codes.

| exit code | meaning |
| --- | --- |
| 0 | finished |
| 1 | a programming mistake (traceback), or the disk is full |
| 2 - 6 | a `PipelineError`: parameters, data, numerics, memory, held by another process |
| 128 + n | stopped by signal n after saving; a second signal, or 25 s without the end of a step, stops at once |
"""

import ctypes
import errno
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from pipeline.errors import HeldError, OutOfMemoryError, PipelineError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Not SIGTERM: when a whole process group is terminated, the parent's death comes within milliseconds of the group's signal,
# and would count as the second signal that stops without saving.
PARENT_DIED = signal.SIGUSR1
GRACE_S = 25.0
_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """The process was asked to stop; `signum` says by which signal. The exit code is 128 + signum."""

    def __init__(self, signum: int, detail: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}{detail}")
        self.signum = signum


class StopSignals:
    """Turns SIGINT, SIGTERM, SIGHUP and the parent's death into a request that the training loop answers.

    Until `deferred` is set there is nothing to save: the first signal raises `Stopped` at once. Afterwards it sets
    `requested`, and the loop stops after its step. The second signal, or `grace_s` seconds, end the process at once.
    SIGINT and SIGHUP that the process was started with as ignored (`nohup`, background jobs) stay ignored.

    Attributes:
        requested: the signal that asked for the stop, or None.
        deferred: whether a loop answers requests.
        on_abort: called with the exit code and the reason before the process ends at once.

    Args:
        grace_s: seconds from the first signal to the end of the process.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.requested: int | None = None
        self.deferred = False
        self.on_abort: Callable[[int, str], None] | None = None
        self._grace_s = grace_s
        self._signalled = False
        self._timer: threading.Timer | None = None
        self._previous: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> "StopSignals":
        for signum in STOP_SIGNALS:
            if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._on_signal)
        self._previous[PARENT_DIED] = signal.signal(PARENT_DIED, self._on_parent_death)
        # A stage that was put in the background to survive its shell has no parent to follow; under DVC it always has.
        if signal.SIGHUP in self._previous or "DVC_STAGE" in os.environ:
            _follow_parent()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_parent_death(self, signum: int, frame: FrameType | None) -> None:
        self._request(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._signalled:
            self._end_now()
        self._signalled = True
        self._request(signum)

    def _request(self, signum: int) -> None:
        if self.requested is not None:
            return
        self.requested = signum
        self._timer = threading.Timer(self._grace_s, self._end_now)
        self._timer.daemon = True
        self._timer.start()
        if not self.deferred:
            raise Stopped(signum)

    def _end_now(self) -> None:
        assert self.requested is not None
        code = 128 + self.requested
        if self.on_abort is not None:
            self.on_abort(code, f"stopped at once by {signal.Signals(self.requested).name}; the last save is kept")
        os._exit(code)


def _follow_parent() -> None:
    """Asks the kernel for `PARENT_DIED` when the parent ends: neither DVC nor Prefect stop their children (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(PARENT_DIED), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), PARENT_DIED)


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds an exclusive lock on `path` until the block ends; the kernel frees it when the process dies, however it dies.

    Args:
        path: the lock's file; its content is the holder's process id.
        wait: wait for the present holder instead of raising.

    Raises:
        HeldError: another live process holds the lock.
        PipelineError: a file lies in place of the lock's folder, or a folder in place of the lock, or permission is missing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+", encoding="utf-8")
    except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise PipelineError(
            f"{error.filename}: {error.strerror}, but {path} must be a file in a folder; make way for it"
        ) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise HeldError(f"{path}: held by the live process {holder}; wait for it, or stop it with `kill {holder}`") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


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


def explain(error: BaseException, memory_hint: str = "use a smaller batch") -> tuple[int, list[str]]:
    """The exit code that stands for `error`, and the lines to print: readable for what a user can mend, else a traceback."""
    match error:
        case PipelineError():
            return error.exit_code, list(error.lines)
        case Stopped():
            return 128 + error.signum, [str(error)]
        case KeyboardInterrupt():
            return 128 + signal.SIGINT, ["interrupted"]
        case SystemExit():
            return (error.code if isinstance(error.code, int) else int(error.code is not None)), [f"exit {error.code}"]
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            place = error.filename or "disk"
            return 1, [f"{place}: no space left; free some and run the same command: it resumes at the last save"]
    if _is_out_of_memory(error):
        said = (str(error).splitlines() or ["host memory"])[0]
        return OutOfMemoryError.exit_code, [f"out of memory ({said[:200]}): {memory_hint}"]
    return 1, "".join(traceback.format_exception(error)).splitlines()


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    signs = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


@contextmanager
def exit_on_error(name: str, memory_hint: str = "use a smaller batch") -> Iterator[None]:
    """Ends the process with the exit code of what the block raises, after one readable line per fault on stderr.

    Args:
        name: printed before the lines: the stage.
        memory_hint: what to lower when memory runs out.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # the process ends here, whatever it was
        code, lines = explain(error, memory_hint)
        for line in lines:
            print(line if len(lines) > 1 and code == 1 else f"{name}: {line}", file=sys.stderr, flush=True)
        raise SystemExit(code) from error


class _LastingStream:
    """A text stream whose reader may go away: from then on what is written is lost, and nobody is told."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """Keeps a closed terminal or a broken pipe from ending the block: training, and above all its last save, go on."""
    with redirect_stderr(cast(TextIO, _LastingStream(sys.stderr))):
        yield


def now_s() -> float:
    """Unix time in seconds, to the millisecond: what MLflow stores."""
    return round(time.time(), 3)
