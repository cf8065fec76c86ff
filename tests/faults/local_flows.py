"""`make flows` in a copy of the repository: a real server and worker, what runs below them, and what each system says of it."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from dotenv import dotenv_values

from pipeline.lineage.plan import Verdict, read_plan
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[2]
Value = TypeVar("Value")
START_S = 120.0
END_STATES = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def wait_for(look: Callable[[], Value], what: str, timeout_s: float = 60.0) -> Value:
    """The first true value of `look`."""
    end = time.monotonic() + timeout_s
    while not (value := look()):
        assert time.monotonic() < end, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of these very processes runs; a zombie does not."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def children(process: psutil.Process, *words: str) -> list[psutil.Process]:
    """The children whose command line holds all the words."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                if all(word in " ".join(child.cmdline()) for word in words):
                    found.append(child)
    return found


class LocalFlows:
    """A `make flows`.

    Args:
        root: a copy of the repository.
        home: Prefect's folder, for the database.
        port: of the server; a free one when left out.
    """

    def __init__(self, root: Path, home: Path, port: int | None = None) -> None:
        self.root = root
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.log = root.parent / f"flows-{self.port}.log"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_", "PREFECT_", "PYTHON"))
        }
        self.environment = kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "DVC_SITE_CACHE_DIR": str(root.parent / "dvc-site"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def popen(self) -> "subprocess.Popen[bytes]":
        """`python -m flows.local`, its output appended to `log`."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.local"],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self) -> "LocalFlows":
        said = len(self.log.read_text()) if self.log.exists() else 0
        self._process = self.popen()
        wait_for(lambda: "ready" in self.log.read_text()[said:] or self.process.poll() is not None, "make flows", START_S)
        assert self.process.poll() is None, self.log.read_text()
        wait_for(self.worker, "worker")
        return self

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def stop(self) -> None:
        """Ends it as a closed terminal does, and all that is left below it."""
        if self._process is None:
            return
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGHUP)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    # Processes

    def server(self) -> psutil.Process | None:
        """The parent of the server's processes."""
        return next(iter(children(psutil.Process(self.process.pid), "flows.server")), None)

    def worker(self) -> psutil.Process | None:
        return next(iter(children(psutil.Process(self.process.pid), "prefect", "worker start")), None)

    def flow(self) -> psutil.Process | None:
        """The process of the only flow run at work."""
        worker = self.worker()
        return next(iter(children(worker, "prefect.engine")), None) if worker else None

    def dvc(self) -> psutil.Process | None:
        flow = self.flow()
        return next(iter(children(flow, "dvc", "repro")), None) if flow else None

    def trainer(self) -> psutil.Process | None:
        dvc = self.dvc()
        return next(iter(children(dvc, "stages.")), None) if dvc else None

    def tree(self) -> list[psutil.Process]:
        """The flow's process and all below it."""
        flow = self.flow()
        return [flow, *flow.children(recursive=True)] if flow else []

    # What Prefect says

    @property
    def auth(self) -> tuple[str, str]:
        """User and password, from the file that `make flows` made."""
        user, _, password = str(dotenv_values(self.root / ".env")["PREFECT_API_AUTH_STRING"]).partition(":")
        return user, password

    def api(self, method: str, path: str, content: Any = None) -> Any:
        end = time.monotonic() + 30
        while True:
            answer = httpx.request(method, f"{self.url}{path}", json=content, timeout=30, auth=self.auth)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end:
                break
            time.sleep(0.5)  # its database is busy; Prefect's own client asks again, too
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def run(self, name: str, parameters: Mapping[str, Any] | None = None) -> str:
        """Starts `minimind/<name>`; the id of the flow run."""
        deployment = self.api("GET", f"/deployments/name/minimind/{name}")
        content = {"parameters": dict(parameters or {}), "state": {"type": "SCHEDULED"}}
        return str(self.api("POST", f"/deployments/{deployment['id']}/create_flow_run", content)["id"])

    def flow_run(self, identifier: str) -> dict[str, Any]:
        return dict(self.api("GET", f"/flow_runs/{identifier}"))

    def state(self, identifier: str) -> str:
        """The type of the flow run's state."""
        return str(self.flow_run(identifier)["state_type"])

    def states(self, identifier: str) -> list[tuple[str, str]]:
        """Type and time of every state that the flow run has had, oldest first."""
        found = self.api("GET", f"/flow_run_states/?flow_run_id={identifier}")
        return sorted(((state["type"], state["timestamp"]) for state in found), key=lambda state: state[1])

    def logs(self, identifier: str) -> list[str]:
        """The log lines of a flow run and its tasks, oldest first."""
        found: list[str] = []
        while True:
            content = {
                "logs": {"flow_run_id": {"any_": [identifier]}},
                "sort": "TIMESTAMP_ASC",
                "limit": 200,
                "offset": len(found),
            }
            page = self.api("POST", "/logs/filter", content)
            found += [entry["message"] for entry in page]
            if len(page) < 200:
                return found

    def pause(self, paused: bool) -> None:
        """Keeps the worker from starting flow runs, or lets it again."""
        self.api("PATCH", "/work_pools/minimind", {"is_paused": paused})


# What the other two say


def mlflow_run(root: Path, uid: str) -> tuple[str, dict[str, str], list[tuple[str, int]]] | None:
    """Status, tags and (key, step) of every metric of the run with this uid, or None before it is there."""
    with sqlite3.connect(root / "mlflow.db", timeout=30) as store:
        found = store.execute(
            "select runs.run_uuid, runs.status from runs join tags on runs.run_uuid = tags.run_uuid "
            "where tags.key = 'run.uid' and tags.value = ?",
            [uid],
        ).fetchall()
        if not found:
            return None
        [(identifier, status)] = found
        tags = dict(store.execute("select key, value from tags where run_uuid = ?", [identifier]).fetchall())
        metrics = store.execute("select key, step from metrics where run_uuid = ?", [identifier]).fetchall()
    return status, tags, metrics


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_folders(root: Path, stage: str) -> list[Path]:
    """Run folders of a stage, oldest first."""
    found = [path.parent for path in (root / ".runs" / stage).glob("*/*/run.json")]
    return sorted(found, key=lambda folder: json.loads((folder / "run.json").read_text())["started_s"])


# A lineage without training, for what does not depend on it

TRAINER = """
import sys, time
from pathlib import Path
from pipeline.stage import stage_process
from pipeline.supervise import Stopped

name = sys.argv[1]
with stage_process(name) as stop:
    stop.deferred = True
    Path(f"started-{name}").write_text(Path(f"version-{name}").read_text())
    while not Path(f"go-{name}").exists():
        if stop.requested is not None:
            raise Stopped(stop.requested, ", saved")
        time.sleep(0.02)
    Path(f"{name}.out").write_text(Path(f"version-{name}").read_text())
"""
FLOOD = """
import sys
from pathlib import Path

for number in range(100_000):
    print(f"line {number:06d} " + "x" * 88)
for number in range(50_000):
    print(f"\\rstep {number}", end="", file=sys.stderr, flush=True)
Path("flood.out").write_text("1")
"""


@dataclass
class Waiting:
    """A small copy of the project whose stages pretrain, lora and dpo run until they are let go; `eval` floods its output."""

    root: Path

    def renew(self, stage: str) -> None:
        """Makes the stage out of date, and its next run wait."""
        for name in ("go", "started"):
            (self.root / f"{name}-{stage}").unlink(missing_ok=True)
        (self.root / f"version-{stage}").write_text(str(time.time_ns()))

    def has_started(self, stage: str) -> bool:
        return (self.root / f"started-{stage}").exists()

    def let_go(self, stage: str) -> None:
        (self.root / f"go-{stage}").touch()

    def is_done(self, stage: str) -> bool:
        """Whether dvc.lock has what the stage has written."""
        return {planned.stage: planned.verdict for planned in read_plan(self.root)}[stage] is Verdict.UP_TO_DATE


def waiting_stages(root: Path, **runtime: Any) -> Waiting:
    """Makes the copy in an empty folder."""
    for name in ("flows", "pipeline", "prefect.yaml", "prefect.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, root / name)
    params = read_yaml(ROOT / "params.yaml")
    params["runtime"] |= runtime
    (root / "params.yaml").write_text(json.dumps(params))
    (root / "trainer.py").write_text(TRAINER)
    (root / "flood.py").write_text(FLOOD)
    stages: dict[str, Any] = {
        name: {"cmd": f"exec {sys.executable} trainer.py {name}", "deps": [f"version-{name}"], "outs": [f"{name}.out"]}
        for name in ("pretrain", "lora", "dpo")
    }
    stages["eval"] = {"cmd": f"exec {sys.executable} flood.py", "outs": ["flood.out"]}
    (root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=root, check=True)
    made = Waiting(root)
    for name in ("pretrain", "lora", "dpo"):
        made.renew(name)
    return made
