"""Files of the record that somebody has edited, cut or mixed up: readers leave out what is damaged, or say it in one line."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import write_run

from pipeline.diagnosis.findings import Severity
from pipeline.errors import DataError, ParamsError, PipelineError
from pipeline.lineage.history import lock_at, locks_with
from pipeline.lineage.plan import read_plan
from pipeline.lineage.records import final_metrics
from pipeline.lineage.whence import trace
from pipeline.pages.compare_page import compare_page
from pipeline.reading import compare as comparing
from pipeline.reading import doctor
from pipeline.reading.attempts import last_attempt
from pipeline.reading.cost import bill
from pipeline.tracking.records import Record, all_runs, find_runs
from pipeline.tracking.rollouts import read_ids
from pipeline.tracking.run_folder import RunFolder, read_json

ROOT = Path(__file__).parents[1]
POINT = {"step": 2, "time_s": 1.0, "metrics": {"reward/mean": 0.5}}
MADE = {
    "stages": {
        "grpo": {
            "cmd": "x",
            "deps": [{"path": "data/in", "md5": "a" * 32}],
            "params": {"params.yaml": {"grpo": {"lr": 1e-4, "seed": 42}}},
            "outs": [{"path": "checkpoints/grpo.pth", "md5": "b" * 32}],
        }
    }
}
DAMAGES: list[tuple[str, Any]] = [
    ("run.json", {"tags": "x"}),
    ("run.json", {"tags": {"dvc.data/in": {"a": 1}}}),
    ("run.json", {"params": {"grpo": []}}),
    ("run.json", {"tracking_uri": {"a": 1}}),
    ("run.json", {"started_s": None}),
    ("run.json", {"params": {"grpo": {"lr": float("nan")}}}),
    ("exit.json", {"time_s": []}),
    ("exit.json", {"used": None}),
    ("exit.json", {"outputs": ["checkpoints/grpo.pth"]}),
    ("exit.json", {"used": {"seconds": {}}}),
    ("exit.json", {"code": "0"}),
    ("feeder.json", {"run_id": ["x"]}),
    ("metrics.jsonl", "text"),
    ("metrics.jsonl", POINT | {"step": "2"}),
    ("metrics.jsonl", POINT | {"step": 10**400}),
    ("metrics.jsonl", POINT | {"metrics": 5}),
    ("metrics.jsonl", POINT | {"metrics": {"reward/mean": "high"}}),
    ("metrics.jsonl", POINT | {"metrics": {"reward/mean": float("nan")}}),
    ("metrics.jsonl", {"step": 2}),
    ("samples.jsonl", 5),
    ("samples.jsonl", {"prompt": "p", "completion": "c"}),
    ("samples.jsonl", {"step": 1, "prompt": [], "completion": "c"}),
    ("samples.jsonl", {"step": 1, "prompt": "p", "completion": "c", "reward": float("inf")}),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one recipe, the first of which dvc.lock has."""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "dvc.lock").write_text(json.dumps(MADE))
    for number in (1, 2):
        known = {"params": {"seed": 41 + number}, "outputs": {"checkpoints/grpo.pth": "ab"[number % 2] * 32}}
        write_run(tmp_path, number, samples=[{"step": 1, "prompt": "p", "completion": "c"}], **known)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_every_reader_goes_on(home: Path, name: str, damage: Any) -> None:
    path = home / ".runs/grpo/key1/1" / name
    if name.endswith(".jsonl"):
        with path.open("a") as file:
            file.write(json.dumps(damage) + "\n" + "[" * 100_000 + "\n")
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))

    record = Record(RunFolder(path.parent))
    if name.endswith(".jsonl"):
        assert record.metrics["reward/mean"].values == [0.5]
        assert [row["completion"] for row in record.samples()] == ["c"]
    else:
        assert read_json(path) == {}
    json.loads(doctor.as_json([], doctor.diagnose(home, home)), parse_constant=pytest.fail)
    assert bill(home, home).stages[0].stage == "grpo"
    comparison = comparing.compare(home, home, [str(path.parent), ".runs/grpo/key2/1"])
    json.loads(comparing.as_json(comparison), parse_constant=pytest.fail)
    assert "</html>" in compare_page(comparison)


