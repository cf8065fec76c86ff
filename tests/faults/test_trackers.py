"""MLflow stopped, hung, out of its mind, read-only or full: training does not notice, and what it missed is sent once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from faults.mlflow_server import MlflowServer, immutable, wait_for
from mlflow import MlflowClient

from pipeline.tracking.run_folder import RunFolder, read_json

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PORT = 4331
STEPS, GATE = 120, 40
# What a training stage is to trackers: steps with metrics, samples, saves, and outputs at the end. It waits at a gate until
# the test has let the fault in. It prints the seconds for opening the run, training behind the gate, and closing.
TRAINER = """
    import sys, time
    from pathlib import Path
    import torch
    from pipeline.curves import write_metrics
    from pipeline.params.schema import Runtime
    from pipeline.stage import stage_run

    runtime = Runtime(device="cpu", dtype="auto", threads=1, save_every_s=0.1, keep_saves=2, progress="auto", ranks=1,
                      mlflow=sys.argv[1] == "tracked", gradient_checkpointing=False, keep_every_steps=None, gpus="auto",
                      guard="off", keep_rollouts=True, replay_every_steps=None, compile=False)
    began = time.monotonic()
    with stage_run("grpo", params={"grpo": {"lr": 1e-4}}, inputs=["parent.pth"], runtime=runtime) as run:
        opened_s = time.monotonic() - began
        state = run.load() or {"step": 0, "x": torch.full((1000,), 1.0)}
        for step in range(state["step"] + 1, STEPS + 1):
            if step == GATE + 1:
                while not Path("open").exists():
                    time.sleep(0.02)
                started = time.monotonic()
            x = torch.sin(state["x"] * 3 + step)
            time.sleep(0.01)
            state = {"step": step, "x": x}
            run.log(step, {"loss": float(x[0]), **({"val/loss": float(x[1])} if step % 7 == 0 else {})})
            run.log_samples(step, [{"text": f"row {step}.{row}"} for row in range(step % 3)])
            run.checkpoint(step, lambda: state)
        torch.save(state["x"], Path("weights.pth").open("wb"))
        write_metrics(Path("metrics/grpo.json"), {"loss": float(x[0])})
        trained = time.monotonic()
    print(opened_s, trained - started, time.monotonic() - trained)
"""


class Training:
    """A trainer in a folder of its own; it waits at its gate."""

    def __init__(self, root: Path, uri: str | None) -> None:
        self.root = root
        root.mkdir()
        (root / "parent.pth").write_bytes(b"weights")
        script = textwrap.dedent(TRAINER).replace("STEPS", str(STEPS)).replace("GATE", str(GATE))
        (root / "trainer.py").write_text(script)
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": uri or ""}
        command = [sys.executable, "trainer.py", "tracked" if uri is not None else "alone"]
        self.process = subprocess.Popen(command, cwd=root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self) -> None:
        """Opens the gate; the trainer must end well. Notes how long it took."""
        (self.root / "open").touch()
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err.decode()
        self.seconds = [float(word) for word in out.split()]

    @property
    def folder(self) -> RunFolder:
        (path,) = (self.root / ".runs/grpo").glob("*/1")
        return RunFolder(path)

    @property
    def outputs(self) -> list[bytes]:
        return [(self.root / name).read_bytes() for name in ("weights.pth", "metrics/grpo.json")]

    @property
    def recorded(self) -> tuple[Counter[Any], list[str]]:
        """Every (key, step, value), and every sample."""
        metrics, samples = (
            [json.loads(line) for line in path.read_text().splitlines()] for path in (self.folder.metrics, self.folder.samples)
        )
        points = Counter((key, line["step"], value) for line in metrics for key, value in line["metrics"].items())
        return points, [line["text"] for line in samples]

    def wait_for_feeder(self) -> None:
        path = str(self.folder.path)
        wait_for(lambda: not any(path in words for words in command_lines()), 90, "the end of the feeder")

    def replay(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pipeline", "replay", *arguments]
        env = {**self.environment, **environment}
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=120)


def command_lines() -> Iterator[list[str]]:
    """Of all processes."""
    for process in psutil.process_iter(["cmdline"]):
        yield process.info["cmdline"] or []


def received(uri: str, training: Training) -> tuple[Counter[Any], list[str]]:
    """What MLflow has of a run, of which there must be one."""
    mlflow.set_tracking_uri(uri)  # load_table looks nowhere else
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("minimind")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`run.uid` = '{read_json(training.folder.about)['uid']}'")
    assert run.info.status == "FINISHED" and run.data.params == {"grpo.lr": "0.0001"}
    points = Counter(
        (point.key, point.step, point.value)
        for key in run.data.metrics
        if not key.startswith("system/")
        for point in client.get_metric_history(run.info.run_id, key)
    )
    names = [entry["path"] for entry in json.loads(run.data.tags["mlflow.loggedArtifacts"])]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == names
    tables = [client.load_table(experiment.experiment_id, name, [run.info.run_id]) for name in names]
    return points, [text for table in tables for text in table["text"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    folder = tmp_path_factory.mktemp("server") / "store"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)], capture_output=True).returncode == 0
    server = MlflowServer(folder, PORT)
    server.start()
    yield server
    server.close()
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Training without a tracker: what its result is, and how long it takes."""
    training = Training(tmp_path_factory.mktemp("alone") / "run", None)
    training.finish()
    return training


