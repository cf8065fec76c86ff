"""Signals, the parent's death, locks and exit codes, seen from outside the process."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import DataError, HeldError, NumericsError, ParamsError
from pipeline.supervise import Stopped, exit_on_error, explain, hold, is_held, reason
from pipeline.supervise.ancestry import POLL_S, VARIABLE, Ancestor, handed_down, inherited

ROOT = Path(__file__).parents[1]

NO_SPACE = "no space left; free some (`python -m pipeline gc` helps) and run the same command: it resumes at the last save"
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signals exist on Linux")
def test_the_death_of_the_parent_stops_the_loop(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(textwrap.dedent(_loop()))
    parent = "import subprocess, sys; subprocess.run([sys.executable, 'toy.py'])"
    with _process(tmp_path, parent) as process:
        _wait(lambda: "ready" in _said(tmp_path))
        process.kill()
        _wait(lambda: "saved" in _said(tmp_path))


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
    own = psutil.Process()
    assert Ancestor(own.pid, own.create_time()).is_alive
    assert not Ancestor(own.pid, own.create_time() - 60).is_alive
    with subprocess.Popen(["true"]) as ended:
        started = psutil.Process(ended.pid).create_time()
        _wait(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        assert not Ancestor(ended.pid, started).is_alive
    assert not Ancestor(ended.pid, started).is_alive


def test_ancestors_are_handed_down_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "12:3.5,nonsense,13:4.5")
    assert inherited() == [Ancestor(12, 3.5), Ancestor(13, 4.5)]
    monkeypatch.setenv(VARIABLE, handed_down()[VARIABLE])
    assert inherited()[:2] == [Ancestor(12, 3.5), Ancestor(13, 4.5)] and inherited()[2].pid == os.getpid()
