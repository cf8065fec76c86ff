"""Where a workspace keeps what outlives it: run folders, caches and the MLflow store."""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MINIMIND_HOME"
_TEMPORARY = (".dvc", "tmp", "exps")
"""Below a workspace, where `dvc exp run --temp` and DVC's queue make their copies of it, and delete them."""


def home(root: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder with `.runs`, `mlflow.db` and `mlartifacts`: `root`; for an isolated copy the workspace that it is of.

    Of its own copies MINIMIND_HOME says which that is, of DVC's the place.

    Args:
        root: the repository that runs.
        environment: of the process that runs there.
    """
    return _original(Path(environment.get(VARIABLE) or root).resolve())


def _original(root: Path) -> Path:
    for folder in root.parents:
        if folder.parts[-len(_TEMPORARY) :] == _TEMPORARY:
            return folder.parents[len(_TEMPORARY) - 1]
    return root
