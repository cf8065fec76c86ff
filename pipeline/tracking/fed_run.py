"""A run as both sides know it: its folder, and the MLflow run that stands for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.tracking.run_folder import RunFolder, read_json

EVALUATION = "eval"


@dataclass(frozen=True, slots=True)
class FedRun:
    """What is needed to add to an MLflow run.

    Attributes:
        experiment_id: MLflow's, of `client`'s store.
        run: as MLflow had it when asked last.
        about: run.json.
    """

    client: MlflowClient
    experiment_id: str
    run: Run
    folder: RunFolder
    about: dict[str, Any]

    @property
    def id(self) -> str:
        """MLflow's."""
        return str(self.run.info.run_id)

    @property
    def stage(self) -> str:
        return self.folder.stage

    @property
    def uid(self) -> str:
        """The same in every store."""
        return str(self.about["uid"])

    @property
    def workspace(self) -> Path:
        """Where it ran: the repository, or an isolated copy, which may be gone."""
        return Path(self.about.get("workspace") or self.folder.root)

    @property
    def commit(self) -> str | None:
        """That was checked out."""
        return self.about["tags"].get("git.commit")

    @property
    def finished(self) -> bool:
        """Whether it ended well."""
        return read_json(self.folder.exit).get("code") == 0
