"""Resumable states: which are kept, which are not gone on with and why, and what is never written."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.tracking import saves
from pipeline.tracking.recorder import JsonLines, Recorder
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.saves import newest_save, prune_finished, read_save, write_save


def open_recorder(folder: RunFolder, save: dict[str, Any]) -> Recorder:
    sizes = [save.get(f"{name}_bytes", 0) for name in ("metrics", "samples")]
    return Recorder(JsonLines(folder.metrics, sizes[0]), JsonLines(folder.samples, sizes[1]))


def never(step: int) -> bool:
    return False


def train(
    folder: RunFolder, last: int, *, keep: int = 2, stays: Callable[[int], bool] = never, replays: Callable[[int], bool] = never
) -> None:
    """Goes on from the newest save, and saves after each step."""
    save = newest_save(folder) or {"step": 0}
    recorder = open_recorder(folder, save)
    for step in range(save["step"] + 1, last + 1):
        recorder.log(step, {"loss": 1 / step})
        recorder.log_samples(step, [{"text": str(step)}])
        state = {"step": step, "weights": torch.full((99,), float(step)), "counters": {"tokens": 5.0}}
        assert write_save(folder, step, state, recorder.sync(), keep=keep, stays=stays(step), replays=replays(step))
    recorder.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with saves of steps 3 and 4."""
    path = tmp_path / "recipe" / "1"
    path.mkdir(parents=True)
    train(RunFolder(path), 4)
    return RunFolder(path)


def resumed_step(folder: RunFolder) -> int:
    return (newest_save(folder) or {"step": 0})["step"]


# Which are kept


def test_the_newest_and_those_that_stay_are_kept(folder: RunFolder) -> None:
    train(folder, 11, keep=2, stays=lambda step: step % 3 == 0)
    assert folder.commits() == [11, 10, 9, 6]
    train(folder, 13, keep=1, stays=lambda step: step % 4 == 0)  # another interval: what was kept stays
    assert folder.commits() == [13, 12, 9, 6]
    assert {path.stem for path in folder.path.glob("state-*.pt")} == {f"state-{step:08d}" for step in (13, 12, 9, 6)}
    assert read_save(folder, 6)["step"] == 6 and resumed_step(folder) == 13


def test_a_finished_run_keeps_its_last_save_until_the_next_one_and_those_that_stay(folder: RunFolder) -> None:
    train(folder, 7, stays=lambda step: step == 5)
    other, unfinished = RunFolder(folder.path.parents[1] / "other" / "1"), RunFolder(folder.path.parent / "2")
    for run in (other, unfinished):
        run.path.mkdir(parents=True)
        train(run, 3)
    write_json(folder.about, {"attempt_s": 10.0})
    write_json(folder.exit, {"code": 0, "time_s": 20.0})
    (folder.path / "state-00000006.pt.damaged").touch()
    prune_finished(folder.path.parents[1], folder)
    assert [run.commits() for run in (folder, other, unfinished)] == [[7, 5], [3, 2], [3, 2]]
    assert not list(folder.path.glob("*.damaged"))
    write_json(other.about, {"attempt_s": 20.5})
    write_json(other.exit, {"code": 0, "time_s": 30.0})
    write_json(unfinished.exit, {"code": 143, "time_s": 15.0})
    prune_finished(folder.path.parents[1], other)
    assert [run.commits() for run in (folder, other, unfinished)] == [[5], [3], [3, 2]]


def test_a_run_whose_beginning_is_not_known_leaves_the_others_alone(folder: RunFolder) -> None:
    train(folder, 7)
    other = RunFolder(folder.path.parents[1] / "other" / "1")
    other.path.mkdir(parents=True)
    train(other, 3)
    for run in (folder, other):
        write_json(run.exit, {"code": 0, "time_s": 5.0})
    other.about.write_text("{ cut")
    prune_finished(folder.path.parents[1], other)
    assert [run.commits() for run in (folder, other)] == [[7, 6], [3]]


