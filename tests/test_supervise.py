"""Signals, the parent's death, locks and exit codes, seen from outside the process."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import DataError, HeldError, NumericsError, ParamsError
from pipeline.supervise import Stopped, exit_on_error, explain, hold, is_held, reason, signal_name
from pipeline.supervise.ancestry import POLL_S, VARIABLE, Ancestor, handed_down, inherited, watched
from pipeline.supervise.signals import STUCK_S

ROOT = Path(__file__).parents[1]

NO_SPACE = "no space left; free some (`python -m pipeline gc` helps) and run the same command: what was saved is kept"
# Answers a stop request like a training loop; every progress is a line in the file `said`.
LOOP = """
    import time
    from pipeline.supervise import Stopped, StopSignals, exit_on_error

    def say(text):
        with open("said", "a") as file:
            file.write(text + chr(10))

    with exit_on_error("toy"), StopSignals(grace_s={grace}) as stop:
        stop.on_abort = lambda code, reason: say(f"abort {{code}}")
        stop.deferred = {deferred}
        say("ready")
        step_end = time.monotonic() + {step_s}
        while stop.requested is None or time.monotonic() < step_end:
            time.sleep(0.01)
        say("saved")
        raise Stopped(stop.requested)
"""


def _wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def _said(folder: Path) -> list[str]:
    return (folder / "said").read_text().split("\n")[:-1] if (folder / "said").exists() else []


@contextmanager
def _process(folder: Path, code: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _loop(*, grace_s: float = 20.0, deferred: bool = True, step_s: float = 0.0) -> str:
    return LOOP.format(grace=grace_s, deferred=deferred, step_s=step_s)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_loop_save_and_sets_the_exit_code(tmp_path: Path, signum: int) -> None:
    with _process(tmp_path, _loop(step_s=0.3)) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.send_signal(signum)
        assert process.wait(20) == 128 + signum
        assert process.stderr is not None
        assert process.stderr.read() == f"toy: stopped by {signal.Signals(signum).name}\n"
    assert _said(tmp_path) == ["ready", "saved"]


def test_no_reader_of_files_takes_a_stop_for_a_fault_of_its_own(tmp_path: Path) -> None:
    """A library that wraps every exception, in the middle of which the signal arrives."""
    code = """
        import os, signal
        from pipeline.errors import DataError
        from pipeline.supervise import StopSignals, exit_on_error

        with exit_on_error("toy"), StopSignals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception as error:
                raise DataError(f"a.json: not readable: {error}") from error
    """
    with _process(tmp_path, code) as process:
        assert process.wait(20) == 143


def test_before_the_loop_there_is_nothing_to_save(tmp_path: Path) -> None:
    with _process(tmp_path, _loop(deferred=False, step_s=60)) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.terminate()
        assert process.wait(20) == 143
    assert _said(tmp_path) == ["ready"]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with _process(tmp_path, _loop(step_s=60)) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == 130  # of the first signal
    assert _said(tmp_path) == ["ready", "abort 130"]


def test_a_step_that_does_not_end_is_cut_off(tmp_path: Path) -> None:
    with _process(tmp_path, _loop(step_s=60, grace_s=0.3)) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.terminate()
        assert process.wait(20) == 143
    assert _said(tmp_path) == ["ready", "abort 143"]


def test_ctrl_c_has_no_limit_as_it_can_be_pressed_again(tmp_path: Path) -> None:
    with _process(tmp_path, _loop(step_s=1.5, grace_s=0.3)) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert _said(tmp_path) == ["ready", "saved"]


WORK = """
    import ctypes, os, signal, sys, time
    from pathlib import Path
    from pipeline.supervise import Stopped, StopSignals, exit_on_error

    whole = {whole}
    with exit_on_error("toy"), StopSignals() as stop:
        stop.deferred = {deferred}
        stop.say, stop.answer, stop.kept = print, lambda: "whole" if whole else "torn", lambda: "nothing was saved"
        stop.on_abort = lambda code, reason: Path("reason").write_text(reason)
        try:
            with stop.interruptible(lambda: whole):
                {work}
        except Stopped as stopped:
            time.sleep(0.3)  # a save, which nothing interrupts
            print("saved", flush=True)
            raise
