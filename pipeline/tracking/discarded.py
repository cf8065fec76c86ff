"""What an MLflow store beside the repository keeps of runs that were deleted in it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.tracking.leftovers import Leftover, remove_paths
from pipeline.tracking.run_folder import read_json
from pipeline.tracking.store import SQLITE, artifact_folder, open_store, own_store

if TYPE_CHECKING:
    from mlflow.entities import Run

IDS = 200
"""Runs on one command line of `mlflow gc`."""
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def discarded(root: Path, uri: str) -> list[Leftover]:
    """Deleted runs, and artifacts of runs that the repository's own store does not know. A server's is its owner's to clean.

    Args:
        root: the repository.
        uri: of the store, such as `sqlite:////repository/mlflow.db`.

    Raises:
        PipelineError: the store cannot be read.
    """
    if not uri.startswith(SQLITE) or not Path(uri.removeprefix(SQLITE)).exists():
        return []
    from pipeline.tracking.sender import TRACKER_FAULTS  # imports MLflow

    folder = artifact_folder(root)
    # before the runs: a new run is in the store first
    there = [path for path in folder.glob("*") if _RUN_ID.fullmatch(path.name)]
    try:
        known = {run.info.run_id: run for run in _runs(uri, root)}
    except TRACKER_FAULTS as error:
        raise PipelineError(f"{uri}: cannot be read: {str(error).splitlines()[0]}; move it away, or mend it") from None
    deleted = [run_id for run_id, run in known.items() if run.info.lifecycle_stage == "deleted"]
    artifacts = [folder / run_id for run_id in deleted]
    kept = known.keys() | _elsewhere(root, uri)
    orphans = [path for path in there if path.name not in kept] if uri == own_store(root) else []
    return [
        Leftover("deleted MLflow runs", "deleted in MLflow; their artifacts", artifacts, lambda: _purge(uri, deleted, artifacts)),
        Leftover("artifacts without a run", "MLflow knows no such run", orphans, lambda: remove_paths(orphans)),
    ]


def _elsewhere(root: Path, uri: str) -> set[str]:
    """Runs in other stores: one in a file anywhere (MLFLOW_TRACKING_URI) has its artifacts here, too."""
    noted = [read_json(path) for path in (root / ".runs").glob("*/*/*/feeder.json")]
    return {note["run_id"] for note in noted if "run_id" in note and note.get("tracking_uri") != uri}


def _runs(uri: str, root: Path) -> Iterator["Run"]:
    """Of all experiments, in whatever state."""
    from mlflow.entities import ViewType

    client, _ = open_store(uri, root)
    experiments = [experiment.experiment_id for experiment in client.search_experiments(view_type=ViewType.ALL)]
    token = None
    while True:
        page = client.search_runs(experiments, "", ViewType.ALL, 1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _purge(uri: str, run_ids: list[str], artifacts: list[Path]) -> None:
    for start in range(0, len(run_ids), IDS):
        ids = ",".join(run_ids[start : start + IDS])
        command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", uri, "--tracking-uri", uri, "--run-ids", ids]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PipelineError(f"`mlflow gc` failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    remove_paths(path for path in artifacts if path.exists())  # the empty folder that it leaves of each
