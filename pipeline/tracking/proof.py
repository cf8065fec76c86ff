"""Whether an MLflow store can stand in for a run's folder, asked of the store at that moment.

What feeder.json notes was true once: stores are lost, replaced and restored from a copy, and their artifacts lie elsewhere. Who
removes files here, or calls a run complete, looks.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

from mlflow import MlflowClient

from pipeline.errors import PipelineError
from pipeline.masking import masked
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.saves import committed_sizes
from pipeline.tracking.sender import TABLES_TAG, TRACKER_FAULTS, last_steps, table_step
from pipeline.tracking.shapes import read_samples, read_steps
from pipeline.tracking.store import SAMPLES, open_existing, with_password
from pipeline.tracking.tables import as_table


class Stores:
    """The stores that runs of one workspace were fed to; each is opened once, whether it answers or not.

    Args:
        root: the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open = cache(self._opened)

    def fault(self, folder: RunFolder, *, content: bool, uri: str | None = None) -> str | None:
        """Why a store has not all metrics and samples of a run; None where it has them.

        Args:
            folder: of a run that has ended.
            content: compare every sample, not only up to which step there are some.
            uri: of the store; the one that the run was fed to when left out.
        """
        about, noted = read_json(folder.about), read_json(folder.feeder_note)
        uri = uri or noted.get("tracking_uri") or about.get("tracking_uri")
        if not uri or "uid" not in about:
            return "it was never fed to MLflow"
        opened = self._open(uri)
        if isinstance(opened, str):
            return opened
        try:
            return lacking(*opened, folder, content=content)
        except TRACKER_FAULTS as error:
            return f"{masked(uri)}: {_first_line(error)}"

    def _opened(self, uri: str) -> tuple[MlflowClient, str] | str:
        try:
            return open_existing(with_password(uri), self._root)
        except (PipelineError, *TRACKER_FAULTS) as error:
            return f"{masked(uri)}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return masked(str(error).partition("\n")[0])


def lacking(client: MlflowClient, experiment_id: str, folder: RunFolder, *, content: bool) -> str | None:
    """As `Stores.fault`, of an open store.

    Raises:
        TRACKER_FAULTS: it does not answer.
    """
    found = client.search_runs([experiment_id], f"tags.`run.uid` = '{read_json(folder.about)['uid']}'")
    run = max(found, key=lambda run: len(run.data.metrics), default=None)
    if run is None:
        return "MLflow has no such run"
    there = last_steps(run)
    final = {} if read_json(folder.exit) else committed_sizes(folder)  # of a run that was killed no more is sent
    for path, end in ((folder.metrics, final.get("metrics_bytes")), (folder.system, None)):
        for line in read_steps(path, end=end):
            for key, value in line["metrics"].items():
                if value is not None and there.get(key, -1) < line["step"]:
                    return f"MLflow lacks {key} of step {line['step']}"
    rows, gone = list(read_samples(folder.samples, end=final.get("samples_bytes"))), read_json(folder.gone)
    last = rows[-1]["step"] if rows else gone.get("step", -1) if not folder.samples.exists() else -1
    if last < 0:
        return None
    tables = [entry["path"] for entry in json.loads(run.data.tags.get(TABLES_TAG, "[]"))]
    files = {file.path for file in client.list_artifacts(run.info.run_id, SAMPLES)}
    if not tables or not files.issuperset(tables) or table_step(tables[-1]) < last:
        lost = f", which `pipeline gc` has removed here when {gone.get('tracking_uri')} had them" if not rows else ""
        return f"MLflow lacks samples up to step {last}{lost}"
    if content:
        for name in tables:
            with tempfile.TemporaryDirectory() as place:
                table = json.loads(Path(client.download_artifacts(run.info.run_id, name, place)).read_text(encoding="utf-8"))
            count = len(table["data"])
            if as_table(rows[:count]) != table:
                return f"MLflow has other samples in {name}"
            rows = rows[count:]
    return "MLflow lacks samples" if content and rows else None
