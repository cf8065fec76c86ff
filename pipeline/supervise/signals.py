"""A stage's process: stop signals, and the death of the processes that it belongs to."""

import ctypes
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from pipeline.supervise.ancestry import inherited, watched
from pipeline.supervise.forks import undone_in_children

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Not SIGTERM: when a whole process group is terminated, the parent's death comes within milliseconds of the group's signal,
# and would count as the second signal that stops without saving.
PARENT_DIED = signal.SIGUSR1
GRACE_S = 25.0
STUCK_S = 3.0
"""The main thread answers signals between two operations of Python; one that has not by then waits inside of an operation."""
_PR_SET_PDEATHSIG = 1
_DONE = 0  # no signal has this number


def signal_name(signum: int) -> str:
    """`SIGTERM`; `signal 40` where it has no name, as most real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Stopped(KeyboardInterrupt):
    """The process was asked to stop; `signum` says by which signal. The exit code is 128 + signum.

    A signal handler raises it amid whatever runs, a library, a reader of files or a user's tool included, so it is none of the
    exceptions that these take for a failure of their own.
    """

    def __init__(self, signum: int, detail: str = "") -> None:
        super().__init__(f"stopped by {signal_name(signum)}{detail}")
        self.signum = signum


class StopSignals:
    """Turns SIGINT, SIGTERM, SIGHUP and the parent's death into a request that the training loop answers.

    Until `deferred` is set there is nothing to save: the first signal raises `Stopped` at once. Afterwards it sets
    `requested`, and the loop stops after its step; amid `interruptible` it raises `Stopped` all the same. The second signal ends
    the process at once, and so do `grace_s` seconds, but for SIGINT: who pressed Ctrl-C can press it again.
    SIGINT and SIGHUP that the process was started with as ignored (`nohup`, background jobs) stay ignored.

    Python runs handlers in the main thread alone, which may wait for minutes inside of one operation (for another rank, say). So
    a thread of its own hears of signals, too: it speaks, counts the seconds, and ends the process. A child that is forked
    without starting another program has neither: signals do to it what they do to any process.

    Attributes:
        requested: the signal that asked for the stop, or None.
        deferred: whether a loop answers requests.
        answer: what a deferred request is going to do, in words, for who asked; empty: nothing is said.
        kept: what an end at once leaves, in words, for the reason; empty: nothing is said.
        say: tells the person who asked.
        on_abort: called with the exit code and the reason before the process ends at once.
        on_wait: called when the main thread should stop, but waits inside of an operation: it may end what that waits for.
        grace_s: seconds from the first signal to the end of the process; no limit for SIGINT.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.requested: int | None = None
        self.deferred = False
        self.answer: Callable[[], str] = lambda: ""
        self.kept: Callable[[], str] = lambda: ""
        self.say: Callable[[str], None] = lambda line: None
        self.on_abort: Callable[[int, str], None] = lambda code, reason: None
        self.on_wait: Callable[[], None] = lambda: None
        self.grace_s = grace_s
        self._interruptible: Callable[[], bool] = _never
        self._heard = self._raised = False  # in the main thread
        self._context = ExitStack()

    def __enter__(self) -> "StopSignals":
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        listener = threading.Thread(target=self._listen, args=(ear,), name="stop signals", daemon=True)
        before = {PARENT_DIED: signal.signal(PARENT_DIED, self._on_signal)}
        for signum in STOP_SIGNALS:
            if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, self._on_signal)
        told_before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(told_before)
            for signum, handler in before.items():
                signal.signal(signum, handler)

        for last in (ear.close, mouth.close, listener.join, lambda: mouth.send(bytes([_DONE])), restore):  # in reverse
            self._context.callback(last)
        self._context.enter_context(undone_in_children(restore))
        listener.start()
        # A stage that was put in the background to survive its shell has no parent to follow; under DVC it always has.
        if signal.SIGHUP in before or "DVC_STAGE" in os.environ:
            follow_parent(PARENT_DIED)
            self._context.callback(follow_parent, 0)  # its signal would end a process that has no handler any more
        self._context.enter_context(watched(inherited(), lambda: os.kill(os.getpid(), PARENT_DIED)))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    @contextmanager
    def interruptible(self, while_: Callable[[], bool]) -> Iterator[None]:
        """Raises `Stopped` amid the block, or at its beginning, where a stop is requested while `while_()` holds."""
        self._interruptible = while_
        try:
            if self.requested is not None:
                self._raise()
            yield
        finally:
            self._interruptible = _never

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """In the main thread, between two of its operations."""
        self._heard = True
        self._request(signum)
        if self._may_raise():
            self._raise()

    def _may_raise(self) -> bool:
        return not self.deferred or self._interruptible()

    def _raise(self) -> None:
        """At most once: what is saved on the way out is not to be interrupted."""
        assert self.requested is not None
        if not self._raised:
            self._raised = True
            raise Stopped(self.requested)

    def _request(self, signum: int) -> None:
        if self.requested is None:
            self.requested = signal.SIGTERM if signum == PARENT_DIED else signum

    def _listen(self, ear: socket.socket) -> None:
        """What the thread does, whatever the main thread does meanwhile."""
        asked = told = False
        looks_s = ends_s = math.inf
        while (signum := _next_signal(ear, min(looks_s, ends_s))) != _DONE:
            if signum is None and time.monotonic() >= ends_s:
                self._end_now()
            elif signum is None:
                looks_s = math.inf
                self._look()
            elif signum in STOP_SIGNALS and told:
                self._end_now()
            elif signum in (*STOP_SIGNALS, PARENT_DIED):
                told = told or signum != PARENT_DIED
                if asked:
                    continue
                asked = True
                self._request(signum)
                looks_s = time.monotonic() + STUCK_S
                if self.requested != signal.SIGINT:
                    ends_s = time.monotonic() + self.grace_s
                if self.deferred and (words := self.answer()):
                    self.say(words)

    def _look(self) -> None:
        """Where the main thread should have stopped by now, and is inside of an operation: with nothing to save, that was it."""
        if self._heard or not self._may_raise():
            return
        if not self.deferred:
            self._end_now()
        self.on_wait()

    def _end_now(self) -> None:
        assert self.requested is not None
        kept = self.kept()
        self.abort(128 + self.requested, f"stopped at once by {signal_name(self.requested)}" + (f"; {kept}" if kept else ""))

    def abort(self, code: int, reason: str) -> None:
        """Ends the process from any thread, whatever the main thread waits for."""
        try:
            self.say(reason)
            self.on_abort(code, reason)
        finally:
            os._exit(code)


def _never() -> bool:
    return False


def _next_signal(ear: socket.socket, until_s: float) -> int | None:
    """The number of the next signal, or None when the time has come."""
    wait_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
    ready, _, _ = select.select([ear], [], [], wait_s)
    return ear.recv(1)[0] if ready else None


def follow_parent(signum: int) -> None:
    """Asks the kernel for a signal to this process when its parent ends, or sends it if that has just happened (Linux only).

    Neither DVC nor Prefect stop their children. Signal 0 takes the wish back.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)
