"""Where MLflow keeps runs, and its one-time creation. Imports MLflow only inside the functions that talk to it."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.masking import MASK, masked
from pipeline.supervise import hold

if TYPE_CHECKING:
    from mlflow import MlflowClient, MlflowException

EXPERIMENT = "minimind"
SQLITE = "sqlite:///"
_REVISION = re.compile(r"out-of-date database schema \(found version (\w+)")


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


def open_existing(uri: str, root: Path) -> tuple["MlflowClient", str]:
    """As `open_store`, of a store that is there.

    Raises:
        PipelineError: it is a file, and there is none.
    """
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        raise PipelineError("no such file")
    return open_store(uri, root)


def _open(uri: str, artifacts: str | None) -> tuple["MlflowClient", str]:
    import mlflow

    from pipeline.tracking.views import describe_experiment

    mlflow.set_tracking_uri(uri)  # artifact stores of servers read it from here
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
    except mlflow.MlflowException as error:
        raise _explained(error, uri) from None
    if experiment is None:
        experiment = client.get_experiment(client.create_experiment(EXPERIMENT, artifact_location=artifacts))
    describe_experiment(client, experiment)
    return client, experiment.experiment_id


def _explained(error: "MlflowException", uri: str) -> "MlflowException":
    """The remedy for a store of another version of MLflow: its own advice, an upgrade, cannot mend one that is newer."""
    from mlflow import MlflowException, __version__
    from mlflow.store import db_migrations

    found = _REVISION.search(str(error))
    if found is None:
        return error
    if any((Path(db_migrations.__path__[0]) / "versions").glob(f"{found[1]}_*.py")):
        advice = f"made by an older MLflow; copy it, then `mlflow db upgrade {masked(uri)}` brings it up to date"
    else:
        advice = "made by a newer MLflow; use that version, or another store (MLFLOW_TRACKING_URI)"
    return MlflowException(f"{advice} (here: {__version__})")
