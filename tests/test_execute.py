"""Stages run below `dvc repro`: how they ended, what they said, and that nothing is left of them."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import dvc_here
import psutil
import pytest

from pipeline.errors import PipelineError
from pipeline.lineage.agreement import undisturbed
from pipeline.lineage.declaration import declaration
from pipeline.lineage.execute import RAN, SPARED, TIMED_OUT, Outcome, bring_up
from pipeline.params import parse_params
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
TRAINER = """
    import sys, time
    from pathlib import Path
    from pipeline.stage import stage_process
    from pipeline.supervise import Stopped
    from pipeline.errors import DataError

    name = sys.argv[1]
    with stage_process(name) as stop:
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
    dvc_here.init(tmp_path)
    (tmp_path / "trainer.py").write_text(textwrap.dedent(TRAINER))
    stages = "".join(
        f"  {name}:\n    cmd: exec {sys.executable} trainer.py {name}\n    outs: [{name}.out]\n"
        for name in ("quick", "faulty", "slow")
    )
    (tmp_path / "dvc.yaml").write_text(f"stages:\n{stages}")
    return tmp_path


class Running:
    """A stage that is brought up in a thread."""

    def __init__(self, project: Path, stage: str, timeout_s: float | None = None) -> None:
        self.stop = threading.Event()
        self.lines: list[str] = []
        self.waits: list[str] = []
        self.outcome: Outcome | None = None
        self._project = project
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._run, args=(stage,))
        self._thread.start()

    def _run(self, stage: str) -> None:
        self.outcome = bring_up(
            self._project,
            stage,
            on_line=self.lines.append,
            on_wait=self.waits.append,
            stop=self.stop,
            environment={"PYTHONPATH": str(ROOT)},
            timeout_s=self._timeout_s,
        )

    def trainer(self) -> psutil.Process:
        return trainer(self._project)

    def end(self) -> Outcome:
        self._thread.join(60)
        assert self.outcome is not None
        return self.outcome


def trainer(project: Path) -> psutil.Process:
    """The one that has written its number, which is taken away for the next."""
    path = project / "pid"
    wait_for(lambda: path.exists() and bool(path.read_text()))
    process = psutil.Process(int(path.read_text()))
    path.unlink()
    return process


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_what_runs_is_up_to_date_afterwards(project: Path) -> None:
    first = Running(project, "quick")
    assert first.end() == Outcome(0, RAN) and "line 1" in first.lines
    again = Running(project, "quick")
    assert again.end() == Outcome(0, SPARED) and "line 1" not in again.lines
    log = (project / ".runs/quick/output.log").read_text()
    assert log.splitlines() == [*first.lines, *again.lines]


def test_a_fault_keeps_its_exit_code_and_its_line(project: Path) -> None:
    assert Running(project, "faulty").end() == Outcome(3, "row 3: no such role")


def test_what_the_stage_recorded_is_its_outcome_and_an_older_record_is_not(project: Path) -> None:
    """The output may say anything: DVC hides the code, and a library may print last."""
    (project / "dvc.yaml").write_text(f"stages:\n  noisy:\n    cmd: exec {sys.executable} noisy.py\n    outs: [noisy.out]\n")
    (project / "noisy.py").write_text(
        "from pipeline.errors import NumericsError\n"
        "from pipeline.stage import stage_process\n"
        "import atexit, sys\n"
        "atexit.register(lambda: [print(f'noisy: {n}', file=sys.stderr) for n in range(40)])\n"
        "with stage_process('noisy'):\n"
        "    raise NumericsError('not finite')\n"
    )
    assert Running(project, "noisy").end() == Outcome(4, "not finite")
    old = (project / ".runs/noisy/exit.json").read_text()
    (project / "noisy.py").write_text("import sys; sys.exit('noisy: nothing recorded')\n")
    assert "not finite" in old and Running(project, "noisy").end() == Outcome(1, "noisy: nothing recorded")


def test_a_record_of_a_clock_that_went_wrong_is_not_taken_for_this_attempts(project: Path) -> None:
    """Of an earlier attempt: numerics (4) would not be tried again, and a killed trainer is."""
    exit_file = project / ".runs/slow/exit.json"
    exit_file.parent.mkdir(parents=True)
    exit_file.write_text(f'{{"code": 4, "reason": "not finite", "time_s": {time.time() + 1e6}}}')
    running = Running(project, "slow")
    running.trainer().kill()
    assert running.end() == Outcome(None, "killed by SIGKILL")


