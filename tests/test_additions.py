"""Rebuilds, data sets, models, episodes and load in MLflow: what a run's feeder adds, once, wherever it was interrupted."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fed_runs import CALL, COMPLETION, PROMPT, Seen, feed, make_workspace, record_again, train
from mlflow import MlflowClient

from pipeline.digests import digest
from pipeline.lineage.causes import FIRST
from pipeline.lineage.records import recorded_runs
from pipeline.supervise.ancestry import VARIABLE, Ancestor
from pipeline.tracking.episodes import MAX_EPISODES, read_episode
from pipeline.tracking.rebuild import FLOW_RUN, Rebuild
from pipeline.tracking.records import Record, noted_complete
from pipeline.tracking.replay import send_missing

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all: making one takes seconds. Every test has an experiment of its own."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def workspace(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setattr("pipeline.tracking.store.EXPERIMENT", tmp_path.name)
    make_workspace(tmp_path)
    return tmp_path


@pytest.fixture
def rebuild(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for `dvc repro`."""
    with subprocess.Popen(["sleep", "600"]) as process:
        began = Ancestor.of(process.pid)
        current = Rebuild(f"here/{process.pid}", socket.gethostname(), process.pid, time.time(), began.began)
        monkeypatch.setattr(Rebuild, "current", classmethod(lambda cls: current))
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    yield
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        MlflowClient().delete_registered_model("minimind-agent")


# Rebuilds


def test_what_a_rebuild_is() -> None:
    assert Rebuild.of(None) is None
    mine = Ancestor.of(os.getpid())
    rebuild = Rebuild("k", socket.gethostname(), mine.pid, 1.0, mine.began)
    assert Rebuild.of(rebuild.note()) == rebuild and rebuild.is_alive
    assert not Rebuild("k", "elsewhere", mine.pid, 1.0, mine.began).is_alive


