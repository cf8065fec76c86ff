"""Where a file came from: stage, commit, parameters, parents up to the corpus, run and evaluation, found by its bytes alone.

What no stage wrote may be what stages read: a source.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.digests import digest
from pipeline.errors import DataError
from pipeline.lineage.causes import cache_folder
from pipeline.lineage.history import LOCK, Lock, Made, file_at, lock_at, locks_with
from pipeline.lineage.runs import run_that_made
from pipeline.tracking.records import Record
from pipeline.tracking.shapes import loads, parse_metrics

JUDGE, EVALUATION = "eval", "metrics/eval.json"
NAMED = 200
"""Characters of a name that an error repeats."""
BOUNDS = ("_low", "_high", "_n")


@dataclass(frozen=True, slots=True)
class Run:
    """The finished run that made something, by its bytes; the newest of several, as far as `.runs` still has one.

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
    """A stage on the way from the corpus to the file; `inputs` are the data that it read and the hash of its code."""

    stage: str
    params: Mapping[str, Any]
    deps: Mapping[str, str]
    outs: Mapping[str, str]
    run: Run | None
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file came from.

    Attributes:
        file: the path asked about.
        digest: of its bytes, as in dvc.lock.
        path: where the lineage wrote these bytes; of several places the one asked about, if it is one of them.
        also: stage by path of the other places: equal bytes tell nothing of which stage a copy is from.
        in_workspace: whether the workspace's dvc.lock names them.
        commits: the commits whose dvc.lock brought them, newest first: `{"commit": ..., "time": ...}`.
        steps: the stages that led here, parents first; the last one wrote the file.
        sources: digest by path of the data that all of it came from.
        evaluation: its metrics on the held-out panel, with their intervals; empty when the lineage does not evaluate it.
        judge: the stage that measured these.
    """

    file: str
    digest: str
    path: str
    also: Mapping[str, str]
    in_workspace: bool
    commits: list[dict[str, str]]
    steps: list[Step]
    sources: Mapping[str, str]
    evaluation: Mapping[str, float]
    judge: Made | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """What stages read and none wrote: where a lineage begins.

    Attributes:
        file, digest, path, in_workspace, commits: as in `Origin`, `path` being where stages read it.
        readers: the stages that read it, as the newest of these lock files has them.
        behind: the stages that read what those made, and so on.
    """

    file: str
    digest: str
    path: str
    in_workspace: bool
    commits: list[dict[str, str]]
    readers: list[str]
    behind: list[str]


def trace(file: Path, root: Path, runs: Path) -> Origin | Source:
    """What a file or folder is to the lineage, whatever it is called and wherever it lies now.

    Args:
        file: a file or folder; one in a folder that a stage wrote counts, too.
        root: the repository whose lock files are searched.
        runs: the folder of run folders.

    Raises:
        DataError: there is no such file, or no lock file names its bytes.
    """
    known = _digest(file)
    if found := list(locks_with(root, known)):
        return _origin(file, known, _Written.of(found, known, _own_path(file, root)), root, runs)
    if found := list(locks_with(root, known, read=True)):
        return _source(file, known, found, _own_path(file, root))
    for folder, name in _folders_with(root, known):
        if found := list(locks_with(root, folder)):
            return _origin(file, known, _Written.of(found, folder, _own_path(file, root), f"/{name}"), root, runs)
    raise DataError(f"{file} (md5 {known}): {_foreign(file, root)}")


def whence(file: Path, root: Path, runs: Path) -> Origin:
    """Finds the stage that wrote these bytes; arguments and errors of `trace`.

    Raises:
        DataError: no stage wrote them, also when stages read them.
    """
    found = trace(file, root, runs)
    if isinstance(found, Source):
        raise DataError(f"{file} (md5 {found.digest}): a source, which stages read ({', '.join(found.readers)}) and none wrote")
    return found


def _digest(file: Path) -> str:
    try:
        if not (file.is_file() or file.is_dir()):
            what = "neither a file nor a folder" if file.exists() else "no such file"
            raise DataError(f"{file}: {what}")
        return digest(file)
    except (OSError, ValueError) as error:  # a name that no file system takes, or a file that nobody may read
        raise DataError(f"{str(file)[:NAMED]!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _own_path(file: Path, root: Path) -> str:
    """Of a file in the repository, relative to it; empty for another one."""
    resolved = file.resolve()
    return resolved.relative_to(root.resolve()).as_posix() if resolved.is_relative_to(root.resolve()) else ""


@dataclass(frozen=True, slots=True)
class _Written:
    """One writing of certain bytes: its lock files, newest first, its path, and the other places of the same bytes."""

    locks: list[Lock]
    made: Made
    path: str
    also: Mapping[str, str]

    @classmethod
    def of(cls, found: list[Lock], digest: str, own: str, rest: str = "") -> "_Written":
        """That at path `own` if there is one, else the first of the newest lock file.

        Args:
            found: lock files in which a stage wrote `digest`.
            digest: of a file or folder.
            own: a path.
            rest: what stands behind the path of a folder.
        """
        by_lock = [(lock, {f"{path}{rest}": made for path, made in lock.writers(digest).items()}) for lock in found]
        lock, places = next(((lock, places) for lock, places in by_lock if own in places), by_lock[0])
        path = own if own in places else next(iter(places))
        locks = [lock for lock, places in by_lock if path in places]
        also = {other: made.stage for other, made in places.items() if other != path}
        return cls(locks, places[path], path, also)


def _origin(file: Path, known: str, written: _Written, root: Path, runs: Path) -> Origin:
    lock, made = written.locks[0], written.made
    return Origin(
        file=str(file),
        digest=known,
        path=written.path,
        also=written.also,
        in_workspace=lock.commit is None,
        commits=_commits(written.locks),
        steps=[
            Step(step.stage, step.params, step.deps, step.outs, _run_of(step, root, runs), step.inputs)
            for step in lock.ancestry(made)
        ],
        sources=lock.sources(made),
        evaluation=evaluation_of(root, lock, made),
        judge=lock.stages.get(JUDGE),
    )


def _source(file: Path, known: str, found: list[Lock], own: str) -> Source:
    lock = found[0]
    readers = lock.readers(known)
    paths = dict.fromkeys(path for made in readers for path, md5 in made.deps.items() if md5 == known)
    path = own if own in paths else next(iter(paths))
    names = [made.stage for made in readers]
    behind = [made.stage for made in lock.behind(readers) if made.stage not in names]
    return Source(str(file), known, path, lock.commit is None, _commits(found), names, behind)


def _commits(found: list[Lock]) -> list[dict[str, str]]:
    return [{"commit": each.commit, "time": each.time or ""} for each in found if each.commit]


def _folders_with(root: Path, known: str) -> Iterator[tuple[str, str]]:
    """Digest of every folder in DVC's cache that has a file with these bytes, and where in it, those of the workspace first."""
    lock = file_at(root, None, LOCK) or ""
    listings = sorted((cache_folder(root) / "files" / "md5").glob("*/*.dir"), key=lambda each: _digest_of(each) not in lock)
    for listing in listings:
        with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged one, which DVC itself will mend
            names = [entry["relpath"] for entry in loads(listing.read_bytes()) if entry["md5"] == known]
            yield from ((_digest_of(listing), name) for name in names)