def test_a_mistake_in_params_has_its_line(project: Path) -> None:
    (project / "dvc.yaml").write_text(f"stages:\n  early:\n    cmd: exec {sys.executable} early.py\n    outs: [early.out]\n")
    (project / "early.py").write_text(
        "from pipeline.errors import ParamsError\n"
        "from pipeline.supervise import exit_on_error\n"
        "with exit_on_error('params'):\n"
        "    raise ParamsError('params.yaml: lr=0: must be > 0')\n"
    )
    assert Running(project, "early").end() == Outcome(2, "params: params.yaml: lr=0: must be > 0")


def test_a_killed_trainer_leaves_no_code(project: Path) -> None:
    running = Running(project, "slow")
    running.trainer().kill()
    assert running.end() == Outcome(None, "killed by SIGKILL")


def test_a_killed_dvc_takes_the_trainer_with_it(project: Path) -> None:
    running = Running(project, "slow")
    trainer = running.trainer()
    trainer.parent().kill()  # type: ignore[union-attr]
    assert running.end() == Outcome(143, "stopped by SIGTERM, saved")  # the death of its parent is as good as a signal
    trainer.wait(30)


def test_a_stop_is_asked_for_and_answered(project: Path) -> None:
    running = Running(project, "slow")
    trainer = running.trainer()
    running.stop.set()
    assert running.end() == Outcome(143, "stopped by SIGTERM, saved")
    assert not trainer.is_running()
    assert not [child for child in psutil.Process().children(recursive=True) if "trainer.py" in " ".join(child.cmdline())]


def test_a_time_limit_ends_the_tree_after_a_save(project: Path) -> None:
    running = Running(project, "slow", timeout_s=6)
    trainer = running.trainer()
    assert running.end() == Outcome(TIMED_OUT, "timeout_s=6 is over: stopped by SIGTERM, saved")
    assert not trainer.is_running() and not running.waits


def test_a_live_trainer_is_waited_for_and_named_once(project: Path) -> None:
    """One in another terminal, below no dvc, then one below the dvc of somebody else."""
    other = subprocess.Popen([sys.executable, "trainer.py", "slow"], cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        trainer(project)
        running = Running(project, "slow")
        wait_for(lambda: sum("failed to reproduce" in line for line in output(project)) >= 2)  # it has been tried twice
        assert [f"kill {other.pid}" in line for line in running.waits] == [True]
        assert sum("held by the live process" in line for line in running.lines) == 1
    finally:
        other.terminate()
        other.wait()
    own = running.trainer()
    assert own.parent() is not None and running.outcome is None
    dvc = own.parent()
    second = Running(project, "slow")
    wait_for(lambda: bool(second.waits))
    assert dvc is not None and f"process {dvc.pid}" in second.waits[0]
    second.stop.set()
    running.stop.set()
    assert running.end().code == 143 and second.end().code not in (0, None)


def output(project: Path) -> list[str]:
    path = project / ".runs/slow/output.log"
    return path.read_text().splitlines() if path.exists() else []


def test_a_stage_that_ends_while_dvc_is_busy_elsewhere_is_recorded_and_not_run_again(project: Path) -> None:
    """DVC would give up after 3 s, and what was trained would be lost."""
    from dvc.repo import Repo

    running = Running(project, "slow")
    running.trainer()
    with Repo(str(project)).lock:
        (project / "enough").touch()
        wait_for((project / "slow.out").exists)
        time.sleep(4)
    assert running.end() == Outcome(0, RAN)
    assert running.lines.count("line 1") == 1 and "slow.out" in (project / "dvc.lock").read_text()


def test_a_stop_lets_dvc_take_over_what_a_stage_made(project: Path) -> None:
    from dvc.repo import Repo

    running = Running(project, "slow")
    trainer = running.trainer()
    with Repo(str(project)).lock:
        (project / "enough").touch()
        trainer.wait(30)
        running.stop.set()
        time.sleep(1)
    assert running.end() == Outcome(0, RAN) and "slow.out" in (project / "dvc.lock").read_text()


@pytest.mark.parametrize(("file", "text", "named"), [("params.yaml", "t: {lr: 2, n: 1}", "t.lr"), ("rows", "more", "rows")])
def test_what_is_edited_while_a_stage_runs_is_not_recorded_with_what_the_old_made(
    project: Path, file: str, text: str, named: str
) -> None:
    """DVC reads parameters and inputs once more when the command has ended."""
    (project / "dvc.yaml").write_text(
        f"stages:\n  slow:\n    cmd: exec {sys.executable} trainer.py slow\n"
        "    deps: [rows]\n    params: [t.lr]\n    outs: [slow.out]\n"
    )
    (project / "params.yaml").write_text("t: {lr: 1, n: 1}")
    (project / "rows").write_text("few")
    running = Running(project, "slow")
    running.trainer()
    (project / file).write_text(text)
    (project / "enough").touch()
    outcome = running.end()
    assert outcome.code == 1 and outcome.reason.startswith(f"{named}: changed while the stage ran, and DVC would record")
    assert not (project / "dvc.lock").exists()

    (project / "enough").unlink()
    again = Running(project, "slow")
    again.trainer()
    (project / "params.yaml").write_text(f"t: {{lr: {2 if file == 'params.yaml' else 1}, n: 2}}")  # nothing to this stage
    (project / "enough").touch()
    assert again.end() == Outcome(0, RAN)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("params.yaml", "file: old", "file: new"), ("dvc.yaml", "external/${t.file}", "external/new")],
)
def test_a_path_that_is_edited_while_another_stage_runs_is_not_recorded_in_place_of_what_was_read(
    project: Path, file: str, old: str, new: str
) -> None:
    """DVC makes paths of parameters when it starts, and the command of a late stage begins hours later."""
    (project / "dvc.yaml").write_text(
        f"stages:\n  slow:\n    cmd: exec {sys.executable} trainer.py slow\n    outs: [slow.out]\n"
        f"  late:\n    cmd: exec {sys.executable} trainer.py late\n"
        "    deps: [slow.out, 'external/${t.file}']\n    outs: [late.out]\n"
    )
    (project / "params.yaml").write_text("t: {file: old}")
    (project / "external").mkdir()
    for name in ("old", "new"):
        (project / "external" / name).write_text(name)
    command, environment = [sys.executable, "-m", "dvc", "repro", "late"], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True) as repro:
        trainer(project)
        (project / file).write_text((project / file).read_text().replace(old, new))
        (project / "enough").touch()
        _, said = repro.communicate(timeout=60)
    assert repro.returncode != 0 and not (project / "late.out").exists()
    assert "late: params.yaml or dvc.yaml was edited since `dvc` started: the stage would read external/new" in said
    assert "slow.out" in (project / "dvc.lock").read_text() and "external" not in (project / "dvc.lock").read_text()

    subprocess.run(command, cwd=project, env=environment, check=True)
    assert "external/new" in (project / "dvc.lock").read_text()


