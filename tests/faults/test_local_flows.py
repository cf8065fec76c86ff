"""`make flows` and its flow runs when servers, workers and neighbours misbehave; the stages wait instead of training."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import pytest
from faults.local_flows import LocalFlows, Waiting, children, gone, wait_for, waiting_stages
from faults.prefect_server import prefect_server
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFlows]:
    """On a machine that counts as having one GPU."""
    folder = tmp_path_factory.mktemp("flows")
    copy = folder / "it's 100% mine #1?"  # a name that addresses, shells and URIs may read as something else
    copy.mkdir()
    waiting_stages(copy, gpus=1)
    made = LocalFlows(copy, folder / "prefect")
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def stages(flows: LocalFlows) -> Waiting:
    return Waiting(flows.root)


def ends(flows: LocalFlows, flow_run: str, timeout_s: float = 120) -> str:
    """The final state of a flow run."""
    wait_for(lambda: flows.state(flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"), "end", timeout_s)
    return flows.state(flow_run)


def newer(flows: LocalFlows, than: str) -> list[dict[str, object]]:
    """Flow runs that were created after this one."""
    created = flows.flow_run(than)["created"]
    return [found for found in flows.api("POST", "/flow_runs/filter", {"limit": 50}) if found["created"] > created]


# Who may start runs

ATTACK = {"job_variables": {"command": "touch taken-over"}, "state": {"type": "SCHEDULED"}}


def test_nobody_without_the_password_gets_an_answer(flows: LocalFlows) -> None:
    """Another local user, a page in the user's browser, and one whose name was made to lead here."""
    deployment = flows.api("GET", "/deployments/name/minimind/lora")["id"]
    target = f"{flows.url}/deployments/{deployment}/create_flow_run"
    page = {"Origin": "http://evil.example"}
    before = len(flows.api("POST", "/flow_runs/filter", {}))
    attacks = [
        httpx.post(target, json=ATTACK),
        httpx.post(target, content=json.dumps(ATTACK), headers={**page, "Content-Type": "text/plain"}),
        httpx.post(target, json=ATTACK, auth=("minimind", "guessed")),
        httpx.post(target, json=ATTACK, headers={"Host": f"evil.example:{flows.port}"}),
        httpx.post(target, json=ATTACK, headers={"Host": f"evil.example:{flows.port}"}, auth=flows.auth),
        httpx.options(target, headers={**page, "Access-Control-Request-Method": "POST"}),
    ]
    assert [answer.status_code for answer in attacks] == [401, 401, 401, 400, 400, 400]
    assert not any("access-control-allow-origin" in answer.headers for answer in attacks)
    with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{flows.port}/api/events/in"):  # would report crashes
        pass
    assert len(flows.api("POST", "/flow_runs/filter", {})) == before
    assert (flows.root / ".env").stat().st_mode & 0o777 == 0o600
    assert flows.auth[1] not in flows.log.read_text() + (flows.root / ".runs/prefect-server.log").read_text()


def test_a_run_cannot_bring_a_command_of_its_own(flows: LocalFlows) -> None:
    """Not even with the password: a run's parameters may be wrong, what is run is the project's."""
    deployment = flows.api("GET", "/deployments/name/minimind/lora")["id"]
    target = f"{flows.url}/deployments/{deployment}/create_flow_run"
    for variables in (ATTACK["job_variables"], {"env": {"PYTHONPATH": "/tmp"}}, {"working_dir": "/tmp"}):
        assert httpx.post(target, json={"job_variables": variables}, auth=flows.auth).status_code == 422
    # What a deployment is given past that check has no place in the job.
    job = flows.api("GET", "/work_pools/minimind")["base_job_template"]["job_configuration"]
    assert job["working_dir"] == str(flows.root) and job["command"].endswith("-m prefect.engine") and "{{" not in str(job)


# Crashes


def crashed_run(flows: LocalFlows, restarts: int, *before: str) -> str:
    """A flow run of ours that went through the states `before` and is said to have crashed."""
    deployment = flows.api("GET", "/deployments/name/minimind/lora")
    parameters = {"timeout_s": 1.5e6, "restarts": restarts}
    content = {
        "parameters": parameters,
        "state": {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}},
    }
    flow_run = str(flows.api("POST", f"/deployments/{deployment['id']}/create_flow_run", content)["id"])
    for state in (*before, "CRASHED"):
        flows.api("POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": state}, "force": True})
    return flow_run


