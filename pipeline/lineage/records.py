"""What the stages of a workspace left to read: final metrics, and the MLflow runs that made them."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DataError
from pipeline.lineage.history import lock_at
from pipeline.lineage.runs import runs_that_made
from pipeline.masking import without_credentials
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder
from pipeline.tracking.shapes import parse_metrics
from pipeline.tracking.store import is_server

LOCAL_UI = "http://127.0.0.1:5000"
"""Where `make ui` shows a store that no server owns."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """An MLflow run.

    Attributes:
        url: its page.
        served: whether a tracking server shows it; otherwise `make ui` must run.
    """

    url: str
    served: bool


def final_metrics(root: Path, stage: str) -> dict[str, float]:
    """`metrics/<stage>.json`; the nested one of eval as `<model>/<metric>`. Empty where there is none.

    Raises:
        DataError: the file holds something else.
    """
    path = root / "metrics" / f"{stage}.json"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    flat: dict[str, float] = {}
    for name, value in parse_metrics(text, path).items():
        flat |= {f"{name}/{key}": number for key, number in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def recorded_runs(root: Path, home: Path, stage: str) -> list[RunFolder]:
    """The runs that made what dvc.lock has of a stage, as `runs_that_made` orders them; empty for a stage without runs.

    Args:
        root: the repository, or an isolated copy.
        home: where its run folders are (`pipeline.tracking.home`).
        stage: the stage.
    """
    try:
        lock = lock_at(root, None)
    except DataError:  # DVC is writing it
        return []
    made = lock.stages.get(stage) if lock is not None else None
    return runs_that_made(made, home / ".runs") if made is not None else []


def tracked_run(root: Path, home: Path, stage: str) -> TrackedRun | None:
    """The newest MLflow run of `recorded_runs`; None where no feeder has made one (yet)."""
    return next((page for folder in recorded_runs(root, home, stage) if (page := page_of(Record(folder)))), None)


def page_of(record: Record) -> TrackedRun | None:
    """Where MLflow shows a run; None where no feeder has made one (yet)."""
    return run_page(record.tracking_uri, record.mlflow_id) if record.mlflow_id else None


def run_page(tracking_uri: str, run_id: str) -> TrackedRun:
    """Where MLflow shows a run; a link has no password."""
    served = is_server(tracking_uri)
    return TrackedRun(f"{without_credentials(tracking_uri).rstrip('/') if served else LOCAL_UI}/#/runs/{run_id}", served)
