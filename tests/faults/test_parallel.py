"""Four branches of the lineage at once, where everything that they share is made by whoever comes first."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.mlflow_server import wait_for
from faults.prefect_server import prefect_server
from lineage.project import Project, copy_repository, yaml

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

BRANCHES = ("lora", "dpo", "ppo", "grpo")
BEFORE = "reward"
ROUNDS = 5
PORT = 4332
FLOW = "import os; os.cpu_count = lambda: 4\nfrom flows.minimind import minimind; minimind('all')"
RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
found = client.search_runs([client.get_experiment_by_name("minimind").experiment_id])
runs = [run for run in found if "rebuild.key" not in run.data.tags]
print(json.dumps([(run.data.tags["dvc.stage"], run.info.status) for run in runs]))
"""  # in a process of its own: a client keeps its database open, and the next round takes that away
WRITTEN = ("checkpoints/{}.pth", "checkpoints/{}.json", "metrics/{}.json", "plots/{}.csv")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A lineage that ends with the four branches, run one stage after the other."""
    folder = tmp_path_factory.mktemp("parallel") / "copy"
    folder.mkdir()
    project = copy_repository(folder)
    declared = yaml.load(folder / "dvc.yaml")
    for stage in ("agent", "eval", "gate"):
        del declared["stages"][stage]
    del declared["plots"], declared["artifacts"]
    with (folder / "dvc.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(declared, file)
    project.set_params({"runtime.mlflow": False})
    assert set(BRANCHES) <= project.repro()
    project.set_params({"runtime.mlflow": True})
    return project


def forget(project: Project, lock: dict[str, Any]) -> None:
    """Takes away what the branches made, wherever it is kept, and the MLflow store."""
    for path in [project.root / written.format(stage) for stage in BRANCHES for written in WRITTEN]:
        path.unlink()
    for path in (".runs", "mlartifacts", ".dvc/cache/runs"):
        shutil.rmtree(project.root / path, ignore_errors=True)
    for path in [project.root / ".mlflow.lock", *project.root.glob("mlflow.db*")]:
        path.unlink(missing_ok=True)
    stages = {name: stage for name, stage in lock["stages"].items() if name not in BRANCHES}
    with (project.root / "dvc.lock").open("w", encoding="utf-8") as file:
        yaml.dump({**lock, "stages": stages}, file)


def finished_stages(project: Project) -> list[str]:
    """The stages of the store's runs, once all have finished."""
    runs = json.loads(subprocess.check_output([sys.executable, "-c", RUNS, f"sqlite:///{project.root}/mlflow.db"]))
    done = len(runs) >= len(BRANCHES) and {status for _, status in runs} == {"FINISHED"}
    return sorted(stage for stage, _ in runs) if done else []


def is_fed(project: Project) -> bool:
    """Whether a feeder still has the store open."""
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any("pipeline.tracking.feeder" in command and command[-1].startswith(str(project.root)) for command in commands)


def test_branches_that_start_at_once_on_fresh_stores_all_succeed(project: Project, tmp_path: Path) -> None:
    lock_file = project.root / "dvc.lock"
    sequential = yaml.load(lock_file)
    for number in range(ROUNDS):
        forget(project, sequential)
        began = time.monotonic()
        with prefect_server(tmp_path / f"prefect-{number}", PORT) as variables:
            environment = {**project.environment(**variables), "PYTHONPATH": str(project.root), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", FLOW]
            done = subprocess.run(command, cwd=project.root, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert yaml.load(lock_file) == sequential
        ran = [line for stage in BRANCHES for line in output(project, stage) if line.startswith("Running stage")]
        assert len(ran) == len(BRANCHES)  # each once, none tried again
        wait_for(lambda: not is_fed(project), 120, "the end of the feeders")
        assert finished_stages(project) == sorted(BRANCHES)
        print(f"round {number}: {time.monotonic() - began:.0f} s; {spans(project)}")


def output(project: Project, stage: str) -> list[str]:
    return (project.root / ".runs" / stage / "output.log").read_text(encoding="utf-8").splitlines()


def spans(project: Project) -> str:
    """When each branch's run began and ended, in seconds from the first."""
    from pipeline.tracking.run_folder import read_json

    folders = {stage: next((project.root / ".runs" / stage).glob("*/1")) for stage in BRANCHES}
    times = {
        stage: (read_json(path / "run.json")["started_s"], read_json(path / "exit.json")["time_s"])
        for stage, path in folders.items()
    }
    first, last = min(start for start, _ in times.values()), max(end for _, end in times.values())
    assert sum(end - start for start, end in times.values()) > last - first, "they ran one after the other"
    return ", ".join(f"{stage} {start - first:.0f}-{end - first:.0f}" for stage, (start, end) in times.items())
