"""The flow against a real, temporary Prefect server and a small lineage: order, siblings, retries, failures."""

import asyncio
import json
import sys
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import dvc_here
import pytest
from dotenv import dotenv_values
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.sorting import FlowRunSort, TaskRunSort
from prefect.exceptions import ParameterTypeError, PrefectHTTPStatusError
from prefect.server.api.clients import OrchestrationClient
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING, PREFECT_SERVER_CORS_ALLOWED_ORIGINS, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from starlette.testclient import TestClient

from flows import minimind as flows
from flows import rebuild
from flows.access import VARIABLE, ensure_password
from flows.automations import SILENT_S, automations, ensure_automations
from flows.faults import FlowFault
from flows.gpus import TAG, TRAINING, set_limit
from flows.local import job_template, usable_gpus
from flows.minimind import minimind, run_name
from flows.server import guarded_app
from flows.sweep import run_name as sweep_name
from pipeline.lineage.plan import Planned, Verdict, read_plan
from pipeline.params.schema import Runtime
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
STAGES = """
stages:
  code:
    cmd: cat script > code.txt
    deps: [script]
    outs: [code.txt]
  base:
    cmd: echo base >> ran && cat code.txt > base.txt
    deps: [code.txt]
    outs: [base.txt]
  left:
    cmd: echo left >> ran && exec python left.py
    deps: [base.txt, left.py]
    outs: [left.txt]
  right:
    cmd: echo right >> ran && touch right.started && cat base.txt > right.txt
    deps: [base.txt]
    outs: [right.txt]
  eval:
    cmd: echo eval >> ran && cat left.txt right.txt > eval.txt
    deps: [left.txt, right.txt]
    outs: [eval.txt]
"""
COPY = "from pathlib import Path\nPath('left.txt').write_text(Path('base.txt').read_text())\n"
# Siblings that run one after the other would wait for ever.
AWAITS_RIGHT = "import time\nfrom pathlib import Path\nwhile not Path('right.started').exists():\n    time.sleep(0.05)\n" + COPY
FAULTY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pipeline.errors import DataError
from pipeline.supervise import exit_on_error
with exit_on_error('left'):
    raise DataError('row 3: no such role')
