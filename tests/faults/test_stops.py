"""Stops, exit codes, and what a run is resumed by: the real stage scripts, at tiny size."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.trainers import Lineage, Moment, Trainer, memory_folder, run_folders, start, wait_for
from lineage.project import ROOT, Project
from test_kills import Result

from pipeline.checkpoint.files import load_state
from pipeline.supervise import hold, is_held
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.saves import read_save

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "runtime.save_every_s": 0.001,
    "pretrain": {"epochs": 2, "batch_size": 8, "val_every": 5},
    "lora": {"batch_size": 4},
}
UPDATE = "pipeline.training.updater:Updater.update"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def lineage(folder: Path) -> Lineage:
    return Lineage(folder / "lineage", SETTINGS)


@pytest.fixture(scope="module")
def twin(lineage: Lineage, folder: Path) -> Result:
    root = lineage.copy_for("pretrain", folder / "twin", {}).root
    assert start(root, "pretrain").wait() == 0
    return Result.of(root, "pretrain")


@pytest.fixture(scope="module")
def life_s(lineage: Lineage, folder: Path) -> float:
    """Seconds that an undisturbed trainer holds the stage."""
    root = lineage.copy_for("pretrain", folder / "timed", {}).root
    trainer = start(root, "pretrain")
    wait_until_it_holds(root, trainer)
    began = time.monotonic()
    assert trainer.wait() == 0
    return time.monotonic() - began


@pytest.fixture
def project(lineage: Lineage, folder: Path) -> Iterator[Project]:
    root = folder / "project"
    yield lineage.copy_for("pretrain", root, {})
    for process in psutil.process_iter(["cmdline"]):  # feeders outlive their trainers, and would make the folder again
        command = process.info["cmdline"] or []
        if "pipeline.tracking.feeder" in command and command[-1].startswith(str(root)):
            process.kill()
    shutil.rmtree(root)


def run_folder(root: Path, stage: str = "pretrain") -> RunFolder:
    (path,) = run_folders(root, stage)
    return RunFolder(path)


def recorded(root: Path) -> list[int | None]:
    """The exit codes that the run and the stage have left."""
    return [read_json(path).get("code") for path in ends(root)]


def pause(root: Path, moment: str, call: int) -> Trainer:
    """A trainer that stands still at this moment."""
    trainer = start(root, "pretrain", at=Moment(moment, call, fault="pause"))
    wait_for((root / "paused").exists, trainer.said())
    return trainer


def wait_until_it_holds(root: Path, trainer: Trainer) -> None:
    """Until it is the stage's one process."""
    lock = root / ".runs/pretrain/lock"
    wait_for(lambda: lock.exists() and lock.read_text() == str(trainer.process.pid), "the lock")


def finish(root: Path, twin: Result) -> str:
    """Starts it again, and compares with the undisturbed run; what it said."""
    trainer = start(root, "pretrain")
    assert trainer.wait() == 0, trainer.said()
    assert Result.of(root, "pretrain") == twin
    return trainer.said()


# Signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_any_moment_saves_and_the_run_goes_on(
    project: Project, twin: Result, life_s: float, signum: signal.Signals
) -> None:
    rng, stopped = random.Random(signum), 0
    while True:
        trainer = start(project.root, "pretrain")
        wait_until_it_holds(project.root, trainer)
        trainer.process.join(rng.uniform(0.0, 0.6 * life_s))
        with suppress(ProcessLookupError):  # it has ended
            trainer.signal(signum)
        if trainer.wait() == 0:
            break
        stopped += 1
        assert trainer.process.exitcode == 128 + signum, trainer.said()
        last = trainer.said().splitlines()[-1]
        assert last.startswith(f"pretrain: stopped by {signum.name}")
        if "saved" in last:
            step = run_folder(project.root).commits()[0]
            assert last == f"pretrain: stopped by {signum.name} after step {step}, saved; the same command resumes"
            assert recorded(project.root) == [128 + signum] * 2
    assert stopped >= 1 and Result.of(project.root, "pretrain") == twin