def test_a_crashed_run_starts_again_with_its_own_parameters_a_few_times_and_not_after_a_cancel(flows: LocalFlows) -> None:
    flows.pause(True)
    first = crashed_run(flows, 0, "RUNNING")
    try:
        [second] = wait_for(lambda: newer(flows, first), "a restart", 30)
        assert second["parameters"] == {"stage": "lora", "timeout_s": 1.5e6, "restarts": 1}
        crashed_at, created_at = (
            datetime.fromisoformat(str(at)) for at in (flows.flow_run(first)["end_time"], second["created"])
        )
        print(f"from crash to restart: {(created_at - crashed_at).total_seconds():.1f} s")
        made = [
            crashed_run(flows, 3, "RUNNING"),
            crashed_run(flows, 0, "RUNNING", "CANCELLING"),
            crashed_run(flows, 1, "RUNNING"),
        ]
        # Events are taken in order: when the last one has been started again, the others were looked at.
        wait_for(lambda: newer(flows, made[-1]), "a restart", 30)
        restarted = [found["parameters"] for found in newer(flows, str(second["id"])) if found["id"] not in made]
        assert restarted == [{"stage": "lora", "timeout_s": 1.5e6, "restarts": 2}]
    finally:
        for found in newer(flows, first):
            if found["state_type"] == "SCHEDULED":
                flows.api("POST", f"/flow_runs/{found['id']}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
        flows.pause(False)


# One GPU


def test_a_second_trainer_waits_for_the_gpu_and_says_for_whom(flows: LocalFlows, stages: Waiting) -> None:
    for name in ("pretrain", "lora"):
        stages.renew(name)
    first = flows.run("pretrain")
    wait_for(lambda: stages.has_started("pretrain"), "pretrain", 90)
    second = flows.run("lora")
    holder = f"pretrain of flow run {flows.flow_run(first)['name']} ({first})"
    wait_for(lambda: any(holder in line for line in flows.logs(second)), "the holder in the log", 90)
    time.sleep(8)  # it asks every three seconds
    assert sum("waits for a GPU" in line for line in flows.logs(second)) == 1
    assert not stages.has_started("lora")
    stages.let_go("pretrain")
    wait_for(lambda: stages.has_started("lora"), "lora", 60)
    stages.let_go("lora")
    assert ends(flows, first) == ends(flows, second) == "COMPLETED"


def test_the_gpu_of_a_killed_run_is_free_again_in_time(flows: LocalFlows, stages: Waiting) -> None:
    """Its lease ends after 60 s; on top come the crash being noticed and a start, which a loaded machine draws out."""
    stages.renew("dpo")
    began, flow_run = time.monotonic(), flows.run("dpo")
    wait_for(lambda: stages.has_started("dpo"), "dpo", 240)
    start_s = time.monotonic() - began  # with the slot free, on the machine as it is
    (stages.root / "started-dpo").unlink()
    flow, killed = flows.flow(), time.monotonic()
    assert flow is not None
    flow.kill()
    wait_for(lambda: stages.has_started("dpo"), "another dpo", 150 + 8 * start_s)
    print(
        f"from kill to the trainer of the run that was started again: {time.monotonic() - killed:.0f} s, a start: {start_s:.0f} s"
    )
    stages.let_go("dpo")
    assert ends(flows, str(newer(flows, flow_run)[0]["id"]), 120 + 8 * start_s) == "COMPLETED"


# Output


def test_a_flood_of_output_neither_blocks_nor_fills_the_database(flows: LocalFlows) -> None:
    began = time.monotonic()
    flow_run = flows.run("eval")
    assert ends(flows, flow_run) == "COMPLETED"
    seconds, rows = time.monotonic() - began, len(flows.logs(flow_run))
    print(f"10 MB and 50,000 progress updates: {seconds:.0f} s, {rows} rows of log")
    assert rows < 100
    log = (flows.root / ".runs/eval/output.log").read_text()
    assert "line 099999" in log and "step 49999" in log


# The server goes away


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=["hung", "killed"])
def test_a_server_that_goes_away_changes_nothing_in_the_result(flows: LocalFlows, stages: Waiting, signum: int) -> None:
    stages.renew("pretrain")
    flow_run = flows.run("pretrain")
    wait_for(lambda: stages.has_started("pretrain"), "pretrain", 90)
    server = flows.server()
    assert server is not None
    server.send_signal(signum)
    try:
        stages.let_go("pretrain")
        wait_for(lambda: stages.is_done("pretrain"), "dvc.lock", 60)
    finally:
        if signum == signal.SIGSTOP:
            server.send_signal(signal.SIGCONT)
    wait_for(lambda: answers(flows), "the server again", 120)
    state = ends(flows, flow_run, 240)
    print(f"{signal.Signals(signum).name}: the flow run ended {state}")
    if state == "CRASHED":
        wait_for(lambda: newer(flows, flow_run), "a restart", 30)
        flow_run = str(newer(flows, flow_run)[0]["id"])
        state = ends(flows, flow_run)
    assert state == "COMPLETED"
    (stages.root / "started-pretrain").unlink()
    assert ends(flows, flows.run("pretrain")) == "COMPLETED" and not stages.has_started("pretrain")


