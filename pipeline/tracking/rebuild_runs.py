"""One MLflow run per rebuild, above the runs of the stages that it executed: when, of which commit, and a table of what ran.

Nobody tells when a rebuild begins or ends. So every stage's feeder finds the parent or makes it, under a lock, and brings its
table up to date when the stage has ended. The parent runs while its process does; the feeder of `eval`, one that sees the process
end, or the first one of the next rebuild closes it. All of it can be done again at any time.
"""

import time
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE, MLFLOW_RUN_TYPE

from pipeline.errors import PipelineError
from pipeline.lineage.declaration import read_again
from pipeline.lineage.headlines import HEADLINES
from pipeline.lineage.records import recorded_runs
from pipeline.supervise import hold
from pipeline.tracking.fed_run import EVALUATION, FedRun
from pipeline.tracking.rebuild import Rebuild
from pipeline.tracking.run_folder import read_json
from pipeline.tracking.store import store_lock

KEY, HOST, PID, STARTED, BEGAN = "rebuild.key", "rebuild.host", "rebuild.pid", "rebuild.started_s", "rebuild.began"
UNFOLDED = "evaluation"  # the type of run that the table shows, and charts, without a click on its parent
OPEN, WELL = "RUNNING", "FINISHED"
MAX_NOTE = 7900  # MLflow keeps 8000 characters of a tag


def enter(fed: FedRun, *, live: bool) -> None:
    """Puts a run below its rebuild, which is made when it is new. A run of no rebuild stays as it is.

    Args:
        live: whether the run's trainer lives: its rebuild is at work then, even if it was closed before.

    Raises:
        TRACKER_FAULTS: as every call here.
    """
    rebuild = Rebuild.of(fed.about.get("rebuild"))
    if rebuild is None:
        return
    with hold(store_lock(fed.folder.root), wait=True):
        _close_abandoned(fed, rebuild)
        parent = _find(fed, rebuild) or _create(fed, rebuild)
        tags = {MLFLOW_PARENT_RUN_ID: parent.info.run_id, MLFLOW_RUN_TYPE: UNFOLDED}
        fed.client.log_batch(fed.id, tags=[RunTag(key, value) for key, value in tags.items()])
        if live and parent.info.status != OPEN:
            fed.client.update_run(parent.info.run_id, status=OPEN)


def leave(fed: FedRun) -> None:
    """Writes the table of a run's rebuild anew, and closes the rebuild when its process or its last stage has ended."""
    rebuild = Rebuild.of(fed.about.get("rebuild"))
    if rebuild is None:
        return
    with hold(store_lock(fed.folder.root), wait=True):
        parent = _find(fed, rebuild)
        if parent is None:
            return
        children = _children(fed.client, fed.experiment_id, parent)
        fed.client.set_tag(parent.info.run_id, MLFLOW_RUN_NOTE, describe(fed, rebuild, children))
        at_work = any(child.info.status == OPEN for child in children)
        if not at_work and (fed.stage == EVALUATION or not rebuild.is_alive):
            _close(fed.client, parent, children)


def _find(fed: FedRun, rebuild: Rebuild) -> Run | None:
    """The oldest: on a server, feeders of two hosts may make one each."""
    found = fed.client.search_runs([fed.experiment_id], f"tags.`{KEY}` = '{rebuild.key}'")
    return min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def _create(fed: FedRun, rebuild: Rebuild) -> Run:
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(rebuild.started_s))
    name = " · ".join(filter(None, ["rebuild", begun, (fed.commit or "")[:7]]))
    tags = {KEY: rebuild.key, HOST: rebuild.host, PID: str(rebuild.pid)}
    tags |= {STARTED: str(rebuild.started_s), BEGAN: str(rebuild.began)}
    tags |= {key: value for key, value in fed.about["tags"].items() if key in ("git.commit", "git.dirty", "dvc.experiment")}
    started_ms = round(rebuild.started_s * 1000)
    return fed.client.create_run(fed.experiment_id, start_time=started_ms, tags=tags, run_name=name)