def test_the_outermost_dvc_or_the_flow_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: `dvc` below `dvc`, a script below both, and the same below a flow."""
    probe = "from pipeline.tracking.rebuild import Rebuild; r = Rebuild.current(); print(r and (r.key, r.pid))"
    script = tmp_path / "dvc"  # runs its arguments as a child, as DVC does
    script.write_text(
        "import subprocess, sys, os\nprint(os.getpid(), flush=True)\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
    )
    for name in (VARIABLE, FLOW_RUN, "DVC_EXP_NAME"):
        monkeypatch.delenv(name, raising=False)

    def ask(*command: str, **environment: str) -> list[str]:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, check=True
        )
        return done.stdout.splitlines()

    python = sys.executable
    assert ask(python, "-c", probe) == ["None"]
    outer, _, found = ask(python, str(script), python, str(script), python, "-c", probe)
    key, pid = eval(found)
    assert str(pid) == outer and f"/{outer}/" in key
    assert eval(ask(python, str(script), python, "-c", probe, DVC_EXP_NAME="bold-ant")[-1])[0].endswith("/bold-ant")
    mine = Ancestor.of(os.getpid())
    flow = {VARIABLE: f"{mine.pid}:{mine.began},1:1.0", FLOW_RUN: "0a1b"}
    assert eval(ask(python, str(script), python, "-c", probe, **flow)[-1]) == ("0a1b", mine.pid)


def test_a_rebuild_is_a_run_above_its_stages_and_ends_with_eval(workspace: Path, rebuild: "subprocess.Popen[bytes]") -> None:
    agent = train(workspace)
    feed(agent)
    seen = Seen(workspace.name)
    (parent,) = seen.rebuilds()
    assert parent.info.run_name.startswith("rebuild · 20") and parent.info.status == "RUNNING"
    assert seen.run(agent).data.tags["mlflow.parentRunId"] == parent.info.run_id
    ended = train(workspace, "eval")
    feed(ended, agent)
    (parent,) = seen.rebuilds()
    assert parent.info.status == "FINISHED" and parent.info.end_time == seen.run(ended).info.end_time
    table = parent.data.tags["mlflow.note.content"].splitlines()
    run = seen.run(agent)
    assert table[2].startswith("| agent | ran | 0.0 | `tool/success` 0.47 | [agent · cispo lr 1e-4 · s7](#/experiments/")
    assert table[2].endswith(f"/runs/{run.info.run_id}) |") and table[3].startswith("| eval | ran | 0.0 |  | [eval](")
    assert len(table) == 4  # `code` and `data` left no word


def test_stages_that_are_passed_over_link_to_the_run_that_made_them(
    workspace: Path, rebuild: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = train(workspace)
    feed(agent)
    other = Rebuild("later", "here", 1, time.time())
    monkeypatch.setattr(Rebuild, "current", classmethod(lambda cls: other))
    (workspace / ".runs/data@agent").mkdir()
    (workspace / ".runs/data@agent/exit.json").write_text(json.dumps({"code": 0, "time_s": 5.0}))
    (workspace / ".runs/data@dpo").mkdir()
    (workspace / ".runs/data@dpo/exit.json").write_text(json.dumps({"code": 0, "time_s": time.time() + 5}))
    feed(train(workspace, "eval"))
    seen = Seen(workspace.name)
    _, parent = seen.rebuilds()
    table = parent.data.tags["mlflow.note.content"].splitlines()
    assert table[2] == "| data | ran |  | |  |"
    assert table[3].startswith("| agent | as it was | 0.0 |") and seen.run(agent).info.run_id in table[3]


@pytest.mark.parametrize(("fails", "status"), [(False, "FINISHED"), (True, "FAILED")])
def test_a_rebuild_whose_process_is_gone_is_closed_by_the_next(
    workspace: Path, rebuild: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch, fails: bool, status: str
) -> None:
    feed(train(workspace, fails=fails))
    seen = Seen(workspace.name)
    assert [run.info.status for run in seen.rebuilds()] == ["RUNNING"]
    rebuild.kill()
    rebuild.wait()
    mine = Ancestor.of(os.getpid())
    later = Rebuild("later", socket.gethostname(), mine.pid, time.time() + 1, mine.began)
    monkeypatch.setattr(Rebuild, "current", classmethod(lambda cls: later))
    feed(train(workspace, lr=2e-4))
    assert [run.info.status for run in seen.rebuilds()][0] == status


def test_the_feeder_closes_a_rebuild_that_ends_with_its_stage(workspace: Path, rebuild: "subprocess.Popen[bytes]") -> None:
    from pipeline.tracking.feeder import await_rebuild

    folder = train(workspace)
    feed(folder)
    rebuild.kill()
    rebuild.wait()
    await_rebuild(folder)
    assert [run.info.status for run in Seen(workspace.name).rebuilds()] == ["FINISHED"]


# Data, params, models


def test_data_sets_the_params_file_and_the_reason_are_with_the_run(workspace: Path) -> None:
    import mlflow

    folder = train(workspace)
    feed(folder)
    feed(folder)
    run = Seen(workspace.name).run(folder)
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("data/prepared/agent", digest(workspace / "data/prepared/agent"))
    assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "training"}
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/params.yaml")
    assert text == (workspace / "params.yaml").read_text()
    assert run.data.tags["params.sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/why.txt") == run.data.tags["run.why"] + "\n" == f"{FIRST}\n"
    assert Seen(workspace.name).rebuilds() == [] and "mlflow.parentRunId" not in run.data.tags


def test_a_checkpoint_is_a_model_with_the_last_metrics_and_a_version(workspace: Path) -> None:
    folder = train(workspace)
    feed(folder)
    seen = Seen(workspace.name)
    (model,), (version,) = seen.models(), seen.versions()
    md5 = digest(workspace / "checkpoints/agent.pth")
    assert model.name == "minimind-agent" and model.status.name == "READY" and model.source_run_id == seen.run(folder).info.run_id
    assert model.tags["checkpoint.md5"] == md5 and model.tags["checkpoint.path"] == "checkpoints/agent.pth"
    assert model.params == {"lr": "0.0001", "loss": "cispo", "seed": "7"}
    assert sorted((metric.key, metric.step, metric.value) for metric in model.metrics) == [
        ("reward/mean", 47, pytest.approx(0.9403)),
        ("tool/success", 47, 0.47),
    ]
    history = seen.client.get_metric_history(version.run_id, "tool/success")
    assert len(history) == 47  # the run's own points stay as they are
    assert version.tags["checkpoint.md5"] == md5 and version.source == f"models:/{model.model_id}"
    assert [output.step for output in seen.run(folder).outputs.model_outputs] == [47]


def test_what_dvc_has_not_recorded_is_no_model_yet(workspace: Path) -> None:
    folder = train(workspace, recorded=False)
    feed(folder)
    assert not Seen(workspace.name).models()
    train(workspace, lr=3e-4)  # now dvc.lock has the outputs of another recipe
    feed(folder)
    assert not Seen(workspace.name).models()


def test_a_failed_run_makes_no_model(workspace: Path) -> None:
    feed(train(workspace, fails=True))
    assert not Seen(workspace.name).models()


def test_equal_bytes_share_a_version(workspace: Path) -> None:
    feed(train(workspace), train(workspace))
    seen = Seen(workspace.name)
    assert len(seen.models()) == 2 and len(seen.versions()) == 1


def test_a_forced_rerun_that_gives_other_bytes_is_a_version_of_its_own(workspace: Path) -> None:
    first = train(workspace)
    feed(first)
    before = digest(workspace / "checkpoints/agent.pth")
    again = train(workspace, weights="of another dtype", recorded=False)
    feed(again)  # dvc.lock still has what the first one made
    seen = Seen(workspace.name)
    assert [version.tags["checkpoint.md5"] for version in seen.versions()] == [before]
    record_again(workspace)
    feed(again)
    after = digest(workspace / "checkpoints/agent.pth")
    runs = {version.tags["checkpoint.md5"]: version.run_id for version in seen.versions()}
    assert runs == {before: seen.run(first).info.run_id, after: seen.run(again).info.run_id} and before != after
    assert recorded_runs(workspace, workspace, "agent") == [again]
    (workspace / "dvc.lock").unlink()  # what DVC once had stays registered
    feed(first)
    assert len(seen.versions()) == 2


def test_links_lead_to_the_store_that_has_the_run(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own, other = train(workspace), os.environ["MLFLOW_TRACKING_URI"], f"sqlite:///{tmp_path}/other.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)  # put back: MLflow sets it
    list(send_missing([folder], other))
    record = Record(folder)
    assert record.tracking_uri == other and noted_complete(folder) and not noted_complete(folder, own)
    assert MlflowClient(other).get_run(record.mlflow_id).data.tags["run.uid"] == record.about["uid"]


def _best(seen: Seen) -> str:
    return str(seen.client.get_model_version_by_alias("minimind-agent", "best").tags["checkpoint.md5"])


def test_the_best_of_one_panel_has_the_alias(workspace: Path) -> None:
    digests, evaluations = [], []
    for success in (0.5, 0.9, 0.7):
        feed(train(workspace, lr=success))
        digests.append(digest(workspace / "checkpoints/agent.pth"))
        time.sleep(0.01)
        evaluations.append(train(workspace, "eval", lr=success))
        feed(evaluations[-1])
    seen = Seen(workspace.name)
    assert _best(seen) == digests[1]
    assert sorted(version.tags["eval.tool_success"] for version in seen.versions()) == ["0.5", "0.7", "0.9"]
    (workspace / "data/prepared/agent").write_text("other rows")  # other numbers: the old ones do not compare
    feed(train(workspace, lr=0.1))
    assert _best(seen) == digests[1]
    feed(train(workspace, "eval", lr=0.1))
    assert _best(seen) == digest(workspace / "checkpoints/agent.pth")
    feed(evaluations[0])  # an old evaluation again
    assert _best(seen) == digest(workspace / "checkpoints/agent.pth")


def test_the_order_of_a_replay_decides_nothing(workspace: Path) -> None:
    agent = train(workspace)
    ended = train(workspace, "eval", lr=0.25)
    feed(ended, agent)
    seen = Seen(workspace.name)
    assert _best(seen) == digest(workspace / "checkpoints/agent.pth") and seen.versions()[0].tags["eval.tool_success"] == "0.25"


# Episodes


def test_an_episode_is_read_from_its_text() -> None:
    messages, (first, second) = read_episode(PROMPT, COMPLETION)
    assert [message["role"] for message in messages] == ["system", "user"] and messages[1]["content"] == "2*3?"
    assert first.thinking == "I ask." and [(call.name, call.arguments) for call in first.calls] == [
        ("calculate", {"expression": "2*3"})
    ]
    assert first.results == ["6"]
    assert second.answer == "It is 6." and not second.calls and second.thinking is None


@pytest.mark.parametrize("text", ["", "no mark at all", "<|im_start|>", "<|im_start|>assistant\n", COMPLETION, PROMPT, CALL * 50])
def test_any_text_is_an_episode(text: str) -> None:
    for prompt in (text, PROMPT):
        messages, turns = read_episode(prompt, text)
        assert all(set(message) == {"role", "content"} for message in messages) and len(turns) <= 3


def test_episodes_are_traces_of_the_run(workspace: Path) -> None:
    folder = train(workspace)
    feed(folder)
    feed(folder)
    seen = Seen(workspace.name)
    traces = seen.traces()
    assert len(traces) == 16 <= MAX_EPISODES  # of 47 steps every third
    trace = min(traces, key=lambda trace: int(trace.info.tags["step"]))
    assert trace.info.tags["mlflow.traceName"] == "agent · step 1" and trace.info.tags["reward"] == "1.5"
    assert trace.info.trace_metadata["mlflow.sourceRun"] == seen.run(folder).info.run_id
    spans = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    assert [(span.name, span.span_type) for span in spans] == [
        ("agent episode", "AGENT"),
        ("turn 1", "LLM"),
        ("calculate", "TOOL"),
        ("turn 2", "LLM"),
    ]
    assert [span.parent_id for span in spans] == [None, spans[0].span_id, spans[1].span_id, spans[0].span_id]
    assert spans[2].inputs == {"expression": "2*3"} and spans[2].outputs == "6" and spans[0].outputs == "It is 6."


def test_spans_have_the_time_of_the_steps_sampling_or_one_that_their_text_gives(workspace: Path) -> None:
    """Thought and call have 17 + 82 characters, the result 1, the answer 8; 2 more per turn, 1 more per call: 113."""
    folder = train(workspace)
    feed(folder)
    traces = {int(trace.info.tags["step"]): trace for trace in Seen(workspace.name).traces()}
    logged = {line["step"]: line["time_s"] for line in Record(folder).lines()}
    for step, begin_s, seconds, times in (
        (1, logged[1], 0.113, "not measured"),
        (4, logged[4] - 1.0, 0.5, "the step's sampling"),
    ):
        spans = sorted(traces[step].data.spans, key=lambda span: span.start_time_ns)
        assert spans[0].attributes["times"].startswith(times)
        assert traces[step].info.request_time == pytest.approx(begin_s * 1000, abs=1)
        assert traces[step].info.execution_duration == round(seconds * 1000)
        places = [
            ((span.start_time_ns / 1e9 - begin_s) / seconds, (span.end_time_ns / 1e9 - begin_s) / seconds) for span in spans
        ]
        wanted = [(0, 113), (1, 103), (101, 103), (104, 113)]
        assert [pytest.approx((begin / 113, end / 113), abs=1e-4) for begin, end in wanted] == places


# Interruptions


class Interrupting:
    """A client whose call number `at` fails, before or after it has had its effect."""

    def __init__(self, client: Any, calls: list[str], at: int, after: bool) -> None:
        self._client, self._calls, self._at, self._after = client, calls, at, after

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls.append(name)
            now = len(self._calls) == self._at
            if now and not self._after:
                raise OSError("connection reset")
            result = value(*arguments, **options)
            if now:
                raise OSError("connection reset")
            return result

        return call


def _interrupted(patch: pytest.MonkeyPatch, calls: list[str], at: int, *, after: bool) -> None:
    from pipeline.tracking import episodes, sender

    opened, tracing = sender.open_store, episodes.TracingClient

    def open_store(uri: str, root: Path) -> tuple[Any, str]:
        client, experiment_id = opened(uri, root)
        return Interrupting(client, calls, at, after), experiment_id

    patch.setattr(sender, "open_store", open_store)
    patch.setattr(episodes, "TracingClient", lambda uri: Interrupting(tracing(uri), calls, at, after))


@pytest.mark.slow
def test_wherever_the_feeder_is_interrupted_a_replay_leaves_all_once(
    workspace: Path, rebuild: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is fed with a fault at another call, before or after its effect; the same comes of all in the end."""
    monkeypatch.setattr("pipeline.tracking.episodes.MAX_EPISODES", 2)
    seen, at, names = None, 0, []
    while True:
        at += 1
        calls: list[str] = []
        folder = train(workspace, lr=at / 1000)
        with monkeypatch.context() as patch:
            _interrupted(patch, calls, at, after=at % 2 == 0)
            with suppress(Exception):
                feed(folder)
        names += calls[at - 1 : at]
        feed(folder)
        seen = seen or Seen(workspace.name)
        run = seen.run(folder)
        assert run.info.status == "FINISHED" and len(run.inputs.dataset_inputs) == 1 and len(run.outputs.model_outputs) == 1
        if len(calls) < at:  # nothing was interrupted any more
            break
    assert {
        "create_run",
        "log_inputs",
        "create_logged_model",
        "create_model_version",
        "log_outputs",
        "log_spans",
        "start_trace",
    } <= set(names)
    assert len(seen.rebuilds()) == 1 and len(seen.models()) == at and len(seen.versions()) == at and len(seen.traces()) == 2 * at


