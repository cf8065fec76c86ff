"""What an MLflow store beside the repository keeps of runs that were deleted in it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.tracking.leftovers import Leftover, remove_paths
from pipeline.tracking.store import artifact_folder, open_store, own_store

if TYPE_CHECKING:
    from mlflow.entities import Run

IDS = 200
"""Runs on one command line of `mlflow gc`."""
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def discarded(root: Path, uri: str) -> list[Leftover]:
    """Runs of this workspace that were deleted in its own store. Other stores are their owners' to clean.

    Artifacts of which the store knows no run are named alone: they may be another store's, which is lost or away, or a clone's.

    Args:
        root: the repository.
        uri: of the store, such as `sqlite:////repository/mlflow.db`.

    Raises:
        PipelineError: the store cannot be read.
    """
    if uri != own_store(root) or not (root / "mlflow.db").exists():
        return []
    from pipeline.tracking.sender import TRACKER_FAULTS  # imports MLflow

    folder = artifact_folder(root)
    # before the runs: a new run is in the store first
    there = [path for path in folder.glob("*") if _RUN_ID.fullmatch(path.name)]
    try:
        known = {run.info.run_id: run for run in _runs(uri, root)}
    except TRACKER_FAULTS as error:
        raise PipelineError(f"{uri}: cannot be read: {str(error).splitlines()[0]}; move it away, or mend it") from None
    gone = [run for run in known.values() if run.info.lifecycle_stage == "deleted"]
    deleted = [run.info.run_id for run in gone if _is_own(run, root)]
    others = f"; {len(gone) - len(deleted)} kept, another workspace's" if len(gone) > len(deleted) else ""
    artifacts = [folder / run_id for run_id in deleted]
    orphans = [path.name for path in there if path.name not in known]
    unknown = f"; kept: {folder / orphans[0]} and {len(orphans) - 1} more" if orphans else ""
    why = f"deleted in MLflow; their artifacts{others}"
    return [
        Leftover("deleted MLflow runs", why, artifacts, lambda: _purge(uri, deleted, artifacts)),
        Leftover("artifacts without a run", f"another store may know them{unknown}", [], lambda: None),
    ]


def _is_own(run: "Run", root: Path) -> bool:
    """Whether it was not fed from another workspace, such as a clone with the same store."""
    fed_from = run.data.tags.get("run.folder")
    return fed_from is None or Path(fed_from).is_relative_to(root.resolve())


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