def _close_abandoned(fed: FedRun, current: Rebuild) -> None:
    """Closes rebuilds of this host whose process is gone: killed, or ended with a stage that is not the last one."""
    query = f"tags.`{HOST}` = '{current.host}' AND attributes.status = '{OPEN}'"
    for parent in fed.client.search_runs([fed.experiment_id], query):
        tags = parent.data.tags
        if not Rebuild(tags[KEY], tags[HOST], int(tags[PID]), float(tags[STARTED]), float(tags.get(BEGAN, 0.0))).is_alive:
            _close(fed.client, parent, _children(fed.client, fed.experiment_id, parent))


def _close(client: MlflowClient, parent: Run, children: Sequence[Run]) -> None:
    """FINISHED when all children are. One that has not ended was killed with its feeder, or its feeder closes this anew."""
    states = {child.info.status for child in children}
    status = WELL if states <= {WELL} else "FAILED" if "FAILED" in states else "KILLED"
    ended_ms = max((child.info.end_time or child.info.start_time for child in children), default=parent.info.start_time)
    client.set_terminated(parent.info.run_id, status, ended_ms)


def _children(client: MlflowClient, experiment_id: str, parent: Run) -> list[Run]:
    """Oldest first."""
    query = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent.info.run_id}'"
    return list(client.search_runs([experiment_id], query, order_by=["attributes.start_time ASC"]))


def describe(fed: FedRun, rebuild: Rebuild, children: Sequence[Run]) -> str:
    """A Markdown table: for each stage of dvc.yaml whether it ran in this rebuild, and the run that made its outputs."""
    newest = {child.data.tags.get("dvc.stage", ""): child for child in children}
    lines = ["| stage | in this rebuild | minutes | key metric | run |", "| --- | --- | --- | --- | --- |"]
    for stage in _stages(fed):
        if run := newest.get(stage):
            result = "ran" if run.info.status == WELL else run.info.status.lower()
        elif run := _maker(fed, stage):
            result = "as it was"
        else:
            result = _untracked(fed, rebuild, stage)
        if result:
            lines.append(f"| {stage} | {result} | {_row(fed, stage, run)} |")
    return "\n".join(lines)[:MAX_NOTE]


def _row(fed: FedRun, stage: str, run: Run | None) -> str:
    if run is None:
        return " | | "
    minutes = f"{(run.info.end_time - run.info.start_time) / 60000:.1f}" if run.info.end_time else ""
    headline = next((key for key in HEADLINES.get(stage, {}) if key in run.data.metrics), None)
    metric = f"`{headline}` {run.data.metrics[headline]:.4g}" if headline else ""
    return f"{minutes} | {metric} | [{run.info.run_name}](#/experiments/{fed.experiment_id}/runs/{run.info.run_id})"


def _stages(fed: FedRun) -> list[str]:
    """In the order of dvc.yaml; `data` and `encode` stand for all their sets. Empty when an isolated copy is gone."""
    file = fed.workspace / "dvc.yaml"
    return list(read_again(file)["stages"]) if file.exists() else []


def _maker(fed: FedRun, stage: str) -> Run | None:
    """The run in this store that made the outputs which dvc.lock has."""
    try:
        folders = recorded_runs(fed.workspace, fed.folder.root, stage)
    except PipelineError:  # params.yaml is being edited, say
        return None
    for folder in folders:
        uid = read_json(folder.about).get("uid")
        if found := fed.client.search_runs([fed.experiment_id], f"tags.`run.uid` = '{uid}'"):
            return found[0]
    return None


def _untracked(fed: FedRun, rebuild: Rebuild, stage: str) -> str:
    """Of a stage without an MLflow run: whether one of its scripts ended in this rebuild; empty where none ever left a word."""
    runs = fed.workspace / ".runs"
    ends = [read_json(path) for pattern in (f"{stage}/exit.json", f"{stage}@*/exit.json") for path in runs.glob(pattern)]
    codes = [end["code"] for end in ends if end.get("time_s", 0.0) >= rebuild.started_s]
    if not codes:
        return "not run" if ends else ""
    return "failed" if any(codes) else "ran"
