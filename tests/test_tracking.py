"""Run folders, records, saves, curves, and what MLflow receives of them."""

import csv
import errno
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.curves import write_curve, write_metrics
from pipeline.digests import digest
from pipeline.params import load_params
from pipeline.params.schema import Runtime
from pipeline.stage import StageRun, stage_run
from pipeline.supervise import hold
from pipeline.tracking import saves
from pipeline.tracking.console import ProgressBar
from pipeline.tracking.description import flatten, run_name, run_tags
from pipeline.tracking.recorder import JsonLines, Recorder
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.tables import as_text

ROOT = Path(__file__).parents[1]
PARAMS: dict[str, Any] = {
    "grpo": {"lr": 1e-4, "loss": "cispo", "seed": 42, "batch_size": 8},
    "rewards": {"length": {"weight": 0.5}},
}


def _runtime(**changes: Any) -> Runtime:
    quiet = {"device": "cpu", "threads": 1, "save_every_s": 1e9, "progress": "off", "mlflow": False}
    return load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet | changes)


def _open(root: Path, *, params: dict[str, Any] = PARAMS, **runtime: Any) -> Any:
    return stage_run("grpo", params=params, inputs=["parent.pth"], runtime=_runtime(**runtime), root=root)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "parent.pth").write_bytes(b"weights")
    return tmp_path


def _interrupt(run: StageRun) -> None:
    """Ends the block as a fault would."""
    raise RuntimeError(f"{run.stage} breaks")


def _folder(root: Path) -> RunFolder:
    (path,) = (root / ".runs" / "grpo").glob("*/1")
    return RunFolder(path)


def _strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


# Keys and folders


def _run_path(root: Path, **options: Any) -> Path:
    with _open(root, **options) as run:
        return run.folder.path


def test_the_key_follows_params_inputs_and_code_but_not_runtime(repository: Path) -> None:
    keys = [_run_path(repository).parent]
    keys.append(_run_path(repository, params={**PARAMS, "grpo": {**PARAMS["grpo"], "lr": 2e-4}}).parent)
    (repository / "parent.pth").write_bytes(b"Weights")
    keys.append(_run_path(repository).parent)
    (repository / "data" / "code").mkdir(parents=True)
    (repository / "data" / "code" / "grpo.json").write_text('{"pipeline.maths.policy": "1"}')
    keys.append(_run_path(repository).parent)
    (repository / "data" / "code" / "grpo.json").write_text('{"pipeline.maths.policy": "2"}')
    keys.append(_run_path(repository).parent)
    assert len(set(keys)) == 5
    again = _run_path(repository, threads=7, save_every_s=3.0, keep_saves=9, gradient_checkpointing=True)
    assert again.parent == keys[-1]


def test_a_finished_run_is_closed_and_an_unfinished_one_goes_on(repository: Path) -> None:
    with pytest.raises(SystemExit), _open(repository) as run:
        run.save(3, {"x": 1})
        _interrupt(run)
    first = run.folder
    assert first.path.name == "1" and read_json(first.exit)["code"] == 1
    assert read_json(first.exit)["reason"] == "RuntimeError: grpo breaks"
    for _ in range(2):  # the second time because DVC does not know the results yet: they can be made again from the last save
        with _open(repository) as run:
            assert run.folder == first and run.resumed_step == 3 and run.load() == {"x": 1}
            assert not first.exit.exists()
        assert read_json(first.exit)["code"] == 0
    _record_in_dvc(repository)
    with _open(repository) as run:
        assert run.folder.path.name == "2" and run.load() is None
    assert not first.commits() and not run.folder.commits()


def _record_in_dvc(root: Path, params: dict[str, Any] = PARAMS) -> None:
    """What DVC writes after a stage has ended well."""
    deps = [{"path": "parent.pth", "hash": "md5", "md5": digest(root / "parent.pth"), "size": 7}]
    leaves = {"grpo": params["grpo"], "rewards.length": params["rewards"]["length"]}
    entry = {"cmd": "exec python", "deps": deps, "params": {"params.yaml": leaves}, "outs": []}
    (root / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"grpo": entry}}))


def test_a_finished_run_is_gone_on_with_until_dvc_has_its_results(repository: Path) -> None:
    def finish(**options: Any) -> tuple[str, int]:
        with _open(repository, **options) as run:
            run.log(run.resumed_step + 1, {"x": 1.0})
            run.save(run.resumed_step + 1, {"x": 1})
        return run.folder.path.name, run.folder.commits()[0]

    assert finish() == ("1", 1) and finish() == ("1", 2)
    _record_in_dvc(repository, PARAMS | {"grpo": PARAMS["grpo"] | {"lr": 2e-4}})  # the results of another recipe
    assert finish() == ("1", 3)
    _record_in_dvc(repository)
    assert finish() == ("2", 1)
    assert not list(_folder(repository).path.glob("state-*"))  # one finished run of a stage at most has a save
    (repository / "parent.pth").write_bytes(b"Weights")
    assert finish()[0] == "1"  # of a recipe of its own


