"""Stages that start their own ranks: one record and one output, stops and deaths that reach every process, errors in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_supervised_loop import language_task, make_settings
from tiny_runs import assert_near, documents, make_model, make_set, make_tokenizer

from pipeline.errors import DataError, GuardError
from pipeline.params.schema import Runtime
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.supervised import train_supervised
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def main(sets: Path, ranks: int, epochs: int, fault: str) -> None:
    """A small stage in the current directory; the rank that `fault` names fails."""
    own = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "ranks": ranks,
        "mlflow": False,
        "save_every_s": 1e9,
        "guard": "stop",
    }
    runtime = Runtime.model_validate(read_yaml(ROOT / "params.yaml")["runtime"] | own)
    settings = make_settings(epochs=epochs, accumulation_steps=3, val_every=10**6, lr=3e-4)
    params: dict[str, Any] = {"pretrain": {"epochs": epochs}}
    if fault == f"edit {os.environ.get('RANK')}":
        params["pretrain"]["lr"] = 1.0
    with stage_run("pretrain", params=params, inputs=[], runtime=runtime, ranked=True) as run:
        device = open_device(runtime)
        Path(f"rank{device.ranks.rank}.pid").write_text(str(os.getpid()))
        if fault == "ports":
            ends = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
            ports = device.ranks.gather([[each.laddr.ip for each in ends]])
            Path("out.json").write_text(json.dumps(ports))
            return
        if fault == str(device.ranks.rank):
            raise DataError(f"rank {fault} misses its data")
        if fault == "guard":
            for step in range(1, 100):
                run.log(step, {"train/skipped_steps": float(step)})
                run.checkpoint(step, dict)
        task, _ = language_task(sets, load_tokenizer(sets / "tokenizer"), settings, open_model(sets))
        summary = train_supervised(task, settings, device, run)
        Path("out.json").write_text(json.dumps({"rank": device.ranks.rank, "size": device.ranks.size, **summary}))
        torch.save(task.state.modules["model"].state_dict(), "out.pth")


def open_model(sets: Path) -> Any:
    return make_model(load_tokenizer(sets / "tokenizer"), sharpness=4.0)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_set(folder, "pretrain", documents(13), make_tokenizer(folder / "tokenizer"))
    return folder


@contextmanager
def stage(folder: Path, sets: Path, *, ranks: int = 2, epochs: int = 2, fault: str = "") -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(sets), str(ranks), str(epochs), fault]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            for path in folder.glob("rank*.pid"):  # one that a test has halted does not notice
                with suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def logged_steps(folder: Path) -> list[int]:
    lines = [line for path in folder.glob(".runs/pretrain/*/*/metrics.jsonl") for line in path.read_text().splitlines()]
    return [step for line in lines if (step := json.loads(line)["step"])]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def follower(folder: Path) -> int:
    return int((folder / "rank1.pid").read_text())


def test_ranks_leave_one_record_and_the_outputs_of_one_process(tmp_path: Path, sets: Path) -> None:
    for name, ranks in (("one", 1), ("two", 2)):
        with stage(tmp_path / name, sets, ranks=ranks) as process:
            assert process.wait(240) == 0, process.stderr and process.stderr.read()
    one, two = (json.loads((tmp_path / name / "out.json").read_text()) for name in ("one", "two"))
    assert (two.pop("rank"), two.pop("size"), one.pop("rank"), one.pop("size")) == (0, 2, 0, 1)
    assert two == pytest.approx(one, abs=1e-5)
    weights = [torch.load(tmp_path / name / "out.pth", weights_only=True) for name in ("one", "two")]
    assert_near(weights[0], weights[1], 1e-5)
    assert sorted(set(logged_steps(tmp_path / "two"))) == [1, 2, 3, 4]
    assert len(logged_steps(tmp_path / "two")) == len(logged_steps(tmp_path / "one"))
    assert not alive(follower(tmp_path / "two"))


def test_ranks_listen_on_loopback_alone(tmp_path: Path, sets: Path) -> None:
    with stage(tmp_path / "ports", sets, fault="ports") as process:
        assert process.wait(90) == 0, process.stderr and process.stderr.read()
    ports = json.loads((tmp_path / "ports/out.json").read_text())
    assert len(ports) == 2 and {address for each in ports for address in each} <= {"127.0.0.1", "::1"}


def test_a_stop_reaches_all_ranks_and_the_run_goes_on(tmp_path: Path, sets: Path) -> None:
    with stage(tmp_path / "whole", sets, epochs=40) as process:
        assert process.wait(240) == 0
    folder = tmp_path / "stopped"
    with stage(folder, sets, epochs=40) as process:
        until(lambda: len(logged_steps(folder)) > 5)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert process.stderr is not None and "saved; the same command resumes" in process.stderr.read()
    until(lambda: not alive(follower(folder)), 10)
    done = logged_steps(folder)[-1]
    assert 5 < done < 80 and not (folder / "out.json").exists()
    with stage(folder, sets, epochs=40) as process:
        assert process.wait(240) == 0
        assert process.stderr is not None and f"resumes at step {done}" in process.stderr.read()
    weights = [torch.load(tmp_path / name / "out.pth", weights_only=True) for name in ("whole", "stopped")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_death_of_rank_0_ends_the_others_with_a_line_each(tmp_path: Path, sets: Path) -> None:
    with stage(tmp_path, sets, ranks=3, epochs=4000) as process:
        until(lambda: len(logged_steps(tmp_path)) > 5)
        process.kill()
        until(lambda: not alive(follower(tmp_path)), 40)
        assert process.stderr is not None
        said = process.stderr.read()  # ends when the last process has
    assert "Traceback" not in said
    for rank in (1, 2):
        assert said.count(f"pretrain, rank {rank}: stopped by SIGTERM") == 1


def test_a_stop_is_obeyed_while_rank_0_waits_for_another_one(tmp_path: Path, sets: Path) -> None:
    """Inside of torch, where no signal handler of Python runs."""
    with stage(tmp_path, sets, epochs=4000) as process:
        until(lambda: len(logged_steps(tmp_path)) > 5)
        os.kill(follower(tmp_path), signal.SIGSTOP)
        time.sleep(1.0)
        done = logged_steps(tmp_path)[-1]
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        assert process.stderr is not None
        said = process.stderr.read()
    assert f"stopped by SIGTERM after step {done}, saved; the same command resumes" in said and "Traceback" not in said
    assert not alive(follower(tmp_path))


def test_a_follower_that_is_killed_is_named_with_its_signal(tmp_path: Path, sets: Path) -> None:
    with stage(tmp_path, sets, ranks=3, epochs=4000) as process:
        until(lambda: len(logged_steps(tmp_path)) > 5)
        os.kill(follower(tmp_path), signal.SIGKILL)
        assert process.wait(30) == 128 + signal.SIGKILL
        assert process.stderr is not None
        said = process.stderr.read()
    reason = "rank 1 was killed by SIGKILL (by the kernel, if memory ran out)"
    assert f"pretrain: {reason}\n" in said and "Traceback" not in said
    for end in tmp_path.glob(".runs/pretrain/**/exit.json"):
        assert json.loads(end.read_text())["reason"] == reason


def test_a_stop_of_the_guard_ends_all_ranks(tmp_path: Path, sets: Path) -> None:
    with stage(tmp_path / "run", sets, fault="guard") as process:
        _, said = process.communicate(timeout=90)
    assert process.returncode == GuardError.exit_code
    assert said.count("stopped by runtime.guard after step 10, saved") == 1 and "Traceback" not in said
    (save,) = (tmp_path / "run/.runs/pretrain").glob("*/1/state-*.json")
    assert save.name == "state-00000010.json"
    for pid in (tmp_path / "run").glob("rank*.pid"):
        assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize("fault", ["1", "2"])
def test_a_rank_that_fails_decides_the_exit_code(tmp_path: Path, sets: Path, fault: str) -> None:
    """The third one, that loses its connections, says so in a line."""
    with stage(tmp_path, sets, ranks=3, fault=fault) as process:
        assert process.wait(240) == DataError.exit_code
        assert process.stderr is not None
        said = process.stderr.read()
    assert f"pretrain, rank {fault}: rank {fault} misses its data" in said and "Traceback" not in said


def test_a_rank_that_read_other_parameters_takes_no_step(tmp_path: Path, sets: Path) -> None:
    """It starts seconds after rank 0, and reads what lies there by then."""
    with stage(tmp_path, sets, fault="edit 1") as process:
        _, said = process.communicate(timeout=120)
    assert (
        process.returncode == 1 and "rank 1: params.yaml was edited while the ranks started; give the same command again" in said
    )
    assert logged_steps(tmp_path) == [] and not (tmp_path / "out.pth").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
