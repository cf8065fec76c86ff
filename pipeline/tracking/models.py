"""A finished run's checkpoint in MLflow: as the model that the run logged, and as a version of the stage's registered model.

Weights stay where they are; MLflow holds their path and their digest. A registered version stands for bytes: runs that come out
equal share it. `eval` measures models by their bytes too, and the best version of each stage has the alias `best`.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from pipeline.lineage.declaration import read_again, read_lock
from pipeline.lineage.headlines import EVAL_HEADLINES, JUDGED_BY
from pipeline.lineage.history import LOCK, experiment_commit
from pipeline.lineage.runs import recorded
from pipeline.lineage.yardstick import yardstick
from pipeline.tracking.description import flatten, input_digests
from pipeline.tracking.fed_run import FedRun
from pipeline.tracking.names import tag_key
from pipeline.tracking.rebuild import Rebuild
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import read_json, write_json

MD5, PATH = "checkpoint.md5", "checkpoint.path"
PANEL, AT = "eval.panel", "eval.started_ms"
BEST = "best"
SHOWN_PARAMS = ("lr", "loss", "seed", "epochs", "batch_size")
LEFT_OUT = ("system/", "time/", "memory/")  # metrics that say nothing of the model
WAIT_S, POLL_S = 15.0, 0.25


def log_model(fed: FedRun) -> None:
    """For a finished run that made a checkpoint which DVC has recorded: its logged model, registered and ranked.

    Raises:
        TRACKER_FAULTS: not all is done; it can be done again.
    """
    made = _checkpoint(fed) if fed.stage in JUDGED_BY else None
    if made is None:
        return
    model_id = _logged_model(fed, made)
    version = _version(fed.client, made["name"], made["md5"]) or _register(fed, made, model_id)
    for run in _evaluations(fed, made):
        _judge(fed.client, fed.stage, version, run)
    _move_best(fed.client, fed.stage, made["name"])


def judge_models(fed: FedRun) -> None:
    """For a finished run of `eval`: writes what it measured to the versions that it read, and moves the aliases.

    Raises:
        TRACKER_FAULTS: not all is done; it can be done again.
    """
    run = fed.client.get_run(fed.id)
    for path, name in _artifacts(fed).items():
        stage, read = _stage(path), run.data.tags.get(tag_key(f"dvc.{path}"))
        if stage in JUDGED_BY and read and (version := _version(fed.client, name, read)):
            _judge(fed.client, stage, version, run)
            _move_best(fed.client, stage, name)


def _checkpoint(fed: FedRun) -> dict[str, str] | None:
    """Registered name, path and digest of what a run made, once DVC has taken these bytes over; what it once had is noted.

    DVC writes dvc.lock after the trainer's end. While the rebuild lives that is waited for.
    """
    record = Record(fed.folder)
    made = next(({"name": name, "path": path} for path, name in _artifacts(fed).items() if path in record.outputs), None)
    if made is None:
        return None
    made["md5"] = record.outputs[made["path"]]
    if read_json(fed.folder.checkpoint) == made:
        return made
    rebuild = Rebuild.of(fed.about.get("rebuild"))
    end, known = time.monotonic() + WAIT_S, None
    while True:
        at_work = rebuild is not None and rebuild.is_alive and time.monotonic() < end
        if (state := _state_of_locks(fed)) != known and _is_recorded(fed, record):
            with suppress(OSError):  # on a full disk it is looked up again
                write_json(fed.folder.checkpoint, made)
            return made
        if not at_work:
            return None
        known = state
        time.sleep(POLL_S)


def _state_of_locks(fed: FedRun) -> str:
    """Changes when dvc.lock or the commit of the run's experiment does: reading lock files takes a while."""
    try:
        status = (fed.workspace / LOCK).stat()
        written = f"{status.st_mtime_ns} {status.st_size}"
    except FileNotFoundError:  # an isolated copy that is gone
        written = ""
    experiment = fed.about["tags"].get("dvc.experiment")
    return f"{written} {experiment_commit(fed.folder.root, experiment) if experiment else ''}"


def _is_recorded(fed: FedRun, record: Record) -> bool:
    """Whether DVC has taken over what the run made."""
    locked = read_lock(fed.workspace / LOCK).get(fed.stage)
    if locked is not None and locked.outs == record.outputs:
        return True
    return recorded(fed.folder.root, fed.stage, fed.about, record.outputs) is not None


def _artifacts(fed: FedRun) -> dict[str, str]:
    """Path -> name of the models in dvc.yaml: where an isolated copy is gone, in that of the workspace."""
    file = next((path for root in (fed.workspace, fed.folder.root) if (path := root / "dvc.yaml").exists()), None)
    found = read_again(file).get("artifacts", {}) if file else {}
    return {body["path"]: name for name, body in found.items()}


def _stage(path: str) -> str:
    """Of a checkpoint: `checkpoints/<stage>.pth`."""
    return path.rpartition("/")[2].partition(".")[0]


