"""Isolated copies of a workspace: their scratch is the original's, their lock on outputs their own."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_lineage import commit, dvc, git

from pipeline.errors import HeldError
from pipeline.evaluation.panel import Examination
from pipeline.evaluation.results import cached
from pipeline.lineage.overrides import write_overrides
from pipeline.params import load_params
from pipeline.params.schema import Runtime
from pipeline.stage import stage_run
from pipeline.supervise import hold, hold_unless, is_held
from pipeline.tracking.home import VARIABLE, home
from pipeline.tracking.records import noted_complete
from pipeline.tracking.run_folder import RunFolder, read_json

ROOT = Path(__file__).parents[1]


def runtime() -> Runtime:
    return load_params(ROOT / "params.yaml").runtime.model_copy(update={"mlflow": False, "progress": "off"})


def opened(root: Path, lr: float = 1e-4) -> Any:
    (root / "parent.pth").write_bytes(b"weights")
    return stage_run("grpo", params={"grpo": {"lr": lr}}, inputs=["parent.pth"], runtime=runtime(), root=root)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("home", "a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_home_is_the_root_unless_the_environment_names_another(tmp_path: Path) -> None:
    assert home(tmp_path, {}) == tmp_path.resolve() == home(tmp_path, {VARIABLE: ""})
    assert home(tmp_path, {VARIABLE: "/elsewhere"}) == Path("/elsewhere")


def test_home_of_a_copy_that_dvc_makes_is_its_workspace(tmp_path: Path) -> None:
    for below in ("standalone/tmp1", "tmp2", "tmp3/folder/of/a/larger/repository"):
        assert home(tmp_path / ".dvc/tmp/exps" / below, {}) == tmp_path.resolve()
    assert home(tmp_path / "exps/tmp1", {}) == (tmp_path / "exps/tmp1").resolve()
    assert home(tmp_path / ".dvc/tmp/exps/tmp1", {VARIABLE: "/elsewhere"}) == Path("/elsewhere")


DVC = """
stages:
  grpo:
    cmd: exec python step.py
    deps: [step.py]
    params: [grpo.lr]
    outs: [checkpoints/grpo.pth]
artifacts:
  minimind-grpo: {path: checkpoints/grpo.pth, type: model}
"""
STEP = """
from pathlib import Path
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_run

params = load_params(Path("params.yaml"))
runtime, used = params.runtime.model_copy(update={"progress": "off"}), declaration("grpo", params)
with stage_run("grpo", params=used.params, inputs=used.deps, runtime=runtime) as run:
    run.log(1, {"reward/mean": params.grpo.lr})
    Path("checkpoints").mkdir(exist_ok=True)
    Path("checkpoints/grpo.pth").write_text(str(used.params))
"""
WAYS = {
    0.5: (["repro"],),
    0.25: (["exp", "run", "-S", "grpo.lr=0.25"],),
    0.125: (["exp", "run", "--temp", "-S", "grpo.lr=0.125"],),
    0.0625: (["exp", "run", "--queue", "-S", "grpo.lr=0.0625"], ["exp", "run", "--run-all"]),
}


@pytest.mark.slow
def test_every_way_that_dvc_runs_a_stage_ends_in_the_same_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, text in {"dvc.yaml": DVC, "step.py": STEP}.items():
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    write_overrides(tmp_path / "params.yaml", {"grpo.lr": 0.5})
    (tmp_path / ".gitignore").write_text("/.runs\n/checkpoints\n/mlflow.db\n/mlartifacts\n/.mlflow.lock\n__pycache__\n")
    git(tmp_path, "init", "--quiet")
    dvc(tmp_path, "init", "--quiet")
    for lr, commands in WAYS.items():
        for command in commands:
            dvc(tmp_path, *command)
        if lr == 0.5:
            commit(tmp_path, "lineage")
    runs = [RunFolder(path.parent) for path in (tmp_path / ".runs/grpo").glob("*/*/run.json")]
    assert sorted(read_json(run.about)["params"]["grpo"]["lr"] for run in runs) == sorted(WAYS)
    wait_for(lambda: all(noted_complete(run) for run in runs), 120)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    wait_for(lambda: len(client.search_model_versions("name = 'minimind-grpo'")) == len(WAYS), 60)
    made = {read_json(run.exit)["outputs"]["checkpoints/grpo.pth"] for run in runs}
    assert {version.tags["checkpoint.md5"] for version in client.search_model_versions("name = 'minimind-grpo'")} == made
    assert len(made) == len(WAYS) and not list((tmp_path / ".dvc").rglob("mlflow.db"))
    assert {run.info.status for run in client.search_runs(["1"]) if "run.uid" in run.data.tags} == {"FINISHED"}


def test_a_run_goes_on_in_another_copy(copies: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = copies
    with pytest.raises(SystemExit), opened(first) as run:
        assert run.folder.path.parents[3] == tmp_path / "home" and run.scratch == tmp_path / "home/.runs/grpo"
        assert (first / ".runs/grpo/lock").exists() and not (tmp_path / "home/.runs/grpo/lock").exists()
        run.save(7, {"step": 7})
        raise RuntimeError("breaks")
    with opened(second) as run:
        assert run.resumed_step == 7 and run.load() == {"step": 7}
        about = read_json(run.folder.about)
    assert about["root"] == str(tmp_path / "home")
    assert about["tracking_uri"] == f"sqlite:///{tmp_path}/home/mlflow.db"


def test_two_copies_train_the_same_stage_at_once(copies: tuple[Path, Path]) -> None:
    first, second = copies
    with opened(first, 1e-4) as one, opened(second, 3e-4) as other:
        assert one.folder.path != other.folder.path
        with pytest.raises(SystemExit) as caught, opened(first, 5e-4):
            pass
    assert caught.value.code == HeldError.exit_code  # in one copy, only one


def test_a_recipe_at_work_elsewhere_is_waited_for(copies: tuple[Path, Path]) -> None:
    child = os.fork()  # flock is by open file, but signal handlers need a main thread
    if child == 0:
        with opened(copies[0]):
            (copies[0] / "started").touch()
            wait_for((copies[0] / "go").exists)
        os._exit(0)
    wait_for((copies[0] / "started").exists)
    threading.Timer(1.0, (copies[0] / "go").touch).start()
    with opened(copies[1]) as run:
        assert (copies[0] / "go").exists() and run.folder.path.name == "2"  # a run of its own: 1 is finished, without a save
    assert os.waitpid(child, 0)[1] == 0


def test_a_stopped_wait_gives_no_lock(tmp_path: Path) -> None:
    stop = threading.Event()
    with hold(tmp_path / "lock", wait=True):
        threading.Timer(0.2, stop.set).start()
        with hold_unless(stop, tmp_path / "lock") as held:
            assert not held
    with hold_unless(threading.Event(), tmp_path / "lock") as held:
        assert held and is_held(tmp_path / "lock")
    assert not is_held(tmp_path / "lock")


def test_one_cache_serves_many_writers(tmp_path: Path) -> None:
    def measure(number: int) -> Examination:
        found = cached(tmp_path / "cache", "same", lambda: Examination({"rows": [float(number)] * 20_000}, []))
        return found

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(measure, range(64)))
    assert all(len(set(each.values["rows"])) == 1 and len(each.values["rows"]) == 20_000 for each in found)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]
