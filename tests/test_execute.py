"""Stages run below `dvc repro`: how they ended, what they said, and that nothing is left of them."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.lineage.execute import Outcome, bring_up

ROOT = Path(__file__).parents[1]
TRAINER = """
    import sys, time
    from pathlib import Path
    from pipeline.supervise import Stopped, StopSignals, exit_on_error
    from pipeline.errors import DataError

    name = sys.argv[1]
    with exit_on_error(name), StopSignals() as stop:
        print("line 1", flush=True)
        if name == "faulty":
            raise DataError("row 3: no such role")
        stop.deferred = name == "slow"
        Path("pid").write_text(str(__import__("os").getpid()))
        while name == "slow" and not Path("enough").exists():
            time.sleep(0.02)
            if stop.requested is not None:
                raise Stopped(stop.requested, ", saved")
        Path(f"{name}.out").write_text(name)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "trainer.py").write_text(textwrap.dedent(TRAINER))
    stages = "".join(
        f"  {name}:\n    cmd: exec {sys.executable} trainer.py {name}\n    outs: [{name}.out]\n"
        for name in ("quick", "faulty", "slow")
    )
    (tmp_path / "dvc.yaml").write_text(f"stages:\n{stages}")
    return tmp_path


class Running:
    """A stage that is brought up in a thread."""

    def __init__(self, project: Path, stage: str) -> None:
        self.stop = threading.Event()
        self.lines: list[str] = []
        self.outcome: Outcome | None = None
        self._project = project
        self._thread = threading.Thread(target=self._run, args=(stage,))
        self._thread.start()

    def _run(self, stage: str) -> None:
        paths = {"PYTHONPATH": str(ROOT)}
        self.outcome = bring_up(self._project, stage, on_line=self.lines.append, stop=self.stop, environment=paths)

    def trainer(self) -> psutil.Process:
        wait_for(lambda: (self._project / "pid").exists() and bool((self._project / "pid").read_text()))
        return psutil.Process(int((self._project / "pid").read_text()))

    def end(self) -> Outcome:
        self._thread.join(60)
        assert self.outcome is not None
        return self.outcome


def wait_for(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_what_runs_is_up_to_date_afterwards(project: Path) -> None:
    first = Running(project, "quick")
    assert first.end() == Outcome(0, "up to date") and "line 1" in first.lines
    again = Running(project, "quick")
    assert again.end() == Outcome(0, "up to date") and "line 1" not in again.lines
    log = (project / ".runs/quick/output.log").read_text()
    assert log.splitlines() == [*first.lines, *again.lines]


def test_a_fault_keeps_its_exit_code_and_its_line(project: Path) -> None:
    assert Running(project, "faulty").end() == Outcome(3, "faulty: row 3: no such role")


def test_a_killed_trainer_leaves_no_code(project: Path) -> None:
    running = Running(project, "slow")
    running.trainer().kill()
    assert running.end() == Outcome(None, "killed by SIGKILL")


def test_a_killed_dvc_takes_the_trainer_with_it(project: Path) -> None:
    running = Running(project, "slow")
    trainer = running.trainer()
    trainer.parent().kill()  # type: ignore[union-attr]
    assert running.end() == Outcome(None, "killed by SIGKILL")
    trainer.wait(30)


def test_a_stop_is_asked_for_and_answered(project: Path) -> None:
    running = Running(project, "slow")
    trainer = running.trainer()
    running.stop.set()
    assert running.end() == Outcome(143, "slow: stopped by SIGTERM, saved")
    assert not trainer.is_running()
    assert not [child for child in psutil.Process().children(recursive=True) if "trainer.py" in " ".join(child.cmdline())]


def test_a_stage_that_ends_while_dvc_is_busy_elsewhere_is_recorded_and_not_run_again(project: Path) -> None:
    """DVC would give up after 3 s, and what was trained would be lost."""
    from dvc.repo import Repo

    running = Running(project, "slow")
    running.trainer()
    with Repo(str(project)).lock:
        (project / "enough").touch()
        wait_for((project / "slow.out").exists)
        time.sleep(4)
    assert running.end() == Outcome(0, "up to date")
    assert running.lines.count("line 1") == 1 and "slow.out" in (project / "dvc.lock").read_text()