# Views


def test_the_experiment_has_saved_views_which_stay_as_people_change_them(workspace: Path) -> None:
    from mlflow.utils.validation import MAX_EXPERIMENT_TAG_VAL_LENGTH

    from pipeline.lineage.headlines import HEADLINES

    folder = train(workspace)
    feed(folder)
    seen = Seen(workspace.name)
    tags = seen.client.get_experiment(seen.id).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    views = {key: json.loads(value) for key, value in tags.items() if key.startswith("mlflow.sharedViewState.")}
    assert {view["name"] for view in views.values()} == {"Lineage", "Reinforcement", "Supervised"}
    assert all(len(value) < MAX_EXPERIMENT_TAG_VAL_LENGTH for value in tags.values())
    lineage, *charted = (json.loads(view["state"]) for view in views.values())
    assert {f"metrics.`{next(iter(metrics))}`" for metrics in HEADLINES.values()} <= set(lineage["selectedColumns"])
    for state in charted:
        sections = {section["uuid"] for section in state["compareRunSections"]}
        assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == sections
        assert set(state["selectedColumns"]) <= set(state["columnOrder"])
        assert seen.client.search_runs([seen.id], state["searchFilter"]) is not None  # MLflow understands it
    seen.client.set_experiment_tag(seen.id, "mlflow.sharedViewState.lineage", "mine")
    feed(folder)
    assert seen.client.get_experiment(seen.id).tags["mlflow.sharedViewState.lineage"] == "mine"


@pytest.mark.parametrize(("options", "port"), [([], "5000"), (["--port", "5001"], "5001"), (["-p", "1", "--port=2"], "2")])
def test_the_address_names_the_port_that_mlflow_takes(options: list[str], port: str) -> None:
    from pipeline.tracking.ui import _port

    assert _port(options) == port


# Load


def test_the_load_of_the_machine_goes_through_the_run_folder(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.tracking.system_load import SystemLoad

    monkeypatch.setattr("pipeline.tracking.system_load.EVERY_S", 0.0)
    folder = train(workspace)
    load = SystemLoad(folder, time.time() - 20)
    load.sample()
    feed(folder)
    feed(folder)
    seen = Seen(workspace.name)
    run = seen.run(folder)
    (point,) = seen.client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert point.step == 20 and 0 <= point.value <= 100
    assert {"system/system_memory_usage_percentage", "system/disk_usage_percentage"} <= set(run.data.metrics)
    monkeypatch.setattr("pipeline.tracking.system_load.EVERY_S", 60.0)
    SystemLoad(folder, time.time()).sample()
    assert len(folder.system.read_text().splitlines()) == 1
