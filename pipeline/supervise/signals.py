"""A stage's process: stop signals, and the death of the processes that it belongs to."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from pipeline.supervise.ancestry import inherited, watched

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Not SIGTERM: when a whole process group is terminated, the parent's death comes within milliseconds of the group's signal,
# and would count as the second signal that stops without saving.
PARENT_DIED = signal.SIGUSR1
GRACE_S = 25.0
_PR_SET_PDEATHSIG = 1


class Stopped(KeyboardInterrupt):
    """The process was asked to stop; `signum` says by which signal. The exit code is 128 + signum.

    A signal handler raises it amid whatever runs, a library, a reader of files or a user's tool included, so it is none of the
    exceptions that these take for a failure of their own.
    """

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
        self._watch = ExitStack()
        self._timer: threading.Timer | None = None
        self._previous: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> "StopSignals":
        for signum in STOP_SIGNALS:
            if signum is signal.SIGTERM or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._on_signal)
        self._previous[PARENT_DIED] = signal.signal(PARENT_DIED, self._on_parent_death)
        # A stage that was put in the background to survive its shell has no parent to follow; under DVC it always has.
        if signal.SIGHUP in self._previous or "DVC_STAGE" in os.environ:
            follow_parent(PARENT_DIED)
        self._watch.enter_context(watched(inherited(), lambda: os.kill(os.getpid(), PARENT_DIED)))
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
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


def follow_parent(signum: int) -> None:
    """Asks the kernel for a signal to this process when its parent ends, or sends it if that has just happened (Linux only).

    Neither DVC nor Prefect stop their children.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)