@pytest.mark.parametrize(
    ("read", "named", "refused"),
    [
        (["rows", "external/None"], ["rows", "external/None", "external/None"], ""),
        (["rows", "external/None", "external/x.py"], ["rows", "external/None", "external/None"], "external/x.py"),
        (["rows", "external/x.py"], ["rows", "external/None"], "external/x.py"),
        (["rows", "other", "external/y"], ["rows"], ""),  # left by a `dvc` that was killed and had this number
    ],
)
def test_what_dvc_resolved_is_compared_with_what_is_named_now(
    tmp_path: Path, read: list[str], named: list[str], refused: str
) -> None:
    entry = {"pid": os.getppid(), "cmd": "dvc repro"}
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    rwlock = {"read": {str(tmp_path / path): [entry] for path in [*read, "out"]}, "write": {str(tmp_path / "out"): entry}}
    (tmp_path / ".dvc/tmp/rwlock").write_text(json.dumps(rwlock))
    (tmp_path / "dvc.yaml").write_text(f"stages: {{s: {{cmd: x, deps: {named}, outs: [out]}}}}")
    for path in named:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    with pytest.raises(PipelineError, match=f"dvc.lock would say {refused}") if refused else nullcontext():
        with undisturbed("s", tmp_path, None):
            pass


@pytest.mark.parametrize("source", ["{}/rows.jsonl", "../rows.jsonl", "{}/project/../rows.jsonl"])
def test_a_source_outside_of_the_repository_is_read(tmp_path: Path, source: str) -> None:
    """DVC writes absolute paths down as they are, and `../` against the repository."""
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=project, check=True)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    named = source.format(tmp_path)
    (project / "params.yaml").write_text(f"source: {named}\n")
    code = (
        "from pathlib import Path; from pipeline.lineage.agreement import undisturbed as u\nwith u('s', Path.cwd(), None): pass"
    )
    (project / "agree.py").write_text(code)
    (project / "dvc.yaml").write_text(f"stages: {{s: {{cmd: exec {sys.executable} agree.py, deps: ['${{source}}']}}}}")
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_script_that_read_other_parameters_than_dvc_is_going_to_record_does_not_begin(tmp_path: Path) -> None:
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    params = parse_params(read_yaml(tmp_path / "params.yaml"))
    used = declaration("gate", params, dvc_file=tmp_path / "dvc.yaml")
    for path in used.deps + ["data/code/gate.json"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    with undisturbed("gate", tmp_path, used):
        pass
    with pytest.raises(PipelineError, match="edited while the stage started"):
        with undisturbed("gate", tmp_path, replace(used, params={"eval": {"gate": ["x"]}})):
            pass
