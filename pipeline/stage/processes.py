"""The processes beside a trainer: further ranks of it, and the feeder that carries its records to MLflow."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import pipeline
from pipeline.supervise import Stopped
from pipeline.tracking.run_folder import RunFolder
from pipeline.training.ranks import RENDEZVOUS

FOLLOWERS_END_S = 5.0
OTHER_RANK_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo, the store of ranks and nccl say when the process at the other end of a connection is gone."""


@contextmanager
def followers(ranks: int) -> Iterator[None]:
    """Runs this script once more for each rank from 1 on; they end with the block, whichever way.

    They have sessions of their own: a signal to this process group is for rank 0, which tells them. They find each other in a
    file that others cannot read and talk over loopback: torch's own store would listen on all interfaces.
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
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(1, ranks)
        ]
        try:
            yield
            _wait_for(followers)
        except RuntimeError:  # what torch raises when the other end of a connection is gone: the reason is the follower's
            if code := _wait_for(followers):
                raise SystemExit(code) from None
            raise
        finally:
            for follower in followers:
                follower.kill()
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


def _wait_for(followers: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Gives the followers time to end; the exit code of one that failed, else of one that was stopped, else 0."""
    deadline = time.monotonic() + FOLLOWERS_END_S
    while None in (codes := [follower.poll() for follower in followers]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return min((code for code in codes if code and code > 0), default=0)


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