def _digest_of(cached: Path) -> str:
    return cached.parent.name + cached.name


def _foreign(file: Path, root: Path) -> str:
    """Why no lock file may name a file's bytes."""
    lock, path = lock_at(root, None), _own_path(file, root)
    for made in lock.stages.values() if lock is not None else ():
        if recorded := (made.outs | made.deps).get(path):
            what = "wrote" if path in made.outs else "read"
            return f"changed since stage {made.stage} {what} it, which dvc.lock has with md5 {recorded}"
    return (
        "no version of dvc.lock, here or in a commit, names these bytes; they come from elsewhere, were changed since, or their "
        "dvc.lock was never committed"
    )


def _run_of(made: Made, root: Path, runs: Path) -> Run | None:
    folder = run_that_made(made, runs)
    if folder is None:
        return None
    record = Record(folder)
    return Run(
        name=record.name,
        folder=str(folder.path.relative_to(root) if folder.path.is_relative_to(root) else folder.path),
        mlflow=record.mlflow_id,
        tracking_uri=record.tracking_uri,
        started_s=record.started_s,
        seconds=round((record.ended_s or record.started_s) - record.started_s, 3),
    )


def evaluation_of(root: Path, lock: Lock, made: Made) -> dict[str, float]:
    """What metrics/eval.json of the same commit says of the model, if `eval` had read it then."""
    judge = lock.stages.get(JUDGE)
    text = file_at(root, lock.commit, EVALUATION)
    if judge is None or text is None or not made.outs.items() <= (made.outs | judge.deps).items():
        return {}
    if not made.outs.keys() & judge.deps.keys():
        return {}
    source = EVALUATION if lock.commit is None else f"{lock.commit[:7]}:{EVALUATION}"
    return dict(parse_metrics(text, source).get(made.stage, {}))


def as_json(found: Origin | Source) -> str:
    """All of it as strict JSON; `kind` is `output` or `source`."""
    kind = {"kind": "source" if isinstance(found, Source) else "output"}
    return json.dumps(kind | asdict(found), ensure_ascii=False, allow_nan=False, indent=2)


def as_text(found: Origin | Source) -> Iterator[str]:
    """Lines to read, each fact once."""
    what = "a source, which no stage wrote" if isinstance(found, Source) else f"written by stage {found.steps[-1].stage}"
    yield f"{found.file} is {found.path}, {what} (md5 {found.digest})"
    places = (["the workspace"] if found.in_workspace else []) + [
        f"commit {each['commit'][:7]} of {each['time'][:10]}" for each in found.commits
    ]
    yield f"dvc.lock    {', '.join(places)}"
    if isinstance(found, Source):
        yield f"read by     {', '.join(found.readers)}"
        yield from [f"leads to    {', '.join(found.behind)}"] if found.behind else []
    else:
        yield from [f"also        {path}, of stage {stage}: the same bytes" for path, stage in found.also.items()]
        yield from _making(found)


def _making(origin: Origin) -> Iterator[str]:
    made = origin.steps[-1]
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
            yield name, f"{value:z.3f}" + (f" [{low:z.3f}, {high:z.3f}]" if low is not None and high is not None else "")