@pytest.mark.parametrize(
    "moment",
    [
        ("pipeline.tracking.saves:_ChecksumWriter.write", 900),
        ("pipeline.tracking.saves:write_json", 2),
        ("pipeline.training.supervised:validate", 2),
        ("torch.optim.adamw:AdamW.step", 3),
    ],
)
def test_a_signal_within_a_save_an_update_or_an_evaluation_waits_for_its_end(
    project: Project, twin: Result, moment: tuple[str, int]
) -> None:
    trainer = pause(project.root, *moment)
    trainer.signal(signal.SIGTERM)
    time.sleep(0.2)
    assert trainer.process.is_alive()
    (project.root / "paused").unlink()
    assert trainer.wait() == 143 and "saved; the same command resumes" in trainer.said()
    step = run_folder(project.root).commits()[0]
    assert f"(resumes at step {step})" in finish(project.root, twin)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_has_changed_nothing_is_left_and_the_one_before_is_saved(
    project: Project, twin: Result, signum: signal.Signals
) -> None:
    """However long it would take, and although no save was due since the start."""
    project.set_params({"runtime": {"save_every_s": 1e6}})
    trainer = pause(project.root, UPDATE, 4)
    assert run_folder(project.root).commits() == []
    trainer.signal(signum)
    assert trainer.wait(10) == 128 + signum
    assert (project.root / "paused").exists() and run_folder(project.root).commits() == [3]
    limit = "" if signum == signal.SIGINT else ", within 25 s"
    then = "a second signal ends it at once, and then the same command begins anew: nothing was saved yet"
    reason = f"stopped by {signum.name} after step 3, saved; the same command resumes"
    assert trainer.said().splitlines()[-2:] == [
        f"pretrain: stopping: leaves step 4 and saves the weights after step 3{limit}; {then}",
        f"pretrain: {reason}",
    ]
    assert [read_json(path)["reason"] for path in ends(project.root)] == [reason] * 2
    (project.root / "paused").unlink()
    assert "(resumes at step 3)" in finish(project.root, twin)


def test_what_is_said_of_a_stop_before_any_save_is_true(project: Project, twin: Result) -> None:
    project.set_params({"runtime": {"save_every_s": 1e6}})
    trainer = pause(project.root, UPDATE, 1)
    trainer.signal(signal.SIGINT)
    anew = "the same command begins anew: nothing was saved yet"
    assert trainer.wait(10) == 130 and trainer.said().splitlines()[-1] == f"pretrain: stopped by SIGINT in step 1; {anew}"
    (project.root / "paused").unlink()
    trainer = pause(project.root, "torch.optim.adamw:AdamW.step", 2)
    for _ in range(2):
        trainer.signal(signal.SIGTERM)
        time.sleep(0.3)
    assert trainer.wait(10) == 143
    assert [read_json(path)["reason"] for path in ends(project.root)] == [f"stopped at once by SIGTERM; {anew}"] * 2
    (project.root / "paused").unlink()
    assert "(resumes at step 0)" in finish(project.root, twin)


def ends(root: Path) -> list[Path]:
    return [run_folder(root).exit, root / ".runs/pretrain/exit.json"]


@pytest.mark.parametrize("moment", [("torch.optim.adamw:AdamW.step", 4), ("pipeline.tracking.saves:_ChecksumWriter.write", 900)])
def test_a_second_signal_ends_at_once_and_the_last_save_stands(project: Project, twin: Result, moment: tuple[str, int]) -> None:
    trainer = pause(project.root, *moment)
    step = run_folder(project.root).commits()[0]
    trainer.signal(signal.SIGHUP)
    time.sleep(0.2)
    trainer.signal(signal.SIGTERM)
    assert trainer.wait(10) == 129 and recorded(project.root) == [129, 129]
    (project.root / "paused").unlink()
    assert f"(resumes at step {step})" in finish(project.root, twin)


def test_a_signal_while_outputs_are_written_lets_them_be_finished(project: Project, twin: Result) -> None:
    trainer = pause(project.root, "pipeline.checkpoint.files:write_atomically", 1)
    trainer.signal(signal.SIGTERM)
    (project.root / "paused").unlink()
    assert trainer.wait() == 0 and recorded(project.root) == [0, 0]
    assert Result.of(project.root, "pretrain") == twin