"""
KILLED_ONCE = (
    "import os, signal\nfrom pathlib import Path\n"
    "if not Path('second').exists():\n    Path('second').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n" + COPY
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    dvc_here.init(tmp_path)
    (tmp_path / "dvc.yaml").write_text(STAGES.replace("exec python", f"exec {sys.executable}"))
    (tmp_path / "script").write_text("1")
    (tmp_path / "left.py").write_text(COPY)
    monkeypatch.setattr(flows, "ROOT", tmp_path)
    monkeypatch.setattr(rebuild, "run_stage", rebuild.run_stage.with_options(retry_delay_seconds=0.1))
    return tmp_path


def ran(project: Path) -> list[str]:
    return (project / "ran").read_text().split()


def test_all_stages_run_once_and_siblings_side_by_side(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.os, "cpu_count", lambda: 2)
    (project / "left.py").write_text(AWAITS_RIGHT)
    minimind("all")
    order = ran(project)
    assert order[0] == "base" and sorted(order[1:3]) == ["left", "right"] and order[3:] == ["eval"]
    minimind("all")
    assert ran(project) == order


def test_a_target_takes_what_it_needs_and_no_more(project: Path) -> None:
    minimind("right")
    assert ran(project) == ["base", "right"]
    with get_client(sync_client=True) as client:
        names = {found.name for found in client.read_flow_runs(limit=1, sort=FlowRunSort.START_TIME_DESC)}
        tasks = {found.name for found in client.read_task_runs(limit=2, sort=TaskRunSort.EXPECTED_START_TIME_DESC)}
    assert names == {"right"} and tasks <= {"code", "base", "right"}


@pytest.mark.slow
def test_what_the_run_cache_has_is_restored_and_its_readers_run(project: Path) -> None:
    """Edits and undone edits in any order: a flow that ends well leaves what the files of that moment give."""
    for script, copies in [("1", 1), ("2", 1), ("1", 1), ("1", 2), ("2", 1)]:
        (project / "script").write_text(script)
        (project / "left.py").write_text(COPY + f"with open('left.txt', 'a') as file: file.write('x' * {copies})\n")
        minimind("left")
        assert (project / "left.txt").read_text() == script + "x" * copies
        assert {planned.verdict for planned in read_plan(project, ["left"])} == {Verdict.UP_TO_DATE}
    assert sorted(ran(project)) == ["base"] * 2 + ["left"] * 3  # all else came from the cache


@pytest.mark.parametrize("verdict", Verdict)
def test_a_flow_ends_well_only_when_the_last_plan_finds_all_up_to_date(
    project: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    """Whatever may stand in a plan, and whatever becomes of it."""
    tried: list[str] = []
    monkeypatch.setattr(rebuild, "read_plan", lambda *_, **__: [Planned("base", verdict, ["a cause"], [])])
    monkeypatch.setattr(rebuild, "bring_up", lambda _, stage, **__: tried.append(stage) or rebuild.Outcome(0, "ran"))
    if verdict is Verdict.UP_TO_DATE:
        minimind("base")
        assert tried == []
        return
    with pytest.raises(FlowFault, match=rf"^base: is not up to date \({verdict}: a cause\)$"):
        minimind("base")
    assert tried == ["base"]


def test_runs_are_named_after_stage_and_overrides() -> None:
    assert run_name({"stage": "grpo", "overrides": None}) == "grpo"
    assert run_name({"stage": "grpo", "overrides": ["grpo.lr=1e-4", "dpo.beta=0.3"]}) == "grpo · grpo.lr=1e-4 dpo.beta=0.3"
    assert sweep_name({"stage": "eval", "grid": {"grpo.lr": [1], "dpo.beta": [2]}}) == "sweep · eval · grpo.lr × dpo.beta"
    assert len(run_name({"stage": "all", "overrides": ["tools.extra=" + "x" * 500]})) == 120


def test_an_edit_during_the_flow_fails_it_with_the_stage_that_is_out_of_date_again(project: Path) -> None:
    edits = "from pathlib import Path\nPath('script').write_text('2')\n"
    (project / "left.py").write_text(edits + COPY)
    with pytest.raises(FlowFault, match=r"^code: is not up to date \(runs: script modified\); .*eval: is not up to date"):
        minimind("all")
    minimind("all")
    assert (project / "eval.txt").read_text() == "22"


def test_a_fault_in_the_data_is_not_tried_again_and_spares_the_siblings(project: Path) -> None:
    (project / "left.py").write_text(FAULTY)
    with pytest.raises(RuntimeError, match="left: row 3: no such role"):
        minimind("all")
    assert sorted(ran(project)) == ["base", "left", "right"]  # eval needs left


def test_a_killed_stage_is_tried_again(project: Path) -> None:
    (project / "left.py").write_text(KILLED_ONCE)
    minimind("eval")
    assert ran(project).count("left") == 2 and ran(project)[-1] == "eval"


def test_a_time_limit_fails_the_stage_without_another_attempt(project: Path) -> None:
    minimind("base")
    (project / "left.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RuntimeError, match=r"left: timeout_s=5 is over: killed by SIGTERM \(exit code 124\)"):
        minimind("left", timeout_s=5)
    assert len(list((project / ".runs/left").glob("output.log"))) == 1
    assert (project / ".runs/left/output.log").read_text().count("failed to reproduce 'left'") <= 1


@pytest.mark.parametrize("limit", [0.0, -5.0, float("nan")])
def test_a_time_limit_that_no_attempt_could_keep_is_refused(project: Path, limit: float) -> None:
    with pytest.raises(ParameterTypeError, match="timeout_s.*greater than 0"):
        minimind("base", timeout_s=limit)
    assert not (project / "ran").exists()


def test_more_ranks_than_gpus_are_refused(project: Path) -> None:
    params = read_yaml(ROOT / "params.yaml")
    params["runtime"]["ranks"] = 3
    (project / "params.yaml").write_text(json.dumps(params))
    set_limit(2)
    try:
        with pytest.raises(
            rebuild.StageFailed, match="runtime.ranks=3: lora needs a GPU per rank, and runtime.gpus was 2"
        ) as error:
            rebuild.run_stage(Planned("lora", Verdict.RUNS, [], []), rebuild.Workspace(project, 1), 1)
        assert not error.value.retry
    finally:
        set_limit(None)


def test_the_limit_follows_runtime_gpus() -> None:
    runtime = Runtime.model_validate(read_yaml(ROOT / "params.yaml")["runtime"])
    assert usable_gpus(runtime.model_copy(update={"gpus": 3, "device": "cpu"})) == 3
    assert usable_gpus(runtime.model_copy(update={"device": "cpu"})) is None
    with get_client(sync_client=True) as client:
        for gpus in (1, 3):
            set_limit(gpus)
            assert client.read_concurrency_limit_by_tag(TAG).concurrency_limit == gpus
        set_limit(None)
        set_limit(None)
        assert TAG not in {limit.tag for limit in client.read_concurrency_limits(10, 0)}


def test_stages_with_a_model_take_a_gpu() -> None:
    stages = set(read_yaml(ROOT / "dvc.yaml")["stages"])
    assert stages - TRAINING == {"code", "data", "tokenizer", "encode", "eval", "gate"} and TRAINING < stages


def test_automations_are_made_once() -> None:
    ensure_automations()
    ensure_automations()
    with get_client(sync_client=True) as client:
        assert sorted(found.name for found in client.read_automations()) == sorted(made.name for made in automations())
    settings = tomllib.loads((ROOT / "prefect.toml").read_text())
    assert settings["flows"]["heartbeat_frequency"] * 3 == SILENT_S


def test_the_password_is_made_once_and_stands_beside_what_a_user_has_written(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MLFLOW_TRACKING_URI=http://mlflow:5000")
    ensure_password(tmp_path)
    text = (tmp_path / ".env").read_text()
    ensure_password(tmp_path)
    assert (tmp_path / ".env").read_text() == text and (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    values = dotenv_values(tmp_path / ".env")
    assert values.keys() == {"MLFLOW_TRACKING_URI", VARIABLE} and values["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    user, _, password = str(values[VARIABLE]).partition(":")
    assert user == "minimind" and len(password) >= 40


def test_strangers_get_no_answer() -> None:
    """As in test_local_flows.py, without a process: no password, another origin, another Host."""
    origins = tomllib.loads((ROOT / "prefect.toml").read_text())["server"]["api"]["cors_allowed_origins"]
    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: "minimind:x", PREFECT_SERVER_CORS_ALLOWED_ORIGINS: origins}):
        client = TestClient(guarded_app(), base_url="http://127.0.0.1:4200")
    known, preflight = {"Authorization": f"Basic {b64encode(b'minimind:x').decode()}"}, {"Access-Control-Request-Method": "POST"}
    path = "/api/admin/settings"
    assert client.get(path, headers=known).status_code == 200
    assert client.get(path).status_code == 401
    assert client.get(path, headers={**known, "Host": "evil.example:4200"}).status_code == 400
    assert client.options(path, headers={**preflight, "Origin": "http://evil.example"}).status_code == 400


def test_the_guarded_server_answers_its_own_services() -> None:
    """They call the app without a network, under a name of their own: without an answer no crashed run starts again."""

    async def ask() -> int:
        async with OrchestrationClient() as client:
            return (await client.read_flow_run_raw(uuid4())).status_code

    guarded_app()
    assert asyncio.run(ask()) == 404  # known to nobody, but looked for


def test_a_run_cannot_bring_a_command_of_its_own() -> None:
    with get_client(sync_client=True) as client:
        pool = WorkPoolCreate(name="fixed", type="process", base_job_template=job_template())
        client.create_work_pool(pool, overwrite=True)
        flow = client.create_flow_from_name("minimind")
        deployment = client.create_deployment(flow, "fixed", work_pool_name="fixed", entrypoint="flows/minimind.py:minimind")
        assert client.create_flow_run_from_deployment(deployment).name
        for name, value in (("command", "touch taken-over"), ("env", {"PYTHONPATH": "/tmp"}), ("working_dir", "/tmp")):
            with pytest.raises(PrefectHTTPStatusError, match="422"):
                client.create_flow_run_from_deployment(deployment, job_variables={name: value})


def test_every_stage_has_a_deployment() -> None:
    declared = read_yaml(ROOT / "prefect.yaml")["deployments"]
    sweep = next(each for each in declared if each["name"] == "sweep")
    declared.remove(sweep)
    assert sweep["entrypoint"] == "flows/sweep.py:sweep" and "schedules" not in sweep
    stages = set(read_yaml(ROOT / "dvc.yaml")["stages"]) - {"code"}  # every flow run begins with code
    assert {(each["name"], each["parameters"]["stage"]) for each in declared} == {(name, name) for name in [*stages, "all"]}
    assert {each["entrypoint"] for each in declared} == {"flows/minimind.py:minimind"}
    assert [schedule["active"] for each in declared for schedule in each.get("schedules", [])] == [False]
