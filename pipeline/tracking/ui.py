"""`python -m pipeline.tracking.ui [options of mlflow ui]`: opens the store of this repository in the browser interface."""

import os
import sqlite3
import sys
from itertools import pairwise
from pathlib import Path

from pipeline.masking import masked
from pipeline.terminal import bear_any_locale, escaped, show
from pipeline.tracking.store import artifact_root, is_server, open_store, tracking_uri
from pipeline.tracking.views import page


def main(options: list[str]) -> None:
    """Replaces this process by MLflow's server, or names the server that is already there."""
    bear_any_locale()
    root = Path.cwd()
    uri = tracking_uri(root)
    if is_server(uri):
        show(f"tracking server: {masked(uri)}")
        return
    from mlflow.exceptions import MlflowException

    try:
        _, experiment_id = open_store(uri, root)
    except (MlflowException, sqlite3.Error) as error:
        sys.exit(escaped(masked(f"{uri}: {str(error).partition(chr(10))[0]}")))
    show(f"the runs: http://127.0.0.1:{_port(options)}/{page(experiment_id)}")
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri  # other users may read a command line
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "ui", "--default-artifact-root", artifact_root(root), *options])


def _port(options: list[str]) -> str:
    """As `mlflow ui` will take it."""
    given = [after for option, after in pairwise(options) if option in ("--port", "-p")]
    given += [option.partition("=")[2] for option in options if option.startswith("--port=")]
    return given[-1] if given else "5000"


if __name__ == "__main__":
    main(sys.argv[1:])