def test_a_signal_ends_the_wait_for_a_lock(project: Project) -> None:
    start(project.root, "pretrain", at=Moment(UPDATE, 3)).wait()
    with hold(run_folder(project.root).lock, wait=False):
        trainer = start(project.root, "pretrain")
        wait_until_it_holds(project.root, trainer)
        time.sleep(0.5)
        assert trainer.process.is_alive()
        trainer.signal(signal.SIGTERM)
        assert trainer.wait(10) == 143
        assert read_json(project.root / ".runs/pretrain/exit.json")["code"] == 143


# Other ends


def test_memory_that_runs_out_is_told_with_what_to_lower(project: Project, twin: Result) -> None:
    trainer = start(project.root, "pretrain", at=Moment(UPDATE, 3, fault="take the memory"))
    assert trainer.wait() == 5, trainer.said()
    line = trainer.said().splitlines()[-1]
    assert line.startswith("pretrain: out of memory (") and line.endswith(": lower pretrain.batch_size (now 8) in params.yaml")
    assert recorded(project.root) == [5, 5]
    assert read_json(run_folder(project.root).exit)["reason"] == line.removeprefix("pretrain: ")
    step = run_folder(project.root).commits()[0]
    assert 2 <= step < twin.history[-1][0]  # memory that was taken and freed before may do for a few steps
    assert f"(resumes at step {step})" in finish(project.root, twin)


def test_a_run_that_diverges_keeps_its_last_finite_save(project: Project) -> None:
    project.set_params({"pretrain": {"lr": 1e10, "warmup_steps": 4, "epochs": 20}})
    trainer = start(project.root, "pretrain")
    assert trainer.wait() == 4, trainer.said()
    assert recorded(project.root) == [4, 4]
    folder = run_folder(project.root)
    assert folder.commits()
    for step in folder.commits():
        assert all(weights.isfinite().all() for weights in read_save(folder, step)["modules"]["model"].values())
    again = start(project.root, "pretrain")
    assert again.wait() == 4 and f"(resumes at step {folder.commits()[0]})" in again.said()


@pytest.mark.parametrize(("stage", "code"), [("data@pretrain", 3), ("tokenizer", 3), ("pretrain", 3)])
def test_stages_with_and_without_a_run_leave_their_exit_code(project: Project, stage: str, code: int) -> None:
    (project.root / "data/world.yaml").unlink()
    for path in ("data/prepared/pretrain", "data/encoded/pretrain"):
        shutil.rmtree(project.root / path)
    trainer = start(project.root, stage)
    assert trainer.wait() == code, trainer.said()
    found = read_json(project.root / ".runs" / stage / "exit.json")
    assert found["code"] == code and found["reason"] == trainer.said().splitlines()[-1].removeprefix(f"{stage}: ")


# What a run is resumed by


def begin(project: Project, stage: str) -> None:
    """A run that was killed in its third step."""
    assert start(project.root, stage, at=Moment(UPDATE, 3)).wait() == -signal.SIGKILL


def opened(project: Project, stage: str) -> str:
    """Whether the run that the stage opens now is new, or resumes."""
    trainer = start(project.root, stage, at=Moment(UPDATE, 1))
    assert trainer.wait() == -signal.SIGKILL, trainer.said()
    return "resumes" if "(resumes at step" in trainer.said() else "new"


def test_another_recipe_refuses_old_state(lineage: Lineage, folder: Path) -> None:
    def again(name: str) -> Project:
        copy = Project(folder / name, folder / "attempts.txt")
        shutil.copytree(project.root, copy.root)
        return copy

    project = lineage.copy_for("lora", folder / "lora", {})
    begin(project, "lora")
    same, param, row, parent, code = map(again, ("same", "param", "row", "parent", "code"))
    assert opened(same, "lora") == "resumes"
    param.set_params({"lora.lr": 3e-3})
    assert opened(param, "lora") == "new"
    world = row.root / "data/world.yaml"
    world.write_text(world.read_text().replace("seed: ", "seed: 1"))
    for stage in ("data@lora", "encode@lora"):
        assert start(row.root, stage).wait() == 0
    assert opened(row, "lora") == "new"
    parent.set_params({"full_sft.lr": 7e-4})
    assert start(parent.root, "full_sft").wait() == 0
    assert opened(parent, "lora") == "new"
    hashes = code.root / "data/code/lora.json"
    hashes.write_text(hashes.read_text().replace('"pipeline.training.state": "', '"pipeline.training.state": "0'))
    assert opened(code, "lora") == "new"