def test_a_second_process_is_refused_with_the_live_pid(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _open(repository):
        other_recipe = {"grpo": {"lr": 5.0}}  # the outputs are the same
        with pytest.raises(SystemExit) as ended, _open(repository, params=other_recipe):
            pass
    assert ended.value.code == 6
    assert f"held by the live process {os.getpid()};" in capsys.readouterr().err


def test_a_missing_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, _open(tmp_path):
        pass
    assert ended.value.code == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_running_out_of_memory_names_the_parameter(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, _open(repository) as run:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert ended.value.code == read_json(run.folder.exit)["code"] == 5
    assert "lower grpo.batch_size (now 8)" in capsys.readouterr().err


def test_digests_are_those_of_dvc(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b.txt").write_text("two\n")
    (tmp_path / "alone.txt").write_bytes(b"one\r\n")
    (folder / "sub.txt").write_bytes(b"one\r\n")  # sorts after "sub/b.txt" by parts, before it as text
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*dvc, "add", "-q", "set", "alone.txt"], cwd=tmp_path, check=True)
    assert f"md5: {digest(folder)}\n" in (tmp_path / "set.dvc").read_text()
    assert f"md5: {digest(tmp_path / 'alone.txt')}\n" in (tmp_path / "alone.txt.dvc").read_text()


# Records and saves


def test_records_are_strict_json(tmp_path: Path) -> None:
    recorder = Recorder(JsonLines(tmp_path / "m", 0), JsonLines(tmp_path / "s", 0))
    recorder.log(1, {"a": float("nan"), "b": float("-inf"), "c": torch.tensor(0.5), "d": 3})  # type: ignore[dict-item]
    recorder.log_samples(
        1, [{"prompt": "你好\n\u2028\ud800", "reward": float("inf"), "terms": [1.0, float("nan")]}, {"prompt": "b"}]
    )
    recorder.close()
    (metrics,) = _strict_lines(tmp_path / "m")
    assert metrics["step"] == 1 and metrics["metrics"] == {"a": None, "b": None, "c": 0.5, "d": 3.0}
    assert abs(metrics["time_s"] - time.time()) < 60
    first, second = _strict_lines(tmp_path / "s")
    assert first == {"step": 1, "prompt": "你好\n\u2028\ud800", "reward": None, "terms": [1.0, None]}
    assert second == {"step": 1, "prompt": "b"}


def _train(root: Path, total: int = 60) -> None:
    """A recursion whose value depends on every step; saves after each step that a clock decides."""
    with _open(root, save_every_s=0.004) as run:
        state = run.load() or {"step": 0, "x": torch.full((3,), 1.0)}
        while state["step"] < total:
            step, x = state["step"] + 1, torch.sin(state["x"] * 3 + state["step"])
            state.update(step=step, x=x)
            time.sleep(0.002)
            run.log(step, {"x": float(x[0])})
            if step % 7 == 0:
                run.log(step, {"val/x": float(x[1])})
                run.log_samples(step, [{"text": str(step)}, {"text": "二"}])
            run.checkpoint(step, lambda: state)


def _newest_step(root: Path) -> int:
    saves = (int(path.stem.removeprefix("state-")) for path in root.glob(".runs/*/*/*/state-*.json"))
    return max(saves, default=0)


def test_any_kill_leaves_the_same_records_and_result(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    twin = tmp_path_factory.mktemp("twin")
    (twin / "parent.pth").write_bytes(b"weights")
    _train(twin)
    fork = multiprocessing.get_context("fork")
    killed = 0
    for steps in (3, 5, 2, 9, 4, 6):  # saved since the kill before; where in the next one the kill falls, the scheduler decides
        aim = _newest_step(repository) + steps
        process = fork.Process(target=_train, args=(repository,))
        process.start()
        while _newest_step(repository) < aim and process.is_alive():
            time.sleep(0.001)
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 3
    if read_json(_folder(repository).exit).get("code") != 0:
        _train(repository)
    for name in ("metrics", "samples"):
        lines, expected = (_strict_lines(getattr(_folder(root), name)) for root in (repository, twin))
        assert [{**line, "time_s": 0} for line in lines] == [{**line, "time_s": 0} for line in expected]
    assert [line["step"] for line in lines] == [step for step in range(7, 61, 7) for _ in range(2)]
    assert read_json(_folder(repository).about)["attempt"] >= 2


def _saved_twice(root: Path) -> RunFolder:
    with pytest.raises(SystemExit), _open(root) as run:
        for step in range(1, 6):
            run.log(step, {"x": step})
            if step in (1, 2, 4):
                run.save(step, {"step": step, "w": torch.arange(1000)})
        _interrupt(run)
    folder: RunFolder = run.folder
    assert folder.commits() == [4, 2]  # keep_saves
    return folder


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "no commit"])
def test_a_damaged_save_is_skipped(repository: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    folder = _saved_twice(repository)
    newest = folder.state(4)
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
    elif damage == "cut":
        newest.write_bytes(data[:-20])
    elif damage == "gone":
        newest.unlink()
    else:
        folder.commit(4).unlink()  # killed between the state and its sidecar
    capsys.readouterr()
    with pytest.raises(SystemExit), _open(repository) as run:
        state = run.load()
        assert state is not None and state["step"] == 2 and torch.equal(state["w"], torch.arange(1000))
        assert [line["step"] for line in _strict_lines(folder.metrics)] == [1, 2]
        _interrupt(run)
    said = capsys.readouterr().err
    assert said.count("state-00000004.pt: skipped, ") == (damage != "no commit")
    assert said.count("; going back to state-00000002.pt\n") == (damage != "no commit")


@pytest.mark.parametrize("name", ["metrics", "samples"])
@pytest.mark.parametrize(
    ("damage", "step"),
    [("short", 2), ("no last line end", 2), ("gone", 0), ("garbled", 0), ("NULs for the rest", 0), ("a folder", None)],
)
def test_a_save_whose_records_are_damaged_is_skipped_before_training(
    repository: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str, step: int | None
) -> None:
    """Else the run trains to its end and fails at writing the curve, at every try again."""
    with pytest.raises(SystemExit), _open(repository) as run:
        for number in range(1, 6):
            run.log(number, {"x": number})
            run.log_samples(number, [{"text": str(number)}])
            if number in (2, 4):
                run.save(number, {"step": number})
        _interrupt(run)
    folder = run.folder
    path: Path = getattr(folder, name)
    data = path.read_bytes()
    end = read_json(folder.commit(4))[f"{name}_bytes"]
    if damage in ("gone", "a folder"):
        path.unlink()
    match damage:
        case "short":
            path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
        case "no last line end":
            path.write_bytes(data[: end - 1] + b"}" + data[end:])
        case "garbled":
            path.write_bytes(b"x" + data[1:])
        case "NULs for the rest":
            path.write_bytes(data[:10] + bytes(len(data) - 10))
        case "a folder":
            path.mkdir()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, _open(repository) as run:
        assert run.resumed_step == step and run.load() == ({"step": step} if step else None)
        assert [line["step"] for line in _strict_lines(path)] == [1, 2][:step]
        for number in range(run.resumed_step + 1, 6):
            run.log(number, {"x": number})
        write_curve(repository / "x.csv", folder.metrics, every=1)
        raise SystemExit(0)
    lines = capsys.readouterr().err.splitlines()
    if step is None:
        assert ended.value.code == 1 and len(lines) == 1 and f"{path}: is a folder" in lines[0]
    else:
        assert ended.value.code == 0 and "state-00000004.pt: skipped, " in lines[0] and path.name in lines[0]
        assert (repository / "x.csv").read_text() == "step,x\n" + "".join(f"{n},{n}\n" for n in range(1, 6))


@pytest.mark.parametrize("torn", [b"", b'{"code": 1, "rea', b"[1]", b"\xff", bytes(20), b"[" * 10**5])
@pytest.mark.parametrize("name", ["exit", "about", "feeder_note"])
def test_a_torn_description_counts_as_absent(
    repository: Path, capsys: pytest.CaptureFixture[str], name: str, torn: bytes
) -> None:
    folder = _saved_twice(repository)
    path: Path = getattr(folder, name)
    path.write_bytes(torn)
    capsys.readouterr()
    assert read_json(path) == {}
    warning = capsys.readouterr().err
    assert warning.startswith(f"{path}: unreadable, counts as absent (") and warning.count("\n") == 1
    with _open(repository) as run:
        assert run.folder == folder and run.resumed_step == 4
    assert read_json(folder.exit)["code"] == 0 and read_json(folder.about)["stage"] == "grpo"
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "run .runs" not in line] == ([warning[:-1]] if name != "feeder_note" else [])


