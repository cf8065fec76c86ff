"""Where MLflow keeps runs, and its one-time creation. Imports MLflow only inside the functions that talk to it."""

import os
import re
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pipeline.errors import PipelineError
from pipeline.masking import MASK, masked
from pipeline.supervise import hold

if TYPE_CHECKING:
    from mlflow import MlflowClient, MlflowException

EXPERIMENT = "minimind"
SQLITE = "sqlite:///"
_SQLITE_URI = re.compile(r"sqlite(\+\w+)?:///([^?]*)")
_REVISION = re.compile(r"out-of-date database schema \(found version (\w+)")
SAMPLES = "samples"
"""The folder of a run's artifacts that holds the tables of its samples."""


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
    return sqlite_uri(root.resolve() / "mlflow.db")


def sqlite_uri(file: Path) -> str:
    """The address of a SQLite file: the one place where a path becomes one.

    SQLAlchemy takes what stands behind a `?` for options, and decodes the rest. MLflow makes the folder of an address that begins
    with `sqlite:///` without decoding it, which would be a sibling: with its driver named it does not.
    """
    text = str(file)
    quoted = text.replace("%", "%25").replace("?", "%3F")
    return f"{SQLITE}{text}" if quoted == text else f"sqlite+pysqlite:///{quoted}"


def sqlite_file(uri: str) -> Path | None:
    """The file that the address of a store means; None for another kind of store."""
    found = _SQLITE_URI.match(uri)
    return Path(unquote(found[2])) if found else None


def is_server(uri: str) -> bool:
    """Whether a server owns the store and its artifacts, and shows them; a database or a folder is opened by this process."""
    return uri.startswith(("http://", "https://"))


def artifact_folder(root: Path) -> Path:
    """Of the artifacts beside a local store."""
    return root.resolve() / "mlartifacts"


def artifact_root(root: Path) -> str:
    """The same as a URI."""
    return artifact_folder(root).as_uri()


class MovedStoreError(PipelineError, ValueError):
    """The store beside a copied or moved folder names the artifacts of the old one: what is written would go there."""


def moved_from(root: Path) -> Path | None:
    """The folder in which the store of `root` has its artifacts, if that is another one: `root` is a copy of it, or was moved."""
    file = root.resolve() / "mlflow.db"
    if not file.exists():
        return None
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        query = "SELECT artifact_location FROM experiments WHERE name = ?"
        for (location,) in connection.execute(query, (EXPERIMENT,)):
            address = urlsplit(location or "")
            if address.scheme == "file" and location != artifact_root(root):
                return Path(unquote(address.path)).parent
    return None


def moved(root: Path, old: Path) -> str:
    """What to do about it, in a line."""
    return (
        f"{root / 'mlflow.db'}: is of {old}, and artifacts would be written there; this folder was copied or moved: "
        "`python -m pipeline relocate` makes the store its own, then `python -m pipeline replay --all` sends what it missed"
    )


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
        MovedStoreError: this folder was copied or moved, and the store still names the old one.
        MlflowException: the store cannot be reached, or another process made the experiment on a server just now.
    """
    if is_server(uri):
        return _open(uri, None)
    with hold(store_lock(root), wait=True):
        if (file := sqlite_file(uri)) is not None:  # MLflow would try a file that cannot be opened for 100 seconds
            file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(file)) as connection:
                connection.execute("PRAGMA schema_version")
        if uri == own_store(root) and (old := moved_from(root)) is not None:
            raise MovedStoreError(moved(root, old))
        return _open(uri, artifact_root(root))


def open_existing(uri: str, root: Path) -> tuple["MlflowClient", str]:
    """As `open_store`, of a store that is there.

    Raises:
        PipelineError: it is a file, and there is none.
    """
    if (file := sqlite_file(uri)) is not None and not file.exists():
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
