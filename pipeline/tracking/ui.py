"""`python -m pipeline.tracking.ui [options of mlflow ui]`: opens the store of this repository in the browser interface."""

import os
import sys
from pathlib import Path

from pipeline.tracking.store import artifact_root, is_server, open_store, tracking_uri


def main(options: list[str]) -> None:
    """Replaces this process by MLflow's server, or names the server that is already there."""
    root = Path.cwd()
    uri = tracking_uri(root)
    if is_server(uri):
        print(f"tracking server: {uri}")
        return
    open_store(uri, root)
    store = ["--backend-store-uri", uri, "--default-artifact-root", artifact_root(root)]
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "ui", *store, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
