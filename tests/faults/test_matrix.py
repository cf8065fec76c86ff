"""Kill, terminate or cancel any process of a flow run, against a real server and worker.

Whatever it is: nothing lives on, Prefect, MLflow and DVC say that the stage did not end well, and the next run of the stage goes
on from the last save and records every step once.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import pytest
from faults.local_flows import LocalFlows, gone, mlflow_run, read_lines, run_folders, wait_for
from lineage.project import Project, copy_repository

from pipeline.lineage.plan import Verdict, read_plan

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
GONE_S = 30.0
AGREED_S = 180.0
ENDED_S = 240.0
SEEDS = count(1)


@dataclass
class Bench:
    """One training stage whose parents are up to date, below a `make flows`."""

    project: Project
    flows: LocalFlows

    @property
    def root(self) -> Path:
        return self.project.root

    def train(self) -> tuple[str, Path]:
        """Starts a new recipe; the flow run's id and the run folder, once there is a save."""
        self.project.set_params({"pretrain.seed": next(SEEDS)})
        before = set(run_folders(self.root, "pretrain"))
        flow_run = self.flows.run("pretrain")
        folder = wait_for(lambda: next(iter(set(run_folders(self.root, "pretrain")) - before), None), "a run", 120)
        wait_for(lambda: any(folder.glob("state-*.json")), "a save", 60)
        return flow_run, folder

    def stage_is_to_run(self) -> bool:
        return read_plan(self.root, ["pretrain"])[-1].verdict is Verdict.RUNS


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "copy").mkdir()
    project = copy_repository(folder / "copy")
    project.set_params(
        {
            "pretrain": {"epochs": 25, "val_every": 100_000, "plot_every": 10},  # about 150 steps
            "runtime": {"ranks": 2, "save_every_s": 0.5},
        }
    )
    project.repro("encode@pretrain")
    flows = LocalFlows(project.root, folder / "prefect")
    try:
        yield Bench(project, flows.start())
    finally:
        flows.stop()


def recorded(folder: Path) -> list[tuple[str, int]]:
    """Key and step of every metric in the run folder."""
    return [(key, line["step"]) for line in read_lines(folder / "metrics.jsonl") for key in line["metrics"]]


def about(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "run.json").read_text()))


def send(signum: int, *find: Callable[[LocalFlows], psutil.Process | None]) -> Callable[[LocalFlows, str], None]:
    def fault(flows: LocalFlows, flow_run: str) -> None:
        processes = [process for look in find if (process := look(flows))]
        assert len(processes) == len(find)
        for process in processes:
            process.send_signal(signum)

    return fault


