"""`python -m pipeline doctor`: the lines about machine, repository, stores and runs, and the exit code."""

import json
import os
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import __main__ as command_line
from pipeline.diagnosis.findings import Severity
from pipeline.errors import ParamsError
from pipeline.params import load_params
from pipeline.params.load import parse_params
from pipeline.params.needs import needs
from pipeline.params.sizes import num_parameters
from pipeline.reading import doctor, machine, workspace
from pipeline.reading.lines import Line
from pipeline.stage import stage_run
from pipeline.supervise import hold
from pipeline.tracking.leftovers import DAY_S
from pipeline.tracking.records import all_runs
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
OK, WARN, PROBLEM = Severity.OK, Severity.WARN, Severity.PROBLEM
GROUP = {"lr": 1e-4, "loss": "cispo", "seed": 42, "group_size": 6, "max_new_tokens": 96}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the command reads; nothing has run."""
    for name in ("params.yaml", "dvc.yaml", "pyproject.toml", "requirements.lock", "prefect.toml", "data/world.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for variable in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "MINIMIND_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pipeline.stage.undisturbed", lambda *used: nullcontext())  # runs here have parameters of their own
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(
    root: Path, stage: str = "grpo", *, truncated: float = 0.0, steps: int = 30, code: int = 0, lr: float = 1e-4
) -> RunFolder:
    """A run whose record is whole in MLflow, as far as feeder.json knows."""
    quiet = {"device": "cpu", "threads": 1, "progress": "off", "mlflow": False, "guard": "off"}
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet)
    try:
        with stage_run(stage, params={stage: GROUP | {"lr": lr}}, inputs=[], runtime=runtime, root=root) as run:
            for step in range(1, steps + 1):
                run.log(step, {"rollout/truncated_frac": truncated, "policy/ref_kl": float("nan")})
            if code:
                raise SystemExit(code)
    except SystemExit:
        assert code
    about = json.loads(run.folder.about.read_text(encoding="utf-8"))
    write_json(run.folder.feeder_note, {"run_id": "0" * 32, "tracking_uri": about["tracking_uri"], "complete": 1})
    return run.folder


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["pipeline", "doctor", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def params() -> Any:
    return load_params(ROOT / "params.yaml")


def test_a_fresh_clone_is_no_problem(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = command(capsys, monkeypatch)
    lines = {line.split()[1]: line.split()[0] for line in said.splitlines()}
    assert code == 0 and set(lines) == {
        *("params.yaml", "python", "libraries", "device", "disk", "step", "lineage", "locks", "scratch", "mlflow", "prefect")
    }
    assert lines["lineage"] == "warn" and "no dvc.lock: no stage has run; `dvc repro` runs all" in said
    assert [name for name, severity in lines.items() if severity == "problem"] == []
    assert not list(repository.glob(".runs")) and not list(repository.glob("mlflow.db"))  # it only reads


def test_another_folder_is_refused_in_a_line(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "dvc.yaml").unlink()
    with pytest.raises(ParamsError, match="no dvc.yaml; run the command in the repository"):
        list(doctor.checkup(repository, repository))


def test_a_wrong_params_file_hides_nothing_else(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(repository)
    text = (repository / "params.yaml").read_text(encoding="utf-8").replace("  group_size: 6", "  group_sizes: 6")
    (repository / "params.yaml").write_text(text, encoding="utf-8")
    (repository / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n", encoding="utf-8")
    code, said = command(capsys, monkeypatch)
    assert code == 1 and said.count("problem  params.yaml") == 2 and "did you mean `group_size`?" in said
    assert "ok       locks" in said and "ok       grpo" in said and "30 steps, nothing found by" in said


def test_the_newest_run_of_each_stage_is_diagnosed(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(repository, truncated=0.9, lr=2e-4)
    time.sleep(0.02)
    healthy = train(repository)
    code, said = command(capsys, monkeypatch)
    assert code == 0
    assert (
        f"ok       grpo             grpo · cispo lr 1e-4 · s42 ({healthy.path.relative_to(repository)}): finished; 30 steps"
        in said
    )
    assert "length_cap" not in said
    time.sleep(0.02)
    sick = train(repository, truncated=0.9, lr=3e-4)
    code, said = command(capsys, monkeypatch)
    assert code == 1 and str(sick.path.relative_to(repository)) in said
    assert "problem  grpo             length_cap: 90% of the answers are cut" in said


def test_one_run_by_stage_folder_and_as_json(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = train(repository, truncated=0.2)
    time.sleep(0.02)
    train(repository, lr=2e-4)
    code, said = command(capsys, monkeypatch, "grpo")
    assert code == 0 and len(said.splitlines()) == 1 and "lr 2e-4" in said
    code, said = command(capsys, monkeypatch, str(sick.path.relative_to(repository)), "--json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    told = json.loads(said, parse_constant=refuse)
    (run,) = told["runs"]
    assert code == 0 and told["problem"] is False and told["checks"] == []
    assert run["stage"] == "grpo" and run["state"] == "finished" and run["severity"] == "warn" and run["steps"] == 30
    (finding,) = run["findings"]
    assert finding["name"] == "length_cap" and finding["severity"] == "warn"
    assert finding["evidence"] == {"key": "rollout/truncated_frac", "first_step": 21, "last_step": 30}
    _, said = command(capsys, monkeypatch, "--json")
    assert len(json.loads(said)["checks"]) == 11 and len(json.loads(said)["runs"]) == 1


@pytest.mark.parametrize(
    ("code", "severity", "state"),
    [(0, OK, "finished"), (3, PROBLEM, "ended with code 3: exit 3"), (143, WARN, "ended with code 143: exit 143")],
)
def test_how_a_run_ended_is_told(repository: Path, code: int, severity: Severity, state: str) -> None:
    diagnosis = doctor.diagnose_run(train(repository, code=code), repository, repository)
    assert (diagnosis.severity, diagnosis.state) == (severity, state)


def test_a_killed_and_a_living_run(repository: Path) -> None:
    folder = train(repository)
    folder.exit.unlink()
    killed = doctor.diagnose_run(folder, repository, repository)
    assert killed.severity is WARN and killed.state.startswith("was killed")
    with hold(folder.lock, wait=False):
        assert doctor.diagnose_run(folder, repository, repository).state == "is running"


def fail(root: Path, stage: str, code: int = 3, *, ago_s: float = 0.0) -> None:
    """The last attempt at a stage came to no run; what it would read is older by a minute."""
    for path in [*root.glob("*.yaml"), *root.glob("data/**/*"), *root.glob("metrics/*")]:
        os.utime(path, (time.time() - 60, time.time() - 60))
    (root / ".runs" / stage).mkdir(parents=True, exist_ok=True)
    end = {"code": code, "reason": f"{stage}: told to", "time_s": time.time() - ago_s, "used": {"seconds": 0.5}}
    write_json(root / ".runs" / stage / "exit.json", end)


def test_stages_without_runs_are_told_when_they_failed(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "data/code").mkdir()
    for name in ("data", "gate"):
        (repository / f"data/code/{name}.json").write_text("{}")
    (repository / "metrics").mkdir()
    (repository / "metrics/eval.json").write_text("{}")
    train(repository)
    fail(repository, "data@lora", 0)
    fail(repository, "gate", 143)
    code, said = command(capsys, monkeypatch)
    assert code == 0 and "data@lora" not in said
    assert said.splitlines()[-1] == "warn     gate             ended with code 143: gate: told to"
    fail(repository, "data@lora")
    code, said = command(capsys, monkeypatch)
    assert code == 1 and "problem  data@lora        ended with code 3: data@lora: told to\n" in said
    (repository / "data/world.yaml").touch()
    code, said = command(capsys, monkeypatch)
    assert code == 0 and "ended with code 3: data@lora: told to; data/world.yaml was written since\n" in said
    told = json.loads(command(capsys, monkeypatch, "--json")[1])
    assert [(run["stage"], run["run"] is None) for run in told["runs"]] == [("grpo", False), ("data@lora", True), ("gate", True)]


def test_a_stage_that_failed_before_there_was_a_run_is_told_beside_its_last_one(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(repository, code=4)  # this one has a run: one line
    assert len(command(capsys, monkeypatch, "grpo")[1].splitlines()) == 1
    time.sleep(0.02)
    fail(repository, "grpo", ago_s=-5)
    code, said = command(capsys, monkeypatch, "grpo")
    assert code == 1 and [line.split()[3:6] for line in said.splitlines()][1] == ["with", "code", "3:"]


def test_every_stage_can_be_asked_for(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(repository, "data@lora", 0)
    lock = LOCK.replace("  tokenizer:", "  encode@dpo: {cmd: x}\n  tokenizer:")
    (repository / "dvc.lock").write_text(lock, encoding="utf-8")
    for stage, said in {
        "data@lora": "ok       data@lora        finished",
        "encode@dpo": "ok       encode@dpo       dvc.lock has its results; no attempt is recorded here",
        "data@agent": "warn     data@agent       has not run here; `dvc repro data@agent` runs it",
        "pretrain": "warn     pretrain         has not run here; `dvc repro pretrain` runs it",
    }.items():
        assert command(capsys, monkeypatch, stage) == (0, f"{said}\n")
    _, said = command(capsys, monkeypatch, "data")
    assert [line.split()[1] for line in said.splitlines()] == [
        f"data@{name}" for name in ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent")
    ]
    monkeypatch.setattr(sys, "argv", ["pipeline", "doctor", "data@nothing"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("data@nothing: no run folder, no stage")
    with hold(repository / ".runs/data@lora/lock", wait=False):
        assert command(capsys, monkeypatch, "data@lora") == (0, "ok       data@lora        is running\n")


def test_locks_of_the_living_are_named(repository: Path) -> None:
    folder = train(repository)
    assert (repository / ".runs/grpo/lock").exists() and folder.lock.exists()  # their holder has ended
    assert workspace.check_locks(repository) == Line("locks", OK, "no stage is running here")
    with hold(repository / ".runs/grpo/lock", wait=False), hold(folder.lock, wait=False):
        name = folder.path.relative_to(repository / ".runs")
        assert workspace.check_locks(repository) == Line("locks", OK, f"process {os.getpid()} holds grpo and {name}")


def test_runs_that_were_left_behind_are_counted(repository: Path) -> None:
    old = train(repository, code=143)
    train(repository, lr=2e-4)
    assert workspace.check_scratch(repository).severity is OK
    past = time.time() - 15 * DAY_S
    for path in old.path.iterdir():
        os.utime(path, (past, past))
    line = workspace.check_scratch(repository)
    assert line.severity is WARN and "1 unfinished runs unused for 14 days; `python -m pipeline gc`" in line.text


def test_what_mlflow_lacks_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train(repository)
    name = folder.path.relative_to(repository / ".runs")
    lacks = f"lacks of 1 runs: {name}; `python -m pipeline replay --all`"
    line = workspace.check_mlflow(repository, params())  # it was sent to a store that has gone since
    assert line.severity is WARN and lacks in line.text
    for state, there in (("deleted", False), ("active", True)):
        (repository / "mlflow.db").unlink(missing_ok=True)
        with closing(sqlite3.connect(repository / "mlflow.db")) as connection, connection:
            connection.execute("CREATE TABLE runs (run_uuid TEXT, lifecycle_stage TEXT, artifact_uri TEXT)")
            connection.execute("CREATE TABLE tags (run_uuid TEXT, key TEXT, value TEXT)")
            connection.execute("INSERT INTO runs VALUES ('r', ?, ?)", (state, (repository / "of the run").as_uri()))
            connection.execute("INSERT INTO tags VALUES ('r', 'run.uid', ?)", (read_json(folder.about)["uid"],))
        assert (workspace.check_mlflow(repository, params()).severity is OK) == there
    folder.samples.write_text("{}\n")  # it has samples, and their folder beside the store is gone
    line = workspace.check_mlflow(repository, params())
    assert line.severity is WARN and lacks in line.text
    (repository / "of the run/samples").mkdir(parents=True)
    assert workspace.check_mlflow(repository, params()).severity is OK
    folder.feeder_note.unlink()
    line = workspace.check_mlflow(repository, params())
    assert line.severity is WARN and lacks in line.text
    with hold(folder.feeder_lock, wait=False):  # it is being sent
        assert workspace.check_mlflow(repository, params()).severity is OK
    off = params().model_copy(update={"runtime": params().runtime.model_copy(update={"mlflow": False})})
    line = workspace.check_mlflow(repository, off)
    assert line.severity is OK
    assert line.text.endswith("0 ended runs, sent whole; 1 are not there whole, and runtime.mlflow is false")


def test_a_record_that_ends_before_its_run_did_is_named(repository: Path) -> None:
    folder = train(repository)
    [whole] = doctor.diagnose(repository, repository, "grpo")
    assert whole.state == "finished"
    size = folder.metrics.stat().st_size
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:100])
    [cut] = doctor.diagnose(repository, repository, "grpo")
    assert cut.severity is WARN and cut.state.endswith(f"ends before the run did, 100 of {size} bytes are left")


def test_a_store_that_cannot_be_read_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = repository / "mlflow.db"
    store.write_bytes(b"no database at all" * 100)
    line = workspace.check_mlflow(repository, params())
    assert line.severity is WARN and "cannot be read (file is not a database)" in line.text
    store.unlink()
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("CREATE TABLE runs (run_uuid TEXT)")
    assert workspace.check_mlflow(repository, params()).severity is OK
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    line = workspace.check_mlflow(repository, params())
    assert line.severity is WARN and "http://127.0.0.1:9: no answer" in line.text and "training goes on" in line.text


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, int]]]:
    """A server on this machine whose /health answers with `status["code"]`."""
    status = {"code": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status["code"] if self.path.endswith("/health") else 404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", status
        http.shutdown()


def test_prefect_is_asked_where_it_is_configured(
    repository: Path, server: tuple[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, status = server
    (repository / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:9/api"\n', encoding="utf-8")
    assert workspace.check_prefect(repository) == Line(
        "prefect", OK, "no server at http://127.0.0.1:9/api; `make flows` starts one"
    )
    monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
    assert workspace.check_prefect(repository) == Line("prefect", OK, f"{url}/api answers")
    status["code"] = 500
    line = workspace.check_prefect(repository)
    assert line.severity is WARN and "answers 500" in line.text
    monkeypatch.delenv("PREFECT_API_URL")
    (repository / "prefect.toml").write_text("[server]\n", encoding="utf-8")
    assert workspace.check_prefect(repository).text == "no server is configured"


def test_python_and_libraries_are_compared(repository: Path) -> None:
    assert machine.check_python(repository).severity is OK
    (repository / "requirements.lock").write_text("# all\npydantic==0.1\ntorch==2.13.0\nno-such-thing==1\n", encoding="utf-8")
    line = machine.check_libraries(repository)
    assert line.severity is WARN and "pydantic 2." in line.text and "instead of 0.1, no-such-thing is missing;" in line.text
    assert "torch" not in line.text  # a build of the same version is the same
    text = (repository / "pyproject.toml").read_text(encoding="utf-8").replace(">=3.11,<3.14", ">=3.14")
    (repository / "pyproject.toml").write_text(text, encoding="utf-8")
    assert machine.check_python(repository).severity is PROBLEM


LOCK = """
schema: '2.0'
stages:
  tokenizer: {cmd: x, outs: [{path: data/tokenizer, md5: a.dir, size: 9, nfiles: 2}]}
  grpo: {cmd: x, outs: [{path: checkpoints/grpo.pth, md5: abc, size: 3}]}
  eval: {cmd: x, deps: [{path: checkpoints/grpo.pth, md5: abc, size: 3}], outs: [{path: reports, md5: b.dir}]}