@pytest.mark.parametrize("name", ["run.json", "exit.json", "metrics.jsonl", "samples.jsonl"])
def test_a_folder_or_a_loop_of_links_in_place_of_a_file_counts_as_absent(home: Path, name: str) -> None:
    for number, make in enumerate((Path.mkdir, lambda path: path.symlink_to(path.name)), start=1):
        path = home / f".runs/grpo/key{number}/1" / name
        path.unlink()
        make(path)
        record = Record(RunFolder(path.parent))
        assert not {"run.json": record.about, "exit.json": record.end, "metrics.jsonl": record.metrics}.get(name)
        assert name != "samples.jsonl" or not list(record.samples())
    assert doctor.diagnose(home, home)


def test_missing_keys_are_no_fault(home: Path) -> None:
    for name in ("run.json", "exit.json"):
        path = home / ".runs/grpo/key1/1" / name
        kept = {"code", "params", "tags", "outputs"}
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in kept}))
    cost = bill(home, home).stages[0]
    assert (cost.run, cost.ended_s, cost.skipped) == (".runs/grpo/key1/1", None, False)


def test_a_stage_whose_last_end_is_damaged_has_no_last_attempt(home: Path) -> None:
    end = home / ".runs/data@agent/exit.json"
    end.parent.mkdir()
    end.write_text('{"code": 3, "reason": "r", "time_s": 5.0, "used": {"seconds": null}}')
    assert last_attempt(home, "data@agent") is None
    end.write_text('{"code": 3, "time_s": 5.0}')
    attempt = last_attempt(home, "data@agent")
    assert attempt is not None and (attempt.code, attempt.reason) == (3, "")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "loop"])
def test_a_name_that_no_file_system_takes_is_an_unknown_run(home: Path, name: str) -> None:
    (home / "loop").symlink_to("loop")
    with pytest.raises(ParamsError, match="no run folder"):
        find_runs(home, [name])
    with pytest.raises(ParamsError, match="no run folder"):
        comparing.compare(home, home, [name, ".runs/grpo/key1/1"])


def test_a_run_that_goes_while_runs_are_listed_does_not_matter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [home / ".runs/grpo/gone/1/run.json", *kept(self, pattern)])
    assert sorted(folder.recipe for folder in all_runs(home)) == ["gone", "key1", "key2"]
    assert doctor.diagnose(home, home)


@pytest.mark.parametrize("text", ["5", "[1]", "stages: [1]", "stages: {grpo: 5}", "stages:"])
def test_a_damaged_dvc_yaml_is_one_line(home: Path, text: str) -> None:
    (home / "dvc.yaml").write_text(text)
    with pytest.raises(ParamsError, match=r"dvc\.yaml: is no list of stages"):
        doctor.diagnose(home, home)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/dev/null", "/dev/zero", "/proc/self/mem", "nothing", "loop"])
def test_whence_says_in_a_line_what_it_cannot_read(home: Path, name: str) -> None:
    (home / "loop").symlink_to("loop")
    with pytest.raises(DataError) as failed:
        trace(Path(name), home, home / ".runs")
    assert len(failed.value.lines) == 1 and len(str(failed.value)) < 300


@pytest.mark.parametrize("text", ["", "NaN", "5", "[1]", '{"a": "x"}', '{"a": {"b": null}}', '{"a": 1e999}', "[" * 100_000, "\0"])
def test_damaged_final_metrics_are_one_line(home: Path, text: str) -> None:
    (home / "metrics").mkdir()
    (home / "metrics/eval.json").write_text(text)
    with pytest.raises(DataError, match=r"metrics/eval\.json: no(t JSON| metrics)"):
        final_metrics(home, "eval")
    assert doctor.diagnose(home, home)