def cancel(flows: LocalFlows, flow_run: str) -> None:
    flows.api("POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})


FAULTS = {
    "cancel flow": (cancel, "CANCELLED"),
    "TERM flow": (send(signal.SIGTERM, LocalFlows.flow), "CRASHED"),
    "KILL flow": (send(signal.SIGKILL, LocalFlows.flow), "CRASHED"),
    "KILL worker": (send(signal.SIGKILL, LocalFlows.worker), "CRASHED"),
    "KILL flow and worker": (send(signal.SIGKILL, LocalFlows.worker, LocalFlows.flow), "CRASHED"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_flow_run_that_ends_early_leaves_nothing_and_is_gone_on_with(bench: Bench, name: str) -> None:
    fault, state = FAULTS[name]
    flows = bench.flows
    flow_run, folder = bench.train()
    uid = str(about(folder)["uid"])
    tree = flows.tree()
    assert len(tree) >= 5  # flow, dvc, trainer, its second rank, feeder
    below = [process for process in tree if "feeder" not in " ".join(process.cmdline())]
    flows.pause(True)  # the restart waits until everybody has been asked
    fault(flows, flow_run)
    began = time.monotonic()
    wait_for(lambda: gone(below), "processes to end", GONE_S)
    gone_s = time.monotonic() - began
    wait_for(lambda: gone(tree), "feeder to end", GONE_S)

    wait_for(lambda: flows.state(flow_run) == state, state, AGREED_S)
    agreed_s = time.monotonic() - began
    assert "COMPLETED" not in [type_ for type_, _ in flows.states(flow_run)]
    told = mlflow_run(bench.root, uid)
    assert told is not None and told[0] == "KILLED"
    assert bench.stage_is_to_run()
    saved = max(int(path.stem.removeprefix("state-")) for path in folder.glob("state-*.json"))

    if state == "CANCELLED":
        time.sleep(5)  # nothing may come
        assert restart_of(flows, flow_run) is None
        again = flows.run("pretrain")
    else:
        again = wait_for(lambda: restart_of(flows, flow_run), "a restart", 30)
    flows.pause(False)
    finished_from(bench, again, folder, saved, attempts=2)
    print(f"{name}: processes gone {gone_s:.0f} s, states agreed {agreed_s:.0f} s")


RETRIED = {
    "TERM dvc": send(signal.SIGTERM, LocalFlows.dvc),
    "KILL dvc": send(signal.SIGKILL, LocalFlows.dvc),
    "KILL trainer": send(signal.SIGKILL, LocalFlows.trainer),
}


@pytest.mark.parametrize("name", RETRIED)
def test_a_stage_that_is_killed_is_retried_by_its_flow_run(bench: Bench, name: str) -> None:
    flows = bench.flows
    flow_run, folder = bench.train()
    dvc = flows.dvc()
    assert dvc is not None
    below = [dvc, *(child for child in dvc.children(recursive=True) if "feeder" not in " ".join(child.cmdline()))]
    RETRIED[name](flows, flow_run)
    wait_for(lambda: gone(below), "processes to end", GONE_S)
    saved = max(int(path.stem.removeprefix("state-")) for path in folder.glob("state-*.json"))
    assert bench.stage_is_to_run() and flows.state(flow_run) == "RUNNING"
    finished_from(bench, flow_run, folder, saved, attempts=2)


def restart_of(flows: LocalFlows, flow_run: str) -> str | None:
    """The flow run that was created after this one by the automation."""
    crashed = flows.flow_run(flow_run)
    content = {"sort": "START_TIME_DESC", "limit": 10, "flow_runs": {"state": {"type": {"any_": ["SCHEDULED", "PENDING"]}}}}
    for found in flows.api("POST", "/flow_runs/filter", content):
        if found["created"] > crashed["created"] and found["deployment_id"] == crashed["deployment_id"]:
            assert found["parameters"] == crashed["parameters"] | {"restarts": crashed["parameters"].get("restarts", 0) + 1}
            return str(found["id"])
    return None


def finished_from(bench: Bench, flow_run: str, folder: Path, saved: int, *, attempts: int) -> None:
    """The flow run ends well, in the same run folder, from that save on."""
    flows = bench.flows
    wait_for(lambda: flows.state(flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"), "end", ENDED_S)
    assert flows.state(flow_run) == "COMPLETED", flows.logs(flow_run)
    assert len(run_folders(bench.root, "pretrain")) == len({about(path)["uid"] for path in run_folders(bench.root, "pretrain")})
    assert about(folder)["attempt"] == attempts and json.loads((folder / "exit.json").read_text())["code"] == 0
    assert f"(resumes at step {saved})" in (bench.root / ".runs/pretrain/output.log").read_text()
    local = recorded(folder)
    assert len(local) == len(set(local)) and max(step for _, step in local) > saved
    assert not bench.stage_is_to_run()
    uid = str(about(folder)["uid"])
    wait_for(lambda: (run := mlflow_run(bench.root, uid)) and run[0] == "FINISHED", "MLflow", 60)
    _, tags, metrics = mlflow_run(bench.root, uid) or ("", {}, [])
    assert tags["run.resumed"] == str(attempts - 1)
    assert sorted(each for each in metrics if not each[0].startswith("system/")) == sorted(local)  # the machine's load apart