def _logged_model(fed: FedRun, made: Mapping[str, str]) -> str:
    """Id of the run's model in MLflow, with the last value of every metric where it is finite; made when it is new."""
    run = fed.client.get_run(fed.id)
    outputs = run.outputs.model_outputs if run.outputs else []
    found = fed.client.search_logged_models([fed.experiment_id], f"source_run_id = '{fed.id}'")
    own = fed.about["params"].get(fed.stage, {})
    model = (
        found[0]
        if found
        else fed.client.create_logged_model(
            fed.experiment_id,
            made["name"],
            fed.id,
            tags={**_tags(fed, made), MLFLOW_MODEL_IS_EXTERNAL: "true"},
            params=flatten({name: own[name] for name in SHOWN_PARAMS if name in own}),
            model_type="checkpoint",
        )
    )
    logged = [metric for metric in run.to_proto().data.metrics if not metric.key.startswith(LEFT_OUT)]
    last = [metric for metric in logged if math.isfinite(metric.value)]  # a logged model holds no NaN
    # The same points as the run's: MLflow keeps them once there, and adds them to the model.
    points = [Metric(m.key, m.value, m.timestamp, m.step, model_id=model.model_id, run_id=fed.id) for m in last]
    if points:
        fed.client.log_batch(fed.id, metrics=points)
    fed.client.finalize_logged_model(model.model_id, "READY")
    if all(output.model_id != model.model_id for output in outputs):
        step = max((metric.step for metric in last), default=0)
        fed.client.log_outputs(fed.id, [LoggedModelOutput(model.model_id, step)])
    return str(model.model_id)


def _tags(fed: FedRun, made: Mapping[str, str]) -> dict[str, str]:
    tags = {PATH: made["path"], MD5: made["md5"], "dvc.stage": fed.stage}
    return tags | {key: value for key, value in fed.about["tags"].items() if key in ("git.commit", "dvc.experiment")}


def _version(client: MlflowClient, name: str, md5: str) -> ModelVersion | None:
    """The registered version with these bytes."""
    return next((version for version in _versions(client, name) if version.tags.get(MD5) == md5), None)


def _versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Oldest first."""
    return sorted(client.search_model_versions(f"name = '{name}'", 1000), key=lambda version: int(version.version))


def _register(fed: FedRun, made: Mapping[str, str], model_id: str) -> ModelVersion:
    try:
        fed.client.create_registered_model(made["name"], description=f"Checkpoints of stage {fed.stage}: {made['path']}")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source, tags = f"models:/{model_id}", _tags(fed, made)
    return fed.client.create_model_version(
        made["name"], source, fed.id, tags=tags, description=fed.about["name"], model_id=model_id
    )


def _evaluations(fed: FedRun, made: Mapping[str, str]) -> list[Run]:
    """Finished runs of `eval` that read these bytes, oldest first; there are some when a run is replayed late."""
    read = tag_key(f"dvc.{made['path']}")
    query = f"tags.`dvc.stage` = 'eval' AND tags.`{read}` = '{made['md5']}' AND attributes.status = 'FINISHED'"
    return list(fed.client.search_runs([fed.experiment_id], query, order_by=["attributes.start_time ASC"]))


def _judge(client: MlflowClient, stage: str, version: ModelVersion, run: Run) -> None:
    """Tags a version with the headline metrics that a run of `eval` measured, and with what it measured them on."""
    if int(version.tags.get(AT, 0)) > run.info.start_time:  # the newest counts, whatever is replayed last
        return
    tags = {f"eval.{key}": f"{value:.6g}" for key, value in _measured(run, stage)}
    tags |= {PANEL: _panel(run, stage), AT: str(run.info.start_time), "eval.run": run.info.run_id}
    for key, value in tags.items():
        if version.tags.get(key) != value:
            client.set_model_version_tag(version.name, version.version, key, value)


def _measured(run: Run, stage: str) -> Iterator[tuple[str, float]]:
    for key in EVAL_HEADLINES:
        if math.isfinite(value := run.data.metrics.get(f"{stage}/{key}", math.nan)):
            yield key, value


def _panel(run: Run, stage: str) -> str:
    """What decides whether numbers of two evaluations compare: rows, settings, code, and the reward model where it judges."""
    inputs = input_digests(run.data.tags)
    measured_with = yardstick("eval", JUDGED_BY[stage], run.data.params, inputs)
    return hashlib.sha256(json.dumps(measured_with, sort_keys=True).encode()).hexdigest()[:12]


def _move_best(client: MlflowClient, stage: str, name: str) -> None:
    """Gives the alias to the best of the versions that were measured on the panel of the newest measurement."""
    key = f"eval.{JUDGED_BY[stage]}"
    measured = [version for version in _versions(client, name) if math.isfinite(float(version.tags.get(key, math.nan)))]
    if not measured:
        return
    panel = max(measured, key=lambda version: int(version.tags[AT])).tags[PANEL]
    sign = 1 if EVAL_HEADLINES[JUDGED_BY[stage]] == "max" else -1
    best = max((version for version in measured if version.tags[PANEL] == panel), key=lambda v: sign * float(v.tags[key]))
    if BEST not in best.aliases:
        client.set_registered_model_alias(name, BEST, best.version)
