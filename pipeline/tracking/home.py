"""Where a workspace keeps what outlives it: run folders, caches and the MLflow store."""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MINIMIND_HOME"


def home(root: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder with `.runs`, `mlflow.db` and `mlartifacts`: `root`, or for an isolated copy what MINIMIND_HOME names.

    Args:
        root: the repository that runs.
        environment: of the process that runs there.
    """
    return Path(environment.get(VARIABLE) or root).resolve()