def test_stray_files_beside_the_runs_are_passed_over(repository: Path) -> None:
    first = _saved_twice(repository)
    recipe = first.path.parent
    for stray in ("7", "0", "³", "007", "x"):
        (recipe / stray).touch()
    with _open(repository) as run:
        assert run.folder == first and run.resumed_step == 4
    _record_in_dvc(repository)
    assert _run_path(repository).name == "8"
    assert _run_path(repository).name == "9"


def test_a_file_in_place_of_a_runs_folder_is_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = _run_path(repository).parent
    for path in recipe.rglob("*"):
        path.unlink() if path.is_file() else None
    (recipe / "1").rmdir()
    recipe.rmdir()
    recipe.touch()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, _open(repository):
        pass
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1 and f"{recipe}: File exists" in said


@pytest.mark.parametrize("place", [".runs", ".runs/grpo", ".runs/grpo/lock"])
def test_what_lies_in_place_of_the_stages_lock_is_one_line(
    repository: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    path = repository / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if path.name == "lock" else path.touch()
    with pytest.raises(SystemExit) as ended, _open(repository):
        pass
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1 and f"grpo: {repository / '.runs'}" in said


def test_the_newest_intact_save_cuts_the_records(repository: Path) -> None:
    folder = _saved_twice(repository)
    with _open(repository) as run:
        assert run.resumed_step == 4
        assert [line["step"] for line in _strict_lines(folder.metrics)] == [1, 2, 3, 4]


def test_a_save_that_vanishes_while_it_is_looked_for_counts_as_none(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer removes old saves while the feeder reads: here between the listing and the reading."""
    folder = _saved_twice(repository)
    older = read_json(folder.commit(2))
    listing = RunFolder.commits

    def listed_then_gone(self: RunFolder, gone: int) -> list[int]:
        steps = listing(self)
        self.commit(gone).unlink()
        return steps

    monkeypatch.setattr(RunFolder, "commits", lambda self: listed_then_gone(self, 4))
    assert saves.committed_sizes(folder) == {name: older[name] for name in ("metrics_bytes", "samples_bytes")}
    monkeypatch.setattr(RunFolder, "commits", lambda self: listed_then_gone(self, 2))
    assert saves.committed_sizes(folder) == {"metrics_bytes": 0, "samples_bytes": 0}


def test_a_start_leaves_the_temporary_files_of_the_feeder_alone(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _saved_twice(repository)
    feeders, torn = folder.path / "feeder.json.tmp", folder.path / "state-00000006.pt.tmp"
    feeders.touch()
    torn.touch()
    newest = saves.newest_save(folder)
    assert newest is not None and newest["step"] == 4
    assert feeders.exists() and not torn.exists()
    listing = Path.glob

    def listed_then_gone(self: Path, pattern: str) -> Iterator[Path]:
        for path in list(listing(self, pattern)):
            path.unlink()
            yield path

    torn.touch()
    monkeypatch.setattr(Path, "glob", listed_then_gone)
    assert saves.newest_save(folder) == newest


def test_a_full_disk_keeps_the_save_before(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as ended, _open(repository) as run:
        run.save(1, {"step": 1})
        monkeypatch.setattr(torch, "save", full)
        run.save(2, {"step": 2})
    assert ended.value.code == read_json(run.folder.exit)["code"] == 8 and "no space left" in capsys.readouterr().err
    assert not list(run.folder.path.glob("*.tmp"))
    with _open(repository) as run:
        assert run.load() == {"step": 1}


def test_a_description_that_cannot_be_written_leaves_the_old_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "a.json", {"a": 2})
    assert read_json(tmp_path / "a.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_state_comes_back_or_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    state = {"a": [1, (2.0, "x", None)], "t": OrderedDict(w=torch.ones(2, dtype=torch.bfloat16)), "b": True}
    saves.write_save(folder, 1, state, {}, keep=1)
    loaded = saves.read_save(folder, 1)
    assert loaded["a"] == state["a"] and loaded["t"]["w"].dtype == torch.bfloat16 and loaded["b"] is True
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is a numpy.float64"):
        saves.write_save(folder, 2, {"a": [np.float64(1)]}, {}, keep=1)
    assert folder.commits() == [1]


def test_a_stop_request_saves_the_finished_step(repository: Path) -> None:
    with pytest.raises(SystemExit) as ended, _open(repository) as run:
        run.checkpoint(1, dict)
        assert not run.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_requested
        run.log(2, {"x": 1.0})
        run.checkpoint(2, lambda: {"step": 2})
    assert ended.value.code == 143 and read_json(run.folder.exit)["code"] == 143
    with _open(repository) as run:
        assert run.load() == {"step": 2}


# Files that DVC hashes


def test_a_curve_is_the_mean_since_the_point_before(tmp_path: Path) -> None:
    lines: list[tuple[int, dict[str, Any]]] = [
        (0, {"val/loss": 9.0}),
        *((s, {"train/loss": float(s), "time/step_s": 1.0, "tokens_per_s": 2.0}) for s in range(1, 8)),
    ]
    lines += [(7, {"val/loss": 1 / 3, "bad": None})]
    text = "".join(json.dumps({"step": step, "time_s": 1.5, "metrics": metrics}) + "\n" for step, metrics in lines)
    (tmp_path / "m.jsonl").write_text(text)
    write_curve(tmp_path / "plots" / "a.csv", tmp_path / "m.jsonl", every=3)
    # (1+2+3)/3, (4+5+6)/3, and the rest up to the last step.
    expected = "step,bad,train/loss,val/loss\n0,,,9\n3,,2,\n6,,5,\n7,,7,0.333333\n"
    assert (tmp_path / "plots" / "a.csv").read_text() == expected
    write_curve(tmp_path / "b.csv", tmp_path / "m.jsonl", every=3, keys=["val/loss", "absent"])
    assert (tmp_path / "b.csv").read_text() == "step,val/loss,absent\n0,9,\n3,,\n6,,\n7,0.333333,\n"


@pytest.mark.parametrize("steps", [499, 500, 501, 12345])
def test_a_curve_has_at_most_500_points(tmp_path: Path, steps: int) -> None:
    lines = (json.dumps({"step": s, "time_s": 0, "metrics": {"x": 1.0}}) for s in range(1, steps + 1))
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    write_curve(tmp_path / "a.csv", tmp_path / "m.jsonl", every=1)
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert 250 <= len(rows) <= 500
    assert int(rows[-1]["step"]) == steps


def test_final_metrics_are_sorted_finite_and_without_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics" / "a.json"
    write_metrics(path, {"z": 2, "b": 1 / 3, "time/a_s": 1.0, "memory/peak_bytes": 5, "c": float("nan"), "tokens_per_s": 1.0})
    assert path.read_text() == '{\n  "b": 0.333333,\n  "z": 2\n}\n'
    assert "c is nan" in capsys.readouterr().err


# Names, tags, console, imports


def test_names_and_params() -> None:
    assert run_name("grpo", PARAMS) == "grpo · cispo lr 1e-4 · s42"
    assert run_name("pretrain", {"pretrain": {"lr": 0.0025, "seed": 1}}) == "pretrain · lr 2.5e-3 · s1"
    assert run_name("tokenizer", {}) == "tokenizer"
    assert flatten(PARAMS)["rewards.length.weight"] == "0.5"


def test_tags_tell_the_commit_and_whether_code_was_edited(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        result = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    assert "git.commit" not in run_tags(tmp_path, "grpo", "k", {})
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "dvc.lock").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "dvc.lock").write_text("2")  # `dvc repro` itself rewrites it
    tags = run_tags(tmp_path, "grpo", "k", {"data/x": "abc"})
    assert tags["git.commit"] == git("rev-parse", "HEAD") and tags["git.dirty"] == "false"
    assert tags["dvc.data/x"] == "abc" and tags["version.torch"] == torch.__version__
    (tmp_path / "code.py").write_text("2")
    assert run_tags(tmp_path, "grpo", "k", {})["git.dirty"] == "true"


def test_the_bar_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("grpo", 10) as bar:
        bar.update(5, loss=0.5)
        bar.note(5, val_loss=0.25, tokens_per_s=12345.6)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "grpo: step 5 val_loss 0.25 tokens/s 12,346\n")


def test_the_trainer_imports_no_tracking_library() -> None:
    code = "import sys, pipeline.stage; print({'mlflow', 'dvc', 'pandas', 'prefect', 'torch'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


# The feeder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One SQLite store for all tests, as creating one takes seconds."""
    root = tmp_path_factory.mktemp("store")
    yield f"sqlite:///{root / 'mlflow.db'}"


@pytest.fixture
def tracked(repository: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setattr("pipeline.tracking.feeder.POLL_S", 0.05)
    return repository


def _feed(root: Path) -> int:
    from pipeline.tracking.feeder import feed

    return feed(_folder(root))


def _mlflow_run(root: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(read_json(_folder(root).feeder_note)["run_id"])


def _history(root: Path, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    history = MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_metric_history(_mlflow_run(root).info.run_id, key)
    return [(metric.step, metric.value) for metric in history]


def _tables(root: Path) -> list[str]:
    return [entry["path"] for entry in json.loads(_mlflow_run(root).data.tags["mlflow.loggedArtifacts"])]


def _record(root: Path, steps: range, *, save: int | None = None, end: Callable[[StageRun], None] | None = None) -> RunFolder:
    """Logs `steps`, saves after step `save`, and ends as `end` says."""
    try:
        with _open(root) as run:
            for step in steps:
                run.log(step, {"loss": 10.0 + step, "nan": float("nan")})
                run.log_samples(step, [{"prompt": "你好", "completion": f"c{step}", "reward": 0.5}])
                if step == save:
                    run.save(step, {"step": step})
            if end is not None:
                end(run)
    except SystemExit:
        pass
    folder: RunFolder = run.folder
    return folder


def test_a_finished_run_arrives_whole(tracked: Path) -> None:
    folder = _record(tracked, range(1, 6))
    assert _feed(tracked) == 0
    run = _mlflow_run(tracked)
    assert run.info.status == "FINISHED" and run.info.run_name == "grpo · cispo lr 1e-4 · s42"
    assert _history(tracked, "loss") == [(step, 10.0 + step) for step in range(1, 6)]
    assert math.isnan(run.data.metrics["nan"])
    assert run.data.params["grpo.lr"] == "0.0001" and run.data.params["rewards.length.weight"] == "0.5"
    tags = run.data.tags
    assert tags["dvc.stage"] == "grpo" and tags["run.resumed"] == "0" and tags["run.key"] == folder.path.parent.name
    assert tags["dvc.parent.pth"] == digest(tracked / "parent.pth")
    assert run.info.end_time == round(read_json(folder.exit)["time_s"] * 1000)
    assert _feed(tracked) == 0  # feeding again changes nothing
    assert len(_history(tracked, "loss")) == 5 and _mlflow_run(tracked).info.run_id == run.info.run_id


def test_a_last_value_that_is_not_finite_hides_no_older_one(tracked: Path) -> None:
    with _open(tracked) as run:
        run.log(0, {"val/loss": 2.5})
        run.log(6, {"val/loss": float("inf")})
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "val/loss")] == [0, 6]
    assert math.isnan(_mlflow_run(tracked).data.metrics["val/loss"])
    assert _feed(tracked) == 0 and len(_history(tracked, "val/loss")) == 2  # feeding again adds nothing


def test_samples_are_a_table_that_mlflow_reads(tracked: Path) -> None:
    from mlflow import MlflowClient

    _record(tracked, range(1, 4))
    _feed(tracked)
    info = _mlflow_run(tracked).info
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    tables = [client.load_table(info.experiment_id, name, run_ids=[info.run_id]) for name in _tables(tracked)]
    assert list(tables[0].columns) == ["prompt", "completion", "step", "reward"]
    assert [text for table in tables for text in table["completion"]] == ["c1", "c2", "c3"]
    assert {text for table in tables for text in table["prompt"]} == {"你好"}


def test_the_last_samples_are_a_text_at_the_top(tracked: Path) -> None:
    """Which is all that MLflow's page that compares runs shows of them."""
    from mlflow import MlflowClient
    from mlflow.artifacts import load_text

    def said() -> str:
        assert _feed(tracked) == 0
        info = _mlflow_run(tracked).info
        files = [file.path for file in MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).list_artifacts(info.run_id)]
        assert "samples.txt" in files
        return str(load_text(f"{info.artifact_uri}/samples.txt"))

    _record(tracked, range(1, 4), save=2, end=_interrupt)
    assert said() == "samples of step 3\n\n--- 1 of 1\nprompt: 你好\ncompletion: c3\nreward 0.5\n"
    _record(tracked, range(3, 6))
    assert "completion: c5\n" in said() and "c3" not in said()


def test_a_text_of_samples_names_a_prompt_where_it_changes() -> None:
    rows = [{"step": 7, "prompt": text, "completion": "c\nd", "reward": -0.0, "stop": "eos"} for text in ("p", "p", "q")]
    answer = "completion: c\nd\nstop: eos\nreward 0"
    said = [f"--- 1 of 3\nprompt: p\n{answer}", f"--- 2 of 3\n{answer}", f"--- 3 of 3\nprompt: q\n{answer}"]
    assert as_text(rows) == "\n\n".join(["samples of step 7", *said]) + "\n"
    pair = {"step": 1, "chosen": "a", "rejected": "b", "margin": 1234567.0}
    assert as_text([pair]).splitlines()[3:] == ["chosen: a", "rejected: b", "margin 1.235e+06"]


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (1, "FAILED"), (4, "FAILED"), (143, "KILLED"), (None, "KILLED")])
def test_the_status_is_the_truth(tracked: Path, code: int | None, status: str) -> None:
    folder = _record(tracked, range(1, 3))
    if code is None:
        folder.exit.unlink()  # SIGKILL
    else:
        write_json(folder.exit, {"code": code, "reason": "r", "time_s": 5.0})
    _feed(tracked)
    assert _mlflow_run(tracked).info.status == status
    # Without an orderly end nothing but saved steps is final.
    assert len(_history(tracked, "loss")) == (0 if code is None else 2)


