"""The data that a run read, as MLflow's dataset inputs: by path and by the digest that DVC knows it by."""

import json

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from pipeline.tracking.description import input_digests
from pipeline.tracking.fed_run import EVALUATION, FedRun

FOLDERS = ("data/prepared/", "data/encoded/", "data/raw/")


def log_datasets(fed: FedRun) -> None:
    """Adds the data sets among a run's inputs which MLflow does not list yet.

    Raises:
        TRACKER_FAULTS: as every call here.
    """
    known = {(given.dataset.name, given.dataset.digest) for given in (fed.run.inputs.dataset_inputs if fed.run.inputs else [])}
    context = "validation" if fed.stage == EVALUATION else "training"
    found = [
        DatasetInput(_dataset(path, digest), [InputTag(MLFLOW_DATASET_CONTEXT, context)])
        for path, digest in input_digests(fed.about["tags"]).items()
        if path.startswith(FOLDERS) and (path, digest) not in known
    ]
    if found:
        fed.client.log_inputs(fed.id, found)


def _dataset(path: str, digest: str) -> Dataset:
    return Dataset(path, digest, source_type="local", source=json.dumps({"uri": path}))
