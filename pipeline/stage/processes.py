"""The processes beside a trainer: further ranks of it, and the feeder that carries its records to MLflow."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import pipeline
from pipeline.errors import PipelineError
from pipeline.supervise import Stopped, StopSignals, signal_name
from pipeline.supervise.ancestry import handed_down
from pipeline.tracking.run_folder import RunFolder
from pipeline.training.ranks import RENDEZVOUS

FOLLOWERS_END_S = 5.0
NOTICED_S = 30.0
"""A rank that waits for one that has ended is told so by their connection, if they had one."""
POLL_S = 0.5
OUT_OF_MEMORY = " (by the kernel, if memory ran out)"
OTHER_RANK_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo, the store of ranks and nccl say when the process at the other end of a connection is gone."""


class RankEnded(PipelineError):
    """Another rank has ended before the work was done; the exit code is that rank's, 128 + n where signal n killed it."""

    def __init__(self, rank: int, code: int) -> None:
        if code < 0:
            how = f"was killed by {signal_name(-code)}" + (OUT_OF_MEMORY if -code == signal.SIGKILL else "")
        else:
            how = f"ended with exit code {code}; its own lines say why"
        super().__init__(f"rank {rank} {how}")
        self.exit_code = 128 - code if code < 0 else code


@contextmanager
def followers(ranks: int, stop: StopSignals) -> Iterator[None]:
    """Runs this script once more for each rank from 1 on; they end with the block, whichever way.

    They have sessions of their own: a signal to this process group is for rank 0, which tells them. Where it waits for one of
    them when it is to stop, they end first. One that ends too early ends the block. They find each other in a file that others
    cannot read and talk over loopback: torch's own store would listen on all interfaces.

    Raises:
        RankEnded: one ended before the work was done.
    """
    if ranks == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="minimind-ranks-") as folder:
        os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0", RENDEZVOUS: os.path.join(folder, "store")}
        os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback())
        followers = [
            subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env={**os.environ, **handed_down(), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(1, ranks)
        ]
        with _watched(followers, stop):
            yield


@contextmanager
def _watched(followers: Sequence["subprocess.Popen[bytes]"], stop: StopSignals) -> Iterator[None]:
    over = threading.Event()

    def leave() -> None:
        over.set()
        for follower in followers:
            follower.kill()

    def watch() -> None:
        while not over.wait(POLL_S):
            if (ended := _ended_early(followers)) is not None:
                if not over.wait(NOTICED_S):  # the main thread waits for what never comes
                    stop.abort(ended.exit_code, str(ended))
                return

    stop.on_wait = leave
    threading.Thread(target=watch, name="followers", daemon=True).start()
    try:
        yield
        _wait_for(followers)
    except RuntimeError:  # what torch raises when the other end of a connection is gone: the reason is the follower's
        _wait_for(followers)
        if (ended := _ended_early(followers)) is not None:
            raise ended from None
        raise
    finally:
        leave()
        for follower in followers:
            follower.wait()


def _loopback() -> str:
    """The interface that leads to this machine alone: `lo` on Linux, `lo0` on macOS."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(each.address == "127.0.0.1" for each in addresses)), "lo")


@contextmanager
def other_ranks_gone() -> Iterator[None]:
    """One line in place of a traceback where a rank that died takes a follower with it: the reason is that rank's to say."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in OTHER_RANK_GONE):
            raise Stopped(signal.SIGTERM, ", because another rank is gone") from None
        raise


def _wait_for(followers: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Gives the followers time to end."""
    deadline = time.monotonic() + FOLLOWERS_END_S
    while None in [follower.poll() for follower in followers] and time.monotonic() < deadline:
        time.sleep(0.05)


def _ended_early(followers: Sequence["subprocess.Popen[bytes]"]) -> RankEnded | None:
    """Of the followers that ended otherwise than in order, one that others did not take with it: they end as if stopped."""
    codes = {rank: code for rank, follower in enumerate(followers, start=1) if (code := follower.poll())}
    if not codes:
        return None
    rank = min(codes, key=lambda rank: (codes[rank] > 128, codes[rank] > 0, codes[rank]))
    return RankEnded(rank, codes[rank])


def start_feeder(folder: RunFolder, home: Path) -> None:
    """Starts the process that carries the records to MLflow, detached: it outlives the trainer and may fail alone."""
    library = str(Path(pipeline.__file__).parents[1])
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH", "")]))
    with folder.feeder_log.open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "pipeline.tracking.feeder", str(folder.path)],
            cwd=home,  # an isolated copy may be removed before the feeder ends
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