def test_a_killed_run_goes_on_as_the_same_mlflow_run(tracked: Path) -> None:
    folder = _record(tracked, range(1, 7), save=4, end=_interrupt)
    folder.exit.unlink()
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "loss")] == [1, 2, 3, 4]
    killed = _mlflow_run(tracked)
    assert killed.info.status == "KILLED"
    _record(tracked, range(5, 9))
    assert _feed(tracked) == 0
    resumed = _mlflow_run(tracked)
    assert resumed.info.run_id == killed.info.run_id and resumed.info.status == "FINISHED"
    assert [step for step, _ in _history(tracked, "loss")] == list(range(1, 9))
    assert resumed.data.tags["run.resumed"] == "1"


def test_steps_that_failed_after_the_last_save_are_not_doubled_by_the_resume(tracked: Path) -> None:
    _record(tracked, range(1, 7), save=4, end=_interrupt)
    _feed(tracked)
    assert _mlflow_run(tracked).info.status == "FAILED"
    assert [step for step, _ in _history(tracked, "loss")] == list(range(1, 7))  # the failure is visible
    time.sleep(0.01)  # other timestamps: MLflow itself would keep both
    _record(tracked, range(5, 9))
    _feed(tracked)
    assert [step for step, _ in _history(tracked, "loss")] == list(range(1, 9))


