"""What the stages of a workspace left to read: final metrics, and the MLflow runs that made them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.lineage.declaration import declaration, read_lock
from pipeline.masking import without_credentials
from pipeline.params import load_params
from pipeline.tracking.run_folder import RunFolder, read_json, run_key
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
    """The finished runs of the recipe whose outputs dvc.lock has, newest first; empty for a stage without runs.

    Args:
        root: the repository, or an isolated copy.
        home: where its run folders are (`pipeline.tracking.home`).
        stage: the stage.
    """
    runs = home / ".runs" / stage
    made = read_lock(root / "dvc.lock").get(stage)
    if not any(runs.glob("*/*/run.json")) or made is None:
        return []
    recipe = runs / _key(root, stage, made.digests)
    newest_first = sorted(recipe.glob("*"), key=lambda path: int(path.name) if path.name.isdecimal() else 0, reverse=True)
    return [RunFolder(path) for path in newest_first if read_json(path / "exit.json").get("code") == 0]


def recorded_outputs(root: Path, stage: str, recipe: str, params: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, str]:
    """The digests of a stage's outputs by path, if dvc.lock has those that a certain recipe made; else empty.

    Args:
        root: the repository, or an isolated copy.
        stage: the stage.
        recipe: the run key.
        params: of the run.
        inputs: digests of what it read, by path.
    """
    made, code = read_lock(root / "dvc.lock").get(stage), f"data/code/{stage}.json"
    if made is None or made.params != params or not made.digests.items() >= inputs.items():
        return {}
    read = {path: digest for path, digest in inputs.items() if path != code}
    return made.outs if run_key(stage, params, read, made.digests.get(code)) == recipe else {}


def tracked_run(root: Path, home: Path, stage: str) -> TrackedRun | None:
    """The newest MLflow run of `recorded_runs`; None where no feeder has made one (yet)."""
    for folder in recorded_runs(root, home, stage):
        if run_id := read_json(folder.feeder_note).get("run_id"):
            return run_page(read_json(folder.about).get("tracking_uri", ""), run_id)
    return None


def run_page(tracking_uri: str, run_id: str) -> TrackedRun:
    """Where MLflow shows a run; a link has no password."""
    served = is_server(tracking_uri)
    return TrackedRun(f"{without_credentials(tracking_uri).rstrip('/') if served else LOCAL_UI}/#/runs/{run_id}", served)


def _key(root: Path, stage: str, digests: Mapping[str, str]) -> str:
    """The key of the run folder: from the digests in dvc.lock, so that nothing large is read again."""
    code = digests.get(f"data/code/{stage}.json")
    declared = declaration(stage, load_params(root / "params.yaml"), dvc_file=root / "dvc.yaml")
    return run_key(stage, declared.params, {path: digests.get(path, "") for path in declared.deps}, code)
