"""Bringing one stage up to date by `dvc repro --single-item`: output in a log file, the exit code that DVC hides, no orphans."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.errors import HeldError
from pipeline.lineage.remote import pull_options, push_shared
from pipeline.supervise.ancestry import handed_down
from pipeline.tracking.run_folder import read_json

TAIL_LINES = 20
STOP_S = 30.0
"""From the request to stop until what is left of the process tree is killed: a trainer saves in that time."""
BUSY_S = 2.0
_EXITED = re.compile(r"exited with (-?\d+)")
_BUSY = re.compile(r"Unable to acquire lock|is busy, it is being blocked by")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended.

    Attributes:
        code: its exit code as in `pipeline.supervise`; 0 also where there was nothing to do; None where it was killed and could
            leave no record.
        reason: one line.
    """

    code: int | None
    reason: str


def bring_up(
    root: Path, stage: str, *, on_line: Callable[[str], None], stop: threading.Event, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Runs a stage whose parents are up to date, if it needs to run. Waits while another process holds what it needs.

    Args:
        root: the repository.
        stage: its name, such as `data@pretrain`.
        on_line: gets every line of output; `.runs/<stage>/output.log` keeps all of them.
        stop: when set, the stage is asked to save and stop.
        environment: variables on top of this process's own.

    Raises:
        PipelineError: the remote that the environment names (`pipeline.lineage.remote`) cannot be used.
    """
    log = root / ".runs" / stage / "output.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        outcome, busy = _attempt(root, stage, log, on_line, stop, dict(environment or {}))
        if not busy or stop.wait(BUSY_S):
            return outcome


def _attempt(
    root: Path, stage: str, log: Path, on_line: Callable[[str], None], stop: threading.Event, environment: dict[str, str]
) -> tuple[Outcome, bool]:
    """One `dvc repro`, and whether it failed only because another process is at work."""
    started_s = time.time()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", *pull_options(root), "--single-item", stage]
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, **handed_down(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
        _stopped_with(process, stop),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            tail.append(line.rstrip("\n"))
            on_line(tail[-1])
        process.wait()
    if process.returncode == 0:
        push_shared(root, stage)
        return Outcome(0, "up to date"), False
    outcome = _failure(root, stage, started_s, process.returncode, list(tail))
    said = "\n".join(tail)
    return outcome, outcome.code == HeldError.exit_code or bool(_BUSY.search(said))


def _failure(root: Path, stage: str, started_s: float, dvc_code: int, tail: list[str]) -> Outcome:
    """What the run recorded; else what DVC says of its child; else that all were killed."""
    for path in sorted((root / ".runs" / stage).glob("*/*/exit.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        recorded = read_json(path)
        if recorded.get("time_s", 0.0) >= started_s and recorded.get("code"):
            return Outcome(recorded["code"], recorded["reason"])
    exited = [int(match[1]) for line in tail if (match := _EXITED.search(line))]
    code = exited[-1] if exited else dvc_code
    if code < 0:
        return Outcome(None, f"killed by {signal.Signals(-code).name}")
    own = [line for line in tail if line.startswith(f"{stage}: ")] or [line for line in tail if line.startswith("ERROR")] or tail
    return Outcome(code, own[-1] if own else f"dvc ended with exit code {code}")


@contextmanager
def _stopped_with(process: "subprocess.Popen[str]", stop: threading.Event) -> Iterator[None]:
    """Terminates the process tree when `stop` is set or the block raises, and kills what does not end."""
    done = threading.Event()

    def follow() -> None:
        while not done.is_set():
            if stop.wait(0.2):
                end_tree(process)
                return

    follower = threading.Thread(target=follow, name=f"stop {process.pid}", daemon=True)
    follower.start()
    try:
        yield
    except BaseException:
        end_tree(process)
        raise
    finally:
        done.set()
        follower.join()


def end_tree(dvc: "subprocess.Popen[str]", *, stop_s: float = STOP_S) -> None:
    """Asks the command that `dvc` runs to stop, gives both `stop_s` seconds, and kills what is left of them.

    The trainer is asked, not DVC: it saves and ends, and DVC ends after it. What the trainer has started follows it by itself.
    """
    try:
        commands = psutil.Process(dvc.pid).children()
    except psutil.NoSuchProcess:
        return
    for command in commands:
        _signal(command, signal.SIGTERM)
    if not commands:
        dvc.terminate()
    with suppress(subprocess.TimeoutExpired):
        dvc.wait(stop_s)
    for command in commands:
        _signal(command, signal.SIGKILL)
    dvc.kill()


def _signal(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return
