"""Where MLflow keeps runs, and its one-time creation. Imports MLflow only inside the functions that talk to it."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.masking import MASK, masked
from pipeline.supervise import hold

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "minimind"
SQLITE = "sqlite:///"


def tracking_uri(root: Path) -> str:
    """`MLFLOW_TRACKING_URI`, or else the SQLite file in the repository root, as an absolute path."""
    return os.environ.get("MLFLOW_TRACKING_URI") or own_store(root)


def with_password(recorded: str) -> str:
    """The address of a store as it is asked, of the one that a run has recorded: passwords are never written.

    Raises:
        PipelineError: it has a password, and `MLFLOW_TRACKING_URI` does not name this store.
    """
    named = os.environ.get("MLFLOW_TRACKING_URI", "")
    if masked(named) == recorded:
        return named
    if MASK in recorded:
        raise PipelineError(f"{recorded}: has a password, which no record keeps; set MLFLOW_TRACKING_URI to this store")
    return recorded


def own_store(root: Path) -> str:
    """The SQLite file in the repository root."""
    return f"{SQLITE}{root.resolve() / 'mlflow.db'}"


def is_server(uri: str) -> bool:
    """Whether a server, not this process, owns the store and its artifacts."""
    return not uri.startswith(("sqlite:", "file:", "/", "."))


def artifact_folder(root: Path) -> Path:
    """Of the artifacts beside a local store."""
    return root.resolve() / "mlartifacts"


def artifact_root(root: Path) -> str:
    """The same as a URI."""
    return artifact_folder(root).as_uri()


def store_lock(root: Path) -> Path:
    """Held by who makes what there must be one of in a store: the experiment, a rebuild's run."""
    return root / ".mlflow.lock"


def limit_waiting() -> None:
    """Makes MLflow's client in this process give up on a server that hangs within seconds; the environment may say otherwise."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def open_store(uri: str, root: Path) -> tuple["MlflowClient", str]:
    """A client and the id of the experiment `minimind`; makes both store and experiment when they are new.

    A local store is opened under a lock: processes that create a SQLite store at once crash each other.

    Raises:
        sqlite3.Error: the store's file cannot be read.
        MlflowException: the store cannot be reached, or another process made the experiment on a server just now.
    """
    if is_server(uri):
        return _open(uri, None)
    with hold(store_lock(root), wait=True):
        if uri.startswith(SQLITE):  # MLflow would try a file that cannot be opened for 100 seconds
            file = Path(uri.removeprefix(SQLITE))
            file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA schema_version")
        return _open(uri, artifact_root(root))


def _open(uri: str, artifacts: str | None) -> tuple["MlflowClient", str]:
    import mlflow

    from pipeline.tracking.views import describe_experiment

    mlflow.set_tracking_uri(uri)  # artifact stores of servers read it from here
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        experiment = client.get_experiment(client.create_experiment(EXPERIMENT, artifact_location=artifacts))
    describe_experiment(client, experiment)
    return client, experiment.experiment_id