"""


def test_files_are_compared_with_the_lock_file(repository: Path) -> None:
    (repository / "dvc.yaml").write_text("stages:\n  tokenizer: {}\n  grpo: {}\n  eval: {}\n", encoding="utf-8")
    (repository / "dvc.lock").write_text(LOCK, encoding="utf-8")
    for name in ("data/tokenizer", "checkpoints", "reports"):
        (repository / name).mkdir()
    (repository / "checkpoints/grpo.pth").write_bytes(b"abc")
    (repository / "data/tokenizer/tokenizer.json").write_bytes(b"123456789")
    assert workspace.check_lineage(repository, params()) == Line("lineage", OK, "3 stages, the files of all are there")
    (repository / "checkpoints/grpo.pth").write_bytes(b"abcd")
    (repository / "data/tokenizer/tokenizer.json").write_bytes(b"ab")
    (repository / "reports").rmdir()
    stages = "data:\n    foreach: ${data.sets}\n  encode:\n    foreach: [lora]\n  tokenizer: {}"
    (repository / "dvc.yaml").write_text(f"stages:\n  {stages}\n", encoding="utf-8")
    line = workspace.check_lineage(repository, params())
    assert line.severity is WARN and line.text.startswith(
        "never ran: data@agent, data@dpo, data@full_sft, data@lora, data@pretrain and 2 more; "
        "files are missing of eval; files differ from dvc.lock of grpo, tokenizer; `dvc checkout`"
    )


def test_held_out_rewards_count_for_the_run_that_made_them(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = train(repository), train(repository, lr=2e-4)
    (repository / "metrics").mkdir()
    write_json(repository / "metrics/eval.json", {"grpo": {"reward_mean": 1.0}})
    (repository / "dvc.lock").write_text(LOCK, encoding="utf-8")
    monkeypatch.setattr(doctor, "recorded_runs", lambda root, home, stage: [run])
    assert doctor.evaluation_of(run, repository, repository) == {"grpo": {"reward_mean": 1.0}}
    assert doctor.evaluation_of(other, repository, repository) == {}
    (repository / "dvc.lock").write_text(LOCK.replace("md5: abc", "md5: old", 1), encoding="utf-8")
    assert doctor.evaluation_of(run, repository, repository) == {}  # eval is of an earlier checkpoint


def test_gpus_are_told_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(**changes: Any) -> Any:
        return params().runtime.model_copy(update=changes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device is visible" in machine.check_device(runtime()).text
    assert machine.check_device(runtime(device="cuda")).severity is PROBLEM
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (60_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "GPU")
    line = machine.check_device(runtime())
    assert line.severity is OK and line.text.startswith("GPU (60.0 GB of 80.0 GB free), GPU (60.0 GB of 80.0 GB free); driver ")
    assert machine.check_device(runtime(device="cpu")).severity is WARN
    assert machine.check_device(runtime(ranks=3)).severity is PROBLEM


@pytest.mark.parametrize(("less", "severity"), [(0, OK), (1, WARN), (None, PROBLEM)])
def test_the_disk_must_hold_a_rebuild(
    repository: Path, less: int | None, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 saves of three times the weights (ppo has two models) and outputs twice, of the parameters as they are."""
    tree = read_yaml(ROOT / "params.yaml")
    own = parse_params(tree | {"runtime": tree["runtime"] | {"keep_saves": 2}})
    weights = 4 * num_parameters(own.model, own.tokenizer.vocab_size)
    adapters = next(each.output for each in needs(own) if each.stage == "lora")
    needed = 9 * 8 * weights + 9 * adapters + 2 * (7 * weights + adapters)
    free = 18 * weights - 1 if less is None else needed - less
    usage = shutil.disk_usage(repository)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    line = machine.check_disk(repository, repository, own)
    assert line.severity is severity and f"a rebuild of everything may take {needed / 1e6:.1f} MB" in line.text


@pytest.mark.slow
def test_a_store_of_300_runs_is_read_in_time(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(repository, steps=300)
    for number in range(2, 301):
        shutil.copytree(first.path, first.path.with_name(str(number)))
    assert len(all_runs(repository)) == 300
    started = time.process_time()
    command(capsys, monkeypatch)
    assert time.process_time() - started < 10