"""
WAIT_FOR_EVER = "mutex = bytes(40); [ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"


def _worked(folder: Path, work: str, *, deferred: bool = True, whole: bool = True) -> tuple[int, str]:
    """Exit code and output of a process that is told to stop as soon as it is at work."""
    code = WORK.format(work=f"print('ready', flush=True); {work}", deferred=deferred, whole=whole)
    with _process(folder, code, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.terminate()
        return process.wait(20), process.stdout.read()


def test_work_that_has_changed_nothing_is_left_and_other_work_is_finished(tmp_path: Path) -> None:
    wait = "end = time.monotonic() + 1; [None for _ in iter(lambda: time.monotonic() < end, False)]"
    assert _worked(tmp_path, f"{wait}; print('finished')") == (143, "whole\nsaved\n")
    assert _worked(tmp_path, f"{wait}; print('finished')", whole=False) == (0, "torn\nfinished\n")


def test_a_request_from_before_is_answered_where_work_begins(tmp_path: Path) -> None:
    before = "\n".join(
        [
            "[time.sleep(0.01) for _ in iter(lambda: stop.requested is None, False)]; whole = True",
            "                with stop.interruptible(lambda: whole): print('begun')",
        ]
    )
    assert _worked(tmp_path, before, whole=False) == (143, "torn\nsaved\n")


@pytest.mark.parametrize("deferred", [False, True])
def test_a_main_thread_that_waits_inside_of_an_operation_stops(tmp_path: Path, deferred: bool) -> None:
    """Python runs no handler then; torch waits like this for another rank."""
    ends_the_wait = "stop.on_wait = lambda: (print('broken off', flush=True), os._exit(7))"
    began = time.monotonic()
    code, said = _worked(tmp_path, f"{ends_the_wait}; {WAIT_FOR_EVER}", deferred=deferred)
    assert time.monotonic() - began < STUCK_S + 5
    if deferred:
        assert (code, said) == (7, "whole\nbroken off\n")
    else:
        reason = "stopped at once by SIGTERM; nothing was saved"
        assert (code, said, (tmp_path / "reason").read_text()) == (143, f"{reason}\n", reason)


def test_a_child_that_is_forked_is_no_part_of_the_stage(tmp_path: Path) -> None:
    """It does not hold the lock, dies of SIGTERM like any process, and the stage hears nothing of that."""
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from pipeline.supervise import StopSignals, exit_on_error, hold

        with exit_on_error("toy"), StopSignals() as stop, hold(Path("lock"), wait=False):
            stop.deferred = True
            first, second = [os.fork() or (time.sleep(60), os._exit(9)) for _ in range(2)]
            time.sleep(0.2)
            os.kill(first, signal.SIGTERM)
            _, status = os.waitpid(first, 0)
            time.sleep(0.2)
            print(os.waitstatus_to_exitcode(status), stop.requested, second, flush=True)
            time.sleep(60)
    """
    with _process(tmp_path, code, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        status, requested, second = process.stdout.readline().split()
        try:
            assert (int(status), requested) == (-signal.SIGTERM, "None")
            assert is_held(tmp_path / "lock") and psutil.pid_exists(int(second))
            process.kill()
            process.wait()
            assert not is_held(tmp_path / "lock") and psutil.pid_exists(int(second))
        finally:
            os.kill(int(second), signal.SIGKILL)


def test_every_signal_has_a_name() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    for signum in range(1, signal.NSIG):
        assert signal_name(signum) and str(Stopped(signum)).startswith("stopped by ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signals exist on Linux")
def test_the_death_of_the_parent_stops_the_loop(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(textwrap.dedent(_loop()))
    parent = "import subprocess, sys; subprocess.run([sys.executable, 'toy.py'])"
    with _process(tmp_path, parent) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.kill()
        _wait(lambda: "saved" in _said(tmp_path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signals exist on Linux")
def test_who_has_stopped_says_so_although_its_parent_dies_meanwhile(tmp_path: Path) -> None:
    """A rank whose connection breaks unwinds while rank 0 still dies: the signal of that death must not cut its line off."""
    code = """
        import os, sys, time
        from pathlib import Path
        from pipeline.supervise import StopSignals
        parent = os.getppid()
        with StopSignals():
            pass
        Path("said").write_text("ready\\n")
        while os.getppid() == parent:
            time.sleep(0.01)
        time.sleep(0.3)
        Path("said").write_text("ready\\nmore\\n")
    """
    (tmp_path / "toy.py").write_text(textwrap.dedent(code))
    parent = "import subprocess, sys; subprocess.run([sys.executable, 'toy.py'])"
    with _process(tmp_path, parent) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.kill()
        _wait(lambda: "more" in _said(tmp_path), timeout_s=10)


def test_no_death_is_told_after_the_watch_is_over() -> None:
    asked, answer, told = threading.Event(), threading.Event(), []

    class Slow(Ancestor):
        @property
        def is_alive(self) -> bool:
            asked.set()
            return answer.wait(10) and False

    with watched([Slow(1, 1.0)], lambda: told.append("dead")):
        asked.wait(10)
        threading.Timer(0.2, answer.set).start()
    before = list(told)
    time.sleep(0.5)
    assert told == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signals exist on Linux")
def test_terminating_the_whole_group_still_saves(tmp_path: Path) -> None:
    """The parent dies of the same signal, and its death must not count as the second one."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(_loop(step_s=1.0)))
    parent = "import subprocess, sys; subprocess.run([sys.executable, 'toy.py'])"
    with _process(tmp_path, parent, start_new_session=True) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        os.killpg(process.pid, signal.SIGTERM)
        _wait(lambda: len(_said(tmp_path)) == 2)
    assert _said(tmp_path) == ["ready", "saved"]


def test_a_closed_console_does_not_stop_the_stage(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from pipeline.stage import stage_process
        from pipeline.tracking.console import ProgressBar
        with stage_process("toy"), ProgressBar("toy", 30, mode="on") as bar:
            while not Path("closed").exists():
                time.sleep(0.01)
            for step in range(30):
                print("a warning", file=sys.stderr, flush=True)
                bar.update(step, loss=0.5)
                bar.note(step, val_loss=0.5)
        Path("done").touch()
    """
    with _process(tmp_path, code) as process:
        assert process.stderr is not None
        process.stderr.close()
        (tmp_path / "closed").touch()
        assert process.wait(30) == 0
    assert (tmp_path / "done").exists()


def test_nohup_is_respected(tmp_path: Path) -> None:
    """Without DVC above it, a process that ignores SIGHUP outlives its parent; SIGTERM still stops it."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(_loop()))
    parent = (
        "import subprocess, sys; p = subprocess.Popen(['nohup', sys.executable, 'toy.py']); print(p.pid, flush=True); p.wait()"
    )
    with _process(tmp_path, parent, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        _wait(lambda: "ready" in _said(tmp_path))
        process.kill()
        os.kill(child, signal.SIGHUP)
        time.sleep(0.5)
        assert _said(tmp_path) == ["ready"]
        os.kill(child, signal.SIGTERM)
        _wait(lambda: "saved" in _said(tmp_path))


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "stage" / "lock"
    code = f"""
        import time
        from pathlib import Path
        from pipeline.supervise import hold
        with hold(Path({str(lock)!r}), wait=False):
            time.sleep(60)
    """
    with _process(tmp_path, code) as process:
        _wait(lambda: is_held(lock))
        _wait(lambda: lock.read_text() == str(process.pid))
        with pytest.raises(HeldError, match=f"live process {process.pid};"), hold(lock, wait=False):
            pass
        process.kill()  # SIGKILL: nothing is cleaned up
        with hold(lock, wait=True):
            assert is_held(lock)
    assert not is_held(lock)
    assert not is_held(tmp_path / "absent")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ParamsError("grpo.group_size=1: must be >= 2"), 2, "grpo.group_size=1: must be >= 2"),
        (DataError("a.jsonl:3: not JSON", "a.jsonl:9: no role"), 3, "a.jsonl:3: not JSON\na.jsonl:9: no role"),
        (NumericsError("loss is nan"), 4, "loss is nan"),
        (MemoryError(), 5, "out of memory (host memory): lower x"),
        (RuntimeError("CUDA out of memory. 2 GiB\nmore"), 5, "out of memory (CUDA out of memory. 2 GiB): lower x"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes"), 5, None),
        (HeldError("held"), 6, "held"),
        (Stopped(signal.SIGTERM, " after step 3"), 143, "stopped by SIGTERM after step 3"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "f.pt"), 8, f"f.pt: {NO_SPACE}"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 8, f"the disk: {NO_SPACE}"),
        (OSError(errno.EACCES, "Permission denied", "f.pt"), 1, None),
        (SystemExit(7), 7, None),
    ],
)  # fmt: skip
def test_errors_have_exit_codes_and_readable_lines(error: BaseException, code: int, line: str | None) -> None:
    found, lines = explain(error, "lower x")
    assert found == code
    assert line is None or "\n".join(lines) == line


def test_the_reason_is_the_first_fault_not_the_last_line() -> None:
    assert reason(DataError("a.jsonl:3: not JSON", "and 3852 more faults")) == (3, "a.jsonl:3: not JSON")
    try:
        raise RuntimeError("shapes differ\nby one")
    except RuntimeError as error:
        assert reason(error) == (1, "RuntimeError: shapes differ")


def test_a_full_disk_is_recognised_behind_what_torch_makes_of_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "state.pt.tmp")
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904
    assert explain(caught.value) == (8, [f"state.pt.tmp: {NO_SPACE}"])


def test_a_real_allocation_failure_is_recognised() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert explain(caught.value)[0] == 5


def test_mistakes_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error("toy"):
        raise KeyError("missing")
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "test_supervise.py" in printed and "KeyError: 'missing'" in printed


def test_each_fault_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_error("data@dpo"):
        raise DataError("a.jsonl:3: not JSON", "a.jsonl:9: no role")
    assert ended.value.code == 3
    assert capsys.readouterr().err == "data@dpo: a.jsonl:3: not JSON\ndata@dpo: a.jsonl:9: no role\n"


ANCESTOR = """
    import os, subprocess, sys
    from pipeline.supervise.ancestry import handed_down

    subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, **handed_down()})
"""


@pytest.mark.parametrize("stopped", ["flow", "middle"])
def test_the_death_of_any_ancestor_stops_the_loop(tmp_path: Path, stopped: str) -> None:
    """flow -> middle -> a process that outlives its parent, as dvc does -> the loop."""
    for name, code in (("flow", ANCESTOR), ("toy", _loop())):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    relay = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    chain = [sys.executable, "flow.py", "flow.py", "-c", relay, "toy.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(chain, cwd=tmp_path, env=environment, start_new_session=True) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        middle = psutil.Process(process.pid).children()[0]
        loop = middle.children(recursive=True)[-1]
        try:
            (process if stopped == "flow" else middle).kill()
            _wait(lambda: "saved" in _said(tmp_path), timeout_s=POLL_S + 10)
            loop.wait(20)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_zombie_and_a_number_given_again_are_no_ancestors() -> None:
    own = Ancestor.of(os.getpid())
    assert own.is_alive
    assert not own._replace(began=own.began - 60).is_alive
    with subprocess.Popen(["true"]) as ended:
        zombie = Ancestor.of(ended.pid)
        _wait(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        assert not zombie.is_alive
    assert not zombie.is_alive


def test_a_step_of_the_clock_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel says of the clock's past moves when the clock is set; a process lives on."""
    own = Ancestor.of(os.getpid())
    told_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: told_s + 3600)
    assert psutil.Process().create_time() > time.time() + 1800
    assert own.is_alive


def test_ancestors_are_handed_down_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "12:3.5,nonsense,13:4.5")
    assert inherited() == [Ancestor(12, 3.5), Ancestor(13, 4.5)]
    monkeypatch.setenv(VARIABLE, handed_down()[VARIABLE])
    assert inherited()[:2] == [Ancestor(12, 3.5), Ancestor(13, 4.5)] and inherited()[2].pid == os.getpid()