def test_how_a_stage_is_run_refuses_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(project, "pretrain")
    changes: list[dict[str, Any]] = [
        {"save_every_s": 1e9},
        {"keep_saves": 5},
        {"keep_every_steps": 7},
        {"threads": 2},
        {"device": "auto"},
        {"gradient_checkpointing": True},
        {"progress": "on"},
        {"mlflow": True},
        {"guard": "off"},
    ]
    for change in changes:
        project.set_params({"runtime": change})
        assert opened(project, "pretrain") == "resumes", change
    assert len(run_folders(project.root, "pretrain")) == 1


def test_a_run_moves_between_one_rank_and_two(project: Project, twin: Result) -> None:
    def started(ranks: int) -> "subprocess.Popen[str]":
        project.set_params({"runtime.ranks": ranks})
        environment = project.environment(
            PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MLFLOW_TRACKING_URI="sqlite:////elsewhere.db"
        )
        command = [sys.executable, "-m", "stages.pretrain"]
        return subprocess.Popen(command, cwd=project.root, env=environment, stderr=subprocess.PIPE, text=True)

    def newest() -> int:
        folders = run_folders(project.root, "pretrain")
        return max(RunFolder(folders[0]).commits(), default=0) if folders else 0

    for ranks in (1, 2):
        before = newest()
        with started(ranks) as process:
            wait_for(lambda known=before: newest() > known + 1, f"{ranks} ranks")  # type: ignore[misc]
            process.terminate()
            assert process.wait(60) == 143
            assert process.stderr is not None and (f"resumes at step {before}" in process.stderr.read()) == (ranks == 2)
    with started(1) as process:
        assert process.wait(120) == 0
    found = Result.of(project.root, "pretrain")
    found.check_steps()
    for (step, metrics), (twins_step, expected) in zip(found.history, twin.history, strict=True):
        assert step == twins_step and metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    weights, expected_weights = (
        load_state(root / "checkpoints/pretrain.pth") for root in (project.root, project.root.parent / "twin")
    )
    for name, tensor in weights.items():
        assert (tensor - expected_weights[name]).abs().max() < 1e-4, name


# One trainer


def test_a_second_trainer_is_refused_by_the_live_one_alone(project: Project, twin: Result) -> None:
    """Not by a process that it has started, nor by one that ended and is a zombie, nor by a number in the file."""
    project.set_params({"runtime.mlflow": True})
    trainer = pause(project.root, UPDATE, 3)
    second = start(project.root, "pretrain")
    assert second.wait() == 6 and f"held by the live process {trainer.process.pid};" in second.said()
    assert second.said().count("\n") == 1
    assert read_json(project.root / ".runs/pretrain/exit.json") == {}  # the first one's end is what counts
    project.set_params({"runtime.mlflow": False})
    (project.root / "paused").unlink()
    feeder = run_folder(project.root).feeder_lock
    wait_for(lambda: is_held(feeder), "the feeder")
    trainer.process.kill()
    trainer.process.join()
    (project.root / ".runs/pretrain/lock").write_text("1")  # a number given again, of a process that lives
    third = start(project.root, "pretrain")
    wait_until_it_holds(project.root, third)
    assert is_held(feeder)  # the first one's feeder lives on, and holds nothing of the trainer's
    assert third.wait() == 0, third.said()
    assert Result.of(project.root, "pretrain") == twin


def test_a_zombie_holds_nothing(project: Project) -> None:
    code = "import os, signal, sys; from stages.pretrain import main; sys.argv = ['x']; main()"
    environment = project.environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    with subprocess.Popen([sys.executable, "-c", code], cwd=project.root, env=environment, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: run_folders(project.root, "pretrain"), "the run")
        process.kill()
        wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "the end")
        assert start(project.root, "pretrain").wait() == 0