def answers(flows: LocalFlows) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", flows.port)) == 0


# `make flows` itself


def test_a_second_make_flows_is_one_line_and_changes_nothing(flows: LocalFlows) -> None:
    said = len(flows.log.read_text())
    assert flows.popen().wait(60) == 0
    lines = [line for line in flows.log.read_text()[said:].splitlines() if "INFO" not in line]  # of the first one's flow runs
    assert len(lines) == 1 and f"runs already in this folder: {flows.root}" in lines[0]
    assert flows.worker() is not None and flows.process.poll() is None


def test_a_server_that_serves_another_folder_is_left_alone(flows: LocalFlows, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    waiting_stages(tmp_path / "copy")
    other = LocalFlows(tmp_path / "copy", tmp_path / "prefect", flows.port)
    assert other.popen().wait(60) == 1
    other.environment["PREFECT_API_AUTH_STRING"] = ":".join(flows.auth)
    assert other.popen().wait(60) == 1
    stranger, known = other.log.read_text().splitlines()
    assert "asks for another password than PREFECT_API_AUTH_STRING" in stranger and "PREFECT_API_URL=" in stranger
    assert f"serves {flows.root}" in known and "PREFECT_API_URL=" in known


def test_a_server_that_is_open_to_everybody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    waiting_stages(tmp_path / "copy")
    other = LocalFlows(tmp_path / "copy", tmp_path / "prefect")
    with prefect_server(tmp_path / "open", other.port):
        assert other.popen().wait(60) == 1
    [line] = other.log.read_text().splitlines()
    assert "asks for no password" in line


def test_another_program_on_the_port_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    waiting_stages(tmp_path / "copy")
    with socket.socket() as program:
        program.bind(("127.0.0.1", 0))
        program.listen()
        other = LocalFlows(tmp_path / "copy", tmp_path / "prefect", program.getsockname()[1])
        assert other.popen().wait(60) == 1
    [line] = other.log.read_text().splitlines()
    assert "another program uses this port" in line


def test_make_flows_that_is_killed_takes_all_with_it_and_starts_again(flows: LocalFlows, stages: Waiting) -> None:
    stages.renew("pretrain")
    flow_run = flows.run("pretrain")
    wait_for(lambda: stages.has_started("pretrain"), "pretrain", 90)
    below = psutil.Process(flows.process.pid).children(recursive=True)
    assert len(below) >= 5  # server, worker, flow, dvc, trainer
    wait_for(lambda: heartbeats(flows, flow_run), "a heartbeat", 30)
    (stages.root / "started-pretrain").unlink()
    os.kill(flows.process.pid, signal.SIGKILL)
    flows.process.wait()
    wait_for(lambda: gone(below), "everything to end", 60)
    flows.start()
    wait_for(lambda: flows.state(flow_run) == "CRASHED", "CRASHED", 180)
    stages.let_go("pretrain")
    assert ends(flows, flows.run("pretrain"), 180) == "COMPLETED" and stages.is_done("pretrain")


def heartbeats(flows: LocalFlows, flow_run: str) -> bool:
    wanted = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{flow_run}"]}}
    return bool(flows.api("POST", "/events/filter", {"filter": wanted})["events"])


def test_a_closed_terminal_ends_everything(flows: LocalFlows) -> None:
    below = [*children(psutil.Process(flows.process.pid)), psutil.Process(flows.process.pid)]
    flows.process.send_signal(signal.SIGHUP)
    flows.process.wait(90)
    assert gone(below[:-1])
    flows.start()