@pytest.mark.parametrize(
    "text", ["text", "5", "[1]", "stages: [1]", "stages: {grpo: 5}", "stages: {grpo: {deps: [1]}}", "<<<<<<< HEAD"]
)
def test_a_damaged_dvc_lock_is_one_line(home: Path, text: str) -> None:
    (home / "dvc.lock").write_text(text)
    with pytest.raises(DataError, match=r"dvc\.lock: not as DVC writes it"):
        lock_at(home, None)
    assert doctor.diagnose(home, home)
    lines = {line.what: line for line in doctor.checkup(home, home)}
    assert lines["lineage"].severity is Severity.PROBLEM


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.name)])
def test_what_dvc_cannot_read_is_one_line(home: Path, make: Any) -> None:
    (home / ".dvc").mkdir()
    make(home / ".dvc/config")
    with pytest.raises(PipelineError, match=r"config: cannot be read"):
        read_plan(home)


def test_a_run_of_a_stage_that_dvc_yaml_lacks_is_diagnosed(home: Path) -> None:
    (home / "dvc.yaml").write_text("stages: {other: {cmd: x}}")
    assert [each.stage for each in doctor.diagnose(home, home)] == ["grpo"]


def test_a_committed_conflict_hides_no_other_commit(home: Path) -> None:
    author = {f"GIT_{who}_{what}": "nobody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def commit() -> None:
        for command in (["add", "dvc.lock"], ["commit", "-qm", "x"]):
            subprocess.run(["git", *command], cwd=home, check=True, env=os.environ | author)

    subprocess.run(["git", "init", "-q"], cwd=home, check=True)
    commit()
    (home / "dvc.lock").write_text(f"<<<<<<< HEAD\n{json.dumps(MADE)}\n=======\n{json.dumps(MADE)}\n>>>>>>> other\n")
    commit()
    (home / "dvc.lock").write_bytes(b"\xff\xfe")
    commit()
    assert [lock.stages["grpo"].stage for lock in locks_with(home, "b" * 32)] == ["grpo"]


@pytest.mark.parametrize("name", ["prefect.toml", "pyproject.toml", "requirements.lock"])
@pytest.mark.parametrize("content", [None, b"5\n", b"\xff\xfe", b"api = 5\nproject = 5\n"])
def test_doctor_goes_on_where_a_file_of_the_repository_is_gone_or_damaged(
    home: Path, name: str, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for other in ("prefect.toml", "pyproject.toml", "requirements.lock"):
        (home / other).write_bytes((ROOT / other).read_bytes())
    (home / name).unlink()
    if content is not None:
        (home / name).write_bytes(content)
    lines = list(doctor.checkup(home, home))
    assert [line.what for line in lines][-4:] == ["locks", "scratch", "mlflow", "prefect"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("lengths", np.array([1], np.int32)),  # of two trajectories
        ("lengths", np.array([[1], [1]], np.int32)),
        ("prompts", np.array([[0.0, 1.0], [0.0, 1.0]])),
        ("prompts", np.array([[0, 1]], np.int64)),
        ("ids", np.array([3, -(2**31)], np.int32)),
        ("prompt_ids", np.int32(5)),
        ("prompt_ids", np.array(["x"])),
    ],
)
def test_rollouts_with_other_arrays_are_damaged(tmp_path: Path, name: str, damage: Any) -> None:
    arrays = {
        "prompts": np.array([[0, 1], [0, 1]], np.int64),
        "prompt_ids": np.array([5], np.int32),
        "lengths": np.array([1, 1], np.int32),
        "ids": np.array([3, 4], np.int32),
    }
    np.savez(tmp_path / "00000001.npz", **arrays)
    assert read_ids(tmp_path / "00000001.npz") == [([5], [3]), ([5], [4])]
    np.savez(tmp_path / "00000001.npz", **arrays | {name: damage})
    with pytest.raises(DataError, match="torn or damaged"):
        read_ids(tmp_path / "00000001.npz")