def test_runs_of_two_workspaces_that_end_together_keep_their_last_saves_until_another_has_begun(folder: RunFolder) -> None:
    """Neither knows whether the other's DVC has taken over what it made. The saves for replays go with the last ones."""
    runs = [folder, *(RunFolder(folder.path.parents[1] / name / "1") for name in ("other", "later"))]
    for run, begun_s, ended_s in zip(runs, (10.0, 15.0, 20.2), (20.1, 20.1, 30.0), strict=True):
        run.path.mkdir(parents=True, exist_ok=True)
        train(run, 6, replays=lambda step: step == 3)
        write_json(run.about, {"attempt_s": begun_s})
        write_json(run.exit, {"code": 0, "time_s": ended_s})
    for run in runs[:2]:
        prune_finished(folder.path.parents[1], run)
    assert [run.commits() for run in runs] == [[6], [6, 3], [6, 5, 3]]
    prune_finished(folder.path.parents[1], runs[2])
    assert [run.commits() for run in runs] == [[], [], [6, 3]]


# Which are not gone on with


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def resign(folder: RunFolder, step: int) -> None:
    """Makes the sidecar fit the state, as somebody who knows the format could."""
    write_json(folder.commit(step), read_json(folder.commit(step)) | {"crc32": zlib.crc32(folder.state(step).read_bytes())})


def pickled_code(folder: RunFolder) -> None:
    folder.state(4).write_bytes(pickle.dumps({"step": Code(folder.path / "ran")}))
    resign(folder, 4)


def saved_code(folder: RunFolder) -> None:
    torch.save({"step": Code(folder.path / "ran")}, folder.state(4))
    resign(folder, 4)


def another_recipes(folder: RunFolder) -> None:
    """The same step, whole, but of a run with other parameters."""
    other = RunFolder(folder.path.parents[1] / "other" / "1")
    other.path.mkdir(parents=True)
    train(other, 4)
    for name in (STATE, SIDECAR):
        shutil.copy(other.path / name, folder.path / name)


def another_steps(folder: RunFolder) -> None:
    shutil.copy(folder.state(3), folder.state(4))
    shutil.copy(folder.commit(3), folder.commit(4))


def another_steps_state(folder: RunFolder) -> None:
    shutil.copy(folder.state(3), folder.state(4))


def a_folder(folder: RunFolder) -> None:
    folder.state(4).unlink()
    folder.state(4).mkdir()
    (folder.state(4) / "mine.txt").touch()


def a_folder_as_sidecar(folder: RunFolder) -> None:
    folder.commit(4).unlink()
    folder.commit(4).mkdir()


def unreadable(folder: RunFolder) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    folder.state(4).chmod(0)


def edited(**changes: Any) -> Callable[[RunFolder], None]:
    def edit(folder: RunFolder) -> None:
        folder.commit(4).write_text(json.dumps(read_json(folder.commit(4)) | changes))

    return edit


def with_bytes(name: str, change: Callable[[bytearray], object]) -> Callable[[RunFolder], None]:
    """The file `name`, of which `change` altered the bytes."""

    def damage(folder: RunFolder) -> None:
        data = bytearray((folder.path / name).read_bytes())
        change(data)
        (folder.path / name).write_bytes(data)

    return damage


def flip(place: float) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[int(place * (len(data) - 1))] ^= 4

    return change