def test_a_living_trainer_is_followed_up_to_its_saves(tracked: Path) -> None:
    from pipeline.tracking.feeder import feed

    with _open(tracked) as run:
        feeder = threading.Thread(target=feed, args=(run.folder,))
        feeder.start()
        for step in range(1, 7):
            run.log(step, {"loss": float(step)})
            if step == 4:
                run.save(step, {"step": step})
        end = time.monotonic() + 30
        while not (read_json(run.folder.feeder_note) and len(_history(tracked, "loss")) == 4) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        assert [step for step, _ in _history(tracked, "loss")] == [1, 2, 3, 4]
        assert _mlflow_run(tracked).info.status == "RUNNING"
    feeder.join(30)
    assert [step for step, _ in _history(tracked, "loss")] == list(range(1, 7))
    assert _mlflow_run(tracked).info.status == "FINISHED"


def test_a_torn_last_line_does_not_stop_the_feeder(tracked: Path) -> None:
    """The disk was full in the middle of a line."""
    folder = _record(tracked, range(1, 4), end=_interrupt)
    for path, torn in ((folder.metrics, '{"step": 4, "time_s": 1.0, "metr'), (folder.samples, '{"step": 4, "promp')):
        with path.open("a") as file:
            file.write(torn)
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "loss")] == [1, 2, 3]
    assert _mlflow_run(tracked).info.status == "FAILED"


