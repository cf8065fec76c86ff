"""Where a file came from: stage, commit, parameters, parents up to the corpus, run and evaluation, found by its bytes alone."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.digests import digest
from pipeline.errors import DataError
from pipeline.lineage.history import Lock, Made, file_at, locks_with
from pipeline.lineage.runs import run_that_made
from pipeline.tracking.run_folder import read_json

EVALUATION = "metrics/eval.json"
BOUNDS = ("_low", "_high", "_n")


@dataclass(frozen=True, slots=True)
class Run:
    """The newest finished run that made something, as far as `.runs` still has it.

    Attributes:
        name: as MLflow shows it.
        folder: relative to the repository.
        mlflow: the id of its MLflow run; None when none was fed.
        tracking_uri: the store that has it.
        started_s: Unix time.
        seconds: from its first start to its end, pauses included.
    """

    name: str
    folder: str
    mlflow: str | None
    tracking_uri: str
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """A stage on the way from the corpus to the file."""

    stage: str
    params: Mapping[str, Any]
    deps: Mapping[str, str]
    outs: Mapping[str, str]
    run: Run | None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file came from.

    Attributes:
        file: the path asked about.
        digest: of its bytes, as in dvc.lock.
        path: where the lineage wrote these bytes.
        in_workspace: whether the workspace's dvc.lock names them.
        commits: the commits whose dvc.lock brought them, newest first: `{"commit": ..., "time": ...}`.
        steps: the stages that led here, parents first; the last one wrote the file.
        sources: digest by path of the data that all of it came from.
        evaluation: its metrics on the held-out panel, with their intervals; empty when the lineage does not evaluate it.
    """

    file: str
    digest: str
    path: str
    in_workspace: bool
    commits: list[dict[str, str]]
    steps: list[Step]
    sources: Mapping[str, str]
    evaluation: Mapping[str, float]


def whence(file: Path, root: Path, runs: Path) -> Origin:
    """Finds the stage that wrote these bytes, whatever the file is called and wherever it lies now.

    Args:
        file: a file or folder.
        root: the repository whose lock files are searched.
        runs: the folder of run folders.

    Raises:
        DataError: there is no such file, or no lock file names its bytes.
    """
    if not file.exists():
        raise DataError(f"{file}: no such file")
    known = digest(file)
    found = list(locks_with(root, known))
    if not found:
        raise DataError(
            f"{file} (md5 {known}): no version of dvc.lock, here or in a commit, names these bytes as a stage's; they come from "
            "elsewhere, were changed since, or their dvc.lock was never committed"
        )
    lock = found[0]
    made, path = lock.find(known)
    return Origin(
        file=str(file),
        digest=known,
        path=path,
        in_workspace=lock.commit is None,
        commits=[{"commit": each.commit, "time": each.time or ""} for each in found if each.commit],
        steps=[Step(step.stage, step.params, step.deps, step.outs, _run_of(step, root, runs)) for step in lock.ancestry(made)],
        sources=lock.sources(made),
        evaluation=evaluation_of(root, lock, made),
    )


def _run_of(made: Made, root: Path, runs: Path) -> Run | None:
    folder = run_that_made(made, runs)
    if folder is None:
        return None
    about, end = read_json(folder.about), read_json(folder.exit)
    return Run(
        name=about["name"],
        folder=str(folder.path.relative_to(root) if folder.path.is_relative_to(root) else folder.path),
        mlflow=read_json(folder.feeder_note).get("run_id") or None,
        tracking_uri=about["tracking_uri"],
        started_s=about["started_s"],
        seconds=round(end["time_s"] - about["started_s"], 3),
    )


def evaluation_of(root: Path, lock: Lock, made: Made) -> dict[str, float]:
    """What metrics/eval.json of the same commit says of the model, if `eval` had read it then."""
    judge = lock.stages.get("eval")
    text = file_at(root, lock.commit, EVALUATION)
    if judge is None or text is None or not made.outs.items() <= (made.outs | judge.deps).items():
        return {}
    if not made.outs.keys() & judge.deps.keys():
        return {}
    return dict(json.loads(text).get(made.stage, {}))


def as_json(origin: Origin) -> str:
    """The whole origin as strict JSON."""
    return json.dumps(asdict(origin), ensure_ascii=False, allow_nan=False, indent=2)


def as_text(origin: Origin) -> Iterator[str]:
    """The origin as lines to read, each fact once."""
    made = origin.steps[-1]
    yield f"{origin.file} is {origin.path}, written by stage {made.stage} (md5 {origin.digest})"
    places = (["the workspace"] if origin.in_workspace else []) + [
        f"commit {each['commit'][:7]} of {each['time'][:10]}" for each in origin.commits
    ]
    yield f"dvc.lock    {', '.join(places)}"
    if made.run is not None:
        at = f"MLflow run {made.run.mlflow} in {made.run.tracking_uri}" if made.run.mlflow else "no MLflow run"
        yield f"run         {made.run.name}, {made.run.seconds:.0f} s, {made.run.folder}, {at}"
    for name, value in _headline(origin.evaluation):
        yield f"evaluated   {name} {value}"
    for key, value in made.params.items():
        yield f"params      {key} {json.dumps(value, ensure_ascii=False)}"
    for step in reversed(origin.steps[:-1]):
        run = f"  {step.run.name}, {step.run.seconds:.0f} s" if step.run is not None else ""
        outs = ", ".join(f"{path} {md5[:7]}" for path, md5 in step.outs.items() if not path.startswith(("metrics/", "plots/")))
        yield f"from        {step.stage:<16} {outs}{run}"
    for path, md5 in origin.sources.items():
        yield f"source      {path} {md5}"


def _headline(evaluation: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for name, value in evaluation.items():
        if not name.endswith(BOUNDS):
            low, high = evaluation.get(f"{name}_low"), evaluation.get(f"{name}_high")
            yield name, f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")
