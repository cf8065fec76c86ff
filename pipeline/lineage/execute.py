"""Bringing one stage up to date by `dvc repro --single-item`: output in a log file, the exit code that DVC hides, no orphans."""

import math
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
from typing import Any

import psutil

from pipeline.errors import HeldError
from pipeline.lineage.remote import pull_options, push_shared
from pipeline.masking import masked
from pipeline.supervise import signal_name
from pipeline.supervise.ancestry import handed_down
from pipeline.tracking.run_folder import read_json

TAIL_LINES = 20
STOP_S = 27.0
"""From the request to stop until what is left of the process tree is killed: a trainer saves within 25 s, and Prefect kills a
cancelled flow run after 30."""
TIMED_OUT = 124
"""In place of an exit code: the attempt took longer than it was given."""
RAN, SPARED = "ran", "did not have to run"
"""The second also where DVC's run cache had the results."""
BUSY_S = 2.0
_EXITED = re.compile(r"exited with (-?\d+)")
_BUSY = re.compile(r"Unable to acquire lock|is busy, it is being blocked by")
_BLOCKER = re.compile(r"\(PID (\d+)\): (.*)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended.

    Attributes:
        code: its exit code as in `pipeline.supervise`; 0 also where there was nothing to do; `TIMED_OUT`; None where it was
            killed and could leave no record.
        reason: one line; `RAN` or `SPARED` where it ended well.
    """

    code: int | None
    reason: str


def bring_up(
    root: Path,
    stage: str,
    *,
    on_line: Callable[[str], None],
    stop: threading.Event,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs a stage whose parents are up to date, if it needs to run. Waits while another process holds what it needs.

    Args:
        root: the repository.
        stage: its name, such as `data@pretrain`.
        on_line: gets every line of output; `.runs/<stage>/output.log` keeps all of them.
        stop: when set, the stage is asked to save and stop.
        environment: variables on top of this process's own.
        timeout_s: what a run of the stage may last before it is asked to save and stop; the waiting does not count.
        on_wait: gets one line when the waiting begins, or when it is for another process; `on_line` when left out.

    Raises:
        PipelineError: the remote that the environment names (`pipeline.lineage.remote`) cannot be used.
    """
    log = root / ".runs" / stage / "output.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    waited_for = ""
    known: set[str] = set()  # what attempts that found another process at work have said: every one says it again

    def say_new(line: str) -> None:
        if line not in known:
            on_line(line)

    while True:
        attempt = _Attempt(root, stage, {**os.environ, **handed_down(), **(environment or {})})
        outcome = attempt.run(log, say_new, stop, timeout_s)
        if not (busy := attempt.found_at_work(outcome)):
            return outcome
        if busy != waited_for:
            (on_wait or on_line)(f"{stage} waits: {busy}")
            waited_for = busy
        known |= set(attempt.tail)
        if stop.wait(BUSY_S):
            return outcome


class _Attempt:
    """One `dvc repro` of a stage; `tail` holds its last lines."""

    def __init__(self, root: Path, stage: str, environment: Mapping[str, str]) -> None:
        self._root = root
        self._stage = stage
        self._environment = environment
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._recorded = root / ".runs" / stage / "exit.json"
        self._began = threading.Event()  # the stage's command: when it is no longer there, DVC takes over what it made

    def run(self, log: Path, on_line: Callable[[str], None], stop: threading.Event, timeout_s: float | None) -> Outcome:
        """How it ended; `log` and `on_line` get every line."""
        before = read_json(self._recorded)
        with (
            log.open("a", encoding="utf-8") as file,
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dvc",
                    "--wait-for-lock",
                    "repro",
                    *pull_options(self._root),
                    "--single-item",
                    self._stage,
                ],
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Cancelling terminates the flow's process group. A trainer in it would be told twice, by the group and by
                # `end_tree`, and the second signal stops it without a save.
                start_new_session=True,
            ) as process,
            _stopped_with(process, stop, timeout_s, self._began) as expired,
        ):
            assert process.stdout is not None
            for line in map(masked, process.stdout):
                file.write(line)
                self.tail.append(line.rstrip("\n"))
                on_line(self.tail[-1])
                if line.startswith(f"Running stage '{self._stage}'"):
                    self._began.set()
            process.wait()
        if process.returncode == 0:
            push_shared(self._root, self._stage)
            return Outcome(0, RAN if self._began.is_set() else SPARED)
        recorded = read_json(self._recorded)
        outcome = _failure(self._stage, {} if recorded == before else recorded, process.returncode, list(self.tail))
        if expired.is_set():
            return Outcome(TIMED_OUT, f"timeout_s={timeout_s:g} is over: {outcome.reason}")
        return outcome

    def found_at_work(self, outcome: Outcome) -> str:
        """The other process that the attempt failed for, when it failed for nothing else; else empty."""
        if outcome.code == HeldError.exit_code:
            return outcome.reason
        said = "\n".join(self.tail)
        if outcome.code == 0 or not _BUSY.search(said):
            return ""
        blockers = ", ".join(f"`{command.strip()}` (process {pid})" for pid, command in _BLOCKER.findall(said))
        return f"{blockers or 'another dvc command'} is at work in {self._root}"


def _failure(stage: str, recorded: Mapping[str, Any], dvc_code: int, tail: list[str]) -> Outcome:
    """What the stage `recorded` in this attempt; else what DVC says of its child; else that all were killed.

    Nothing is recorded before the stage's lock is held: when params.yaml is wrong, or another process holds it.
    """
    if recorded.get("code"):
        return Outcome(recorded["code"], recorded["reason"])
    exited = [int(match[1]) for line in tail if (match := _EXITED.search(line))]
    code = exited[-1] if exited else dvc_code
    if code < 0:
        return Outcome(None, f"killed by {signal_name(-code)}")
    own = (
        [line for line in tail if line.startswith((f"{stage}: ", "params: "))]
        or [line for line in tail if line.startswith("ERROR")]
        or tail
    )
    return Outcome(code, own[-1] if own else f"dvc ended with exit code {code}")


@contextmanager
def _stopped_with(
    process: "subprocess.Popen[str]", stop: threading.Event, timeout_s: float | None, began: threading.Event
) -> Iterator[threading.Event]:
    """Ends the process tree as `end_tree` does when `stop` is set, time is over or the block raises.

    Yields what is set when it was the time.
    """
    done, expired = threading.Event(), threading.Event()
    deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf

    def follow() -> None:
        while not done.is_set():
            if not stop.wait(0.2):
                if time.monotonic() < deadline:
                    continue
                expired.set()
            end_tree(process, began)
            return

    follower = threading.Thread(target=follow, name=f"stop {process.pid}", daemon=True)
    follower.start()
    try:
        yield expired
    except BaseException:
        end_tree(process, began)
        raise
    finally:
        done.set()
        follower.join()


def end_tree(dvc: "subprocess.Popen[str]", began: threading.Event, *, stop_s: float = STOP_S) -> None:
    """Asks the command that `dvc` runs to stop, gives both `stop_s` seconds, and kills what is left of them.

    The trainer is asked, not DVC: it saves and ends, and DVC ends after it. What the trainer has started follows it by itself.
    Nor is DVC asked once the command has begun and ended: it takes over the outputs then, and writes dvc.lock in place.
    """
    try:
        commands = psutil.Process(dvc.pid).children()
    except psutil.NoSuchProcess:
        return
    for command in commands:
        _signal(command, signal.SIGTERM)
    if not commands and not began.is_set():
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