def test_damaged_lines_do_not_stop_the_feeder(tracked: Path) -> None:
    folder = _record(tracked, range(1, 5), end=_interrupt)
    for path in (folder.metrics, folder.samples):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], bytes(len(lines[1]) - 1), b"\n", *lines[2:]]))
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "loss")] == [1, 3, 4]
    assert _mlflow_run(tracked).info.status == "FAILED"


def test_a_full_disk_keeps_nothing_from_mlflow(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = _record(tracked, range(1, 4), end=_interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert _feed(tracked) == 0
    assert not list(folder.path.glob("*.tmp")) and not folder.feeder_note.exists()
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "loss")] == [1, 2, 3] and _mlflow_run(tracked).info.status == "FAILED"


def test_a_store_without_room_for_artifacts_gets_metrics_and_the_truth(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    def full(self: MlflowClient, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.tracking.feeder.GIVE_UP_S", 0.2)
    folder = _record(tracked, range(1, 4), end=_interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_dict", full)
        assert _feed(tracked) == 1
    run = _mlflow_run(tracked)
    assert run.info.status == "FAILED" and run.data.tags["exit.reason"] == "RuntimeError: grpo breaks"
    assert run.info.end_time == round(read_json(folder.exit)["time_s"] * 1000)
    assert len(_history(tracked, "loss")) == 3
    assert _feed(tracked) == 0
    assert len(_history(tracked, "loss")) == 3 and _tables(tracked) == [f"samples/0000000{step}.json" for step in (1, 2, 3)]


def test_what_the_guard_found_is_a_tag(tracked: Path) -> None:
    folder = _record(tracked, range(1, 3))
    assert _feed(tracked) == 0 and "guard.found" not in _mlflow_run(tracked).data.tags
    write_json(folder.guard, {"no_signal": "problem: no_signal: none", "clip_frac": "warn: clip_frac: much"})
    assert _feed(tracked) == 0
    assert _mlflow_run(tracked).data.tags["guard.found"] == "problem: no_signal: none\nwarn: clip_frac: much"


def test_a_lost_note_doubles_nothing(tracked: Path) -> None:
    folder = _record(tracked, range(1, 4))
    assert _feed(tracked) == 0
    sent = _mlflow_run(tracked).info.run_id
    folder.feeder_note.write_text('{"run_id": "')
    assert _feed(tracked) == 0
    assert _mlflow_run(tracked).info.run_id == sent and [step for step, _ in _history(tracked, "loss")] == [1, 2, 3]


def test_a_folder_without_a_description_cannot_be_fed(tracked: Path) -> None:
    folder = _record(tracked, range(1, 4))
    folder.about.write_text("{")
    command = [sys.executable, "-m", "pipeline.tracking.feeder", str(folder.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"feeder: {folder.about}: missing or unreadable;")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arrives", [True, False])
def test_a_batch_without_confirmation_arrives_once(tracked: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool) -> None:
    """The feeder dies while it sends; then the steps are trained again, with other timestamps."""
    from mlflow import MlflowClient

    class Death(BaseException):
        pass

    send = MlflowClient.log_batch

    def die(self: MlflowClient, run_id: str, metrics: Any = (), **others: Any) -> None:
        if arrives or not metrics:
            send(self, run_id, metrics=metrics, **others)
        if metrics:
            raise Death

    _record(tracked, range(1, 4), end=_interrupt)
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(MlflowClient, "log_batch", die)
        _feed(tracked)
    time.sleep(0.01)
    _record(tracked, range(1, 6))
    _feed(tracked)
    assert _history(tracked, "loss") == [(step, 10.0 + step) for step in range(1, 6)]


def test_without_a_server_the_feeder_gives_up_and_can_be_run_later(
    tracked: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pipeline.tracking.feeder.GIVE_UP_S", 0.2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    folder = _record(tracked, range(1, 4), save=2, end=_interrupt)
    assert _feed(tracked) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    _record(tracked, range(3, 6))  # another server: it receives the whole history
    assert read_json(folder.about)["tracking_uri"] == store
    assert _feed(tracked) == 0
    assert [step for step, _ in _history(tracked, "loss")] == list(range(1, 6))


def test_tables_stay_few_and_complete(repository: Path) -> None:
    """2000 sample steps, each seen by itself: the tag that lists the tables must stay below 8000 characters."""
    from pipeline.tracking.sender import Arrived, Sender

    class Store:
        def __init__(self) -> None:
            self.tables: dict[str, list[list[Any]]] = {}
            self.tag = ""

        def log_dict(self, run_id: str, table: dict[str, Any], name: str) -> None:
            assert name not in self.tables, "rewritten"
            self.tables[name] = table["data"]

        def set_tag(self, run_id: str, name: str, value: str) -> None:
            self.tag = value

        def log_text(self, run_id: str, text: str, name: str) -> None:
            pass

    recorder = _record(repository, range(0))
    sender, server = Sender(recorder), Store()
    arrived = Arrived(server, "run", {}, [], [])  # type: ignore[arg-type]
    with recorder.samples.open("a") as file:
        for step in range(1, 2001):
            file.write(json.dumps({"prompt": "p", "completion": "c", "step": step}) + "\n")
            file.flush()
            sender._send_samples(arrived, file.tell(), step == 2000)
            newest = int(sorted(server.tables)[-1][8:16])
            assert newest >= step / 1.25 - 1  # never far behind
    assert [row[2] for name in sorted(server.tables) for row in server.tables[name]] == list(range(1, 2001))
    assert len(server.tables) < 60 and len(server.tag) < 5000
    again, whole = Store(), Sender(recorder)
    whole._send_samples(Arrived(again, "run", {}, [], []), recorder.samples.stat().st_size, True)  # type: ignore[arg-type]
    assert again.tables == server.tables  # when rows arrive decides nothing


@pytest.mark.slow
def test_four_runs_open_a_fresh_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stages = ["ppo", "grpo", "dpo", "agent"]
    for stage in stages:
        with stage_run(stage, params={}, inputs=[], runtime=_runtime(mlflow=True), root=tmp_path) as run:
            run.log(1, {"loss": 1.0})
    folders = [path.parent for path in tmp_path.glob(".runs/*/*/1/run.json")]
    assert len(folders) == 4
    for folder in folders:
        end = time.monotonic() + 120
        while not (folder / "feeder.json").exists():
            assert time.monotonic() < end, (folder / "feeder.log").read_text()
            time.sleep(0.1)
        with hold(folder / "feeder.lock", wait=True):  # free once its feeder has ended
            pass
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("minimind")
    assert experiment is not None and experiment.artifact_location == (tmp_path / "mlartifacts").as_uri()
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name or "" for run in runs) == sorted(stages)
    assert all(run.info.status == "FINISHED" and run.data.metrics == {"loss": 1.0} for run in runs)
    assert not (tmp_path / "mlruns").exists()