STATE, SIDECAR = "state-00000004.pt", "state-00000004.json"
FAULTS: dict[str, Callable[[RunFolder], None]] = {
    "flipped at the start": with_bytes(STATE, flip(0.0)),
    "flipped inside": with_bytes(STATE, flip(0.5)),
    "flipped at the end": with_bytes(STATE, flip(1.0)),
    "cut": with_bytes(STATE, lambda data: data.__delitem__(slice(-20, None))),
    "longer": with_bytes(STATE, lambda data: data.append(0)),
    "empty": with_bytes(STATE, bytearray.clear),
    "gone": lambda folder: folder.state(4).unlink(),
    "sidecar torn": with_bytes(SIDECAR, lambda data: data.__delitem__(slice(30, None))),
    "sidecar empty": with_bytes(SIDECAR, bytearray.clear),
    "sidecar not UTF-8": with_bytes(SIDECAR, lambda data: data.__setitem__(slice(0, 2), b"\xff\xfe")),
    "sidecar a list": lambda folder: folder.commit(4).write_text("[1]") and None,
    "sidecar nested": lambda folder: folder.commit(4).write_text("[" * 10**5) and None,
    "step edited": edited(step=3),
    "step a text": edited(step="4"),
    "checksum edited": edited(crc32=1),
    "records cut by one line": edited(metrics_bytes=10),
    "records negative": edited(metrics_bytes=-1, metrics_crc32=0),
    "records too long": edited(samples_bytes=10**6),
    "records a text": edited(samples_bytes="all"),
    "recipe edited": edited(recipe="0123456789abcdef"),
    "metrics flipped": with_bytes("metrics.jsonl", lambda data: data.__setitem__(-6, ord("7"))),
    "metrics with NULs": with_bytes("metrics.jsonl", lambda data: data.__setitem__(slice(-9, None), bytes(9))),
    "samples short": with_bytes("samples.jsonl", lambda data: data.__delitem__(slice(-3, None))),
    "pickled code": pickled_code,
    "saved code": saved_code,
    "another recipe's": another_recipes,
    "another step's": another_steps,
    "another step's state": another_steps_state,
    "a folder": a_folder,
    "a folder as sidecar": a_folder_as_sidecar,
    "unreadable": unreadable,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_is_not_this_runs_own_is_skipped_with_one_line(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    FAULTS[fault](folder)
    assert resumed_step(folder) == 3 and read_save(folder, 3)["weights"].tolist() == [3.0] * 99
    said = capsys.readouterr().err
    assert said.startswith(f"{folder.state(4)}: skipped, ") and said.endswith("; going back to state-00000003.pt\n")
    assert said.count("\n") == 1
    assert not (folder.path / "ran").exists(), "code was unpickled"
    assert resumed_step(folder) == 3 and not capsys.readouterr().err  # said once
    train(folder, 5)  # and nothing lies in the way
    assert folder.commits() == [5, 4] and resumed_step(folder) == 5
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


def test_what_was_skipped_is_set_aside_not_removed(folder: RunFolder) -> None:
    """It may be a readable save of somebody else."""
    a_folder(folder)
    resumed_step(folder)
    assert (folder.path / f"{STATE}.damaged" / "mine.txt").exists() and (folder.path / f"{SIDECAR}.damaged").exists()


def test_damage_to_all_saves_is_a_fresh_start(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for step in folder.commits():
        folder.state(step).write_bytes(b"")
    assert newest_save(folder) is None
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 2 and lines[0].endswith("going back to state-00000003.pt") and lines[1].endswith("there is none before it")
    )
    train(folder, 2)
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]


def test_a_run_folder_can_be_moved(folder: RunFolder, tmp_path: Path) -> None:
    moved = RunFolder(tmp_path / "elsewhere" / folder.recipe / "1")
    shutil.copytree(folder.path, moved.path)
    assert resumed_step(moved) == 4 and read_save(moved, 4)["step"] == 4


# What is never written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_that_is_not_finite_leaves_the_saves_alone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], value: float, dtype: torch.dtype
) -> None:
    weights = torch.ones(4, 5, dtype=dtype)
    weights[2, 3] = value
    state = {"step": 5, "modules": {"policy": [torch.zeros(0), torch.tensor(3), weights]}}
    assert not write_save(folder, 5, state, {}, keep=1)
    said = capsys.readouterr().err
    assert said == f"{folder.state(5)}: not saved, state['modules']['policy'][2] is not finite; saves before it stay\n"
    assert folder.commits() == [4, 3] and not list(folder.path.glob("*5*"))


def test_the_extremes_of_a_type_are_finite(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        largest = torch.finfo(dtype).max
        assert saves._is_finite(torch.tensor([largest, -largest, 0.0], dtype=dtype))
    assert saves._is_finite(torch.tensor([True])) and saves._is_finite(torch.zeros(0))