@contextmanager
def killed(server: MlflowServer) -> Iterator[None]:
    server.signal(signal.SIGKILL)
    yield
    server.start()


@contextmanager
def hung(server: MlflowServer) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    yield
    server.signal(signal.SIGCONT)


@contextmanager
def raving(server: MlflowServer) -> Iterator[None]:
    """It fails, wants a password, and says yes to everything without doing it."""
    server.answers = cycle([(500, b"{}"), (200, b"<html>please log in</html>"), (200, b"{}"), (200, b"{}"), (200, b"{}")])
    yield
    server.answers = None


@contextmanager
def full(server: MlflowServer) -> Iterator[None]:
    if not os.path.ismount(server.folder):
        pytest.skip("mounting a small file system is not allowed here")
    filler = server.folder / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(file.fileno(), bytes(1 << 12))
    yield
    filler.unlink()


FAULTS = {
    "killed": killed,
    "hung": hung,
    "raving": raving,
    "full": full,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_changes_nothing_and_what_it_missed_arrives_once(
    server: MlflowServer, alone: Training, tmp_path: Path, fault: str
) -> None:
    """One trainer is at work when the fault comes, another one starts and ends while it lasts."""
    at_work = Training(tmp_path / "at_work", server.uri)
    wait_for(
        lambda: (at_work.root / ".runs").exists() and len(list(at_work.root.glob(".runs/grpo/*/1/feeder.json"))), 60, "a feeder"
    )
    client = MlflowClient(server.uri)
    run_id = read_json(at_work.folder.feeder_note)["run_id"]
    wait_for(lambda: client.get_run(run_id).data.metrics, 60, "the first points")
    with FAULTS[fault](server):
        at_work.finish()
        starting = Training(tmp_path / "starting", server.uri)
        starting.finish()
    for training in (at_work, starting):
        assert training.outputs == alone.outputs
        assert training.recorded == alone.recorded
        assert read_json(training.folder.exit)["code"] == 0
        print(fault, training.seconds, "alone", alone.seconds)
        assert all(own < 1.5 * undisturbed + 1.0 for own, undisturbed in zip(training.seconds, alone.seconds, strict=True))
    for training in (at_work, starting):
        training.wait_for_feeder()
        if read_json(training.folder.feeder_note).get("complete") != 1:  # it had given up before the server was there again
            assert "gave up" in training.folder.feeder_log.read_text()
            done = training.replay("grpo")
            assert done.returncode == 0, done.stderr
        assert received(server.uri, training) == alone.recorded


def test_what_a_feeder_has_given_up_a_replay_sends_to_this_or_another_store(
    server: MlflowServer, alone: Training, tmp_path: Path
) -> None:
    training = Training(tmp_path / "run", server.uri)
    with raving(server):
        training.finish()
        training.wait_for_feeder()
        refused = training.replay("grpo")
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "mend it and replay again" in refused.stderr
    sent = f"sent {len(alone.recorded[0])} points and {len(alone.recorded[1])} samples; FINISHED"
    assert sent in training.replay("--all").stdout
    assert received(server.uri, training) == alone.recorded
    assert training.replay("--all").stdout == "replay: MLflow has all runs\n"
    assert "sent 0 points and 0 samples" in training.replay("grpo").stdout
    other = f"sqlite:///{tmp_path}/other.db"
    assert sent in training.replay(str(training.folder.path), MLFLOW_TRACKING_URI=other).stdout
    assert received(other, training) == alone.recorded


def test_a_read_only_store_beside_the_trainer_changes_nothing(alone: Training, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    first = Training(tmp_path / "first", uri)  # makes the store
    first.finish()
    first.wait_for_feeder()
    with immutable(tmp_path / "store" / "mlflow.db", tmp_path / "store"):
        training = Training(tmp_path / "second", uri)
        training.finish()
        training.wait_for_feeder()
        assert training.outputs == alone.outputs and training.recorded == alone.recorded
        assert "not sent: " in training.folder.feeder_log.read_text()
        assert training.replay("grpo").returncode == 1
    assert "FINISHED" in training.replay("grpo").stdout
    assert received(uri, training) == alone.recorded
