"""Whether the repository and the stores beside it are in order: lineage, locks, scratch, MLflow, Prefect. A line each."""

import os
import sqlite3
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from pipeline.diagnosis.findings import Severity
from pipeline.errors import ParamsError
from pipeline.lineage.declaration import read_again
from pipeline.lineage.history import lock_at
from pipeline.masking import masked, without_credentials
from pipeline.params import Params, load_params
from pipeline.reading.lines import Line, listed
from pipeline.supervise import is_held
from pipeline.tracking.leftovers import DAY_S, KEEP_DAYS, abandoned
from pipeline.tracking.records import all_runs, noted_complete
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.store import SAMPLES, is_server, moved, moved_from, own_store, sqlite_file, tracking_uri
from pipeline.yaml_files import read_yaml

ANSWER_S = 2.0
"""A server on this machine answers within milliseconds."""


def check_params(root: Path) -> tuple[Params | None, list[Line]]:
    """params.yaml where it is valid, and a line, or one per fault."""
    try:
        return load_params(root / "params.yaml"), [Line("params.yaml", Severity.OK, "valid")]
    except ParamsError as error:
        return None, [Line("params.yaml", Severity.PROBLEM, line) for line in error.lines]


def check_lineage(root: Path, params: Params | None) -> Line:
    """Whether every stage of dvc.yaml has run and its files are there; whether they are up to date, `plan` says."""
    if not (root / "dvc.lock").exists():
        return Line("lineage", Severity.WARN, "no dvc.lock: no stage has run; `dvc repro` runs all")
    lock_at(root, None)  # says what is wrong with it
    locked: dict[str, Any] = (read_yaml(root / "dvc.lock") or {}).get("stages", {})
    never = sorted(set(stage_names(root, params)) - locked.keys())
    outs = [(stage, out) for stage, entry in locked.items() for out in entry.get("outs", [])]
    missing = sorted({stage for stage, out in outs if not (root / out["path"]).exists()})
    differ = sorted({stage for stage, out in outs if _has_another_size(root / out["path"], out.get("size"))})
    faults = [f"never ran: {listed(never)}"] if never else []
    faults += [f"files are missing of {listed(missing)}"] if missing else []
    faults += [f"files differ from dvc.lock of {listed(differ)}"] if differ else []
    if faults:
        advice = "`dvc checkout` takes from the cache what it has, `dvc repro` makes the rest"
        return Line("lineage", Severity.WARN, f"{'; '.join(faults)}; {advice}")
    return Line("lineage", Severity.OK, f"{len(locked)} stages, the files of all are there")


def stage_names(root: Path, params: Params | None) -> Iterator[str]:
    """The stages of dvc.yaml, such as `data@pretrain`, in its order; without parameters those are left out that they name.

    Raises:
        ParamsError: dvc.yaml is damaged.
    """
    try:
        for name, body in read_again(root / "dvc.yaml")["stages"].items():
            if "foreach" not in body:
                yield name
            elif isinstance(body["foreach"], list):
                yield from (f"{name}@{item}" for item in body["foreach"])
            elif params:  # ${data.sets}
                yield from (f"{name}@{item}" for item in params.data.sets.model_dump())
    except (LookupError, TypeError, AttributeError):
        raise ParamsError(f"{root / 'dvc.yaml'}: is no list of stages; `git checkout dvc.yaml` brings it back") from None


def _has_another_size(path: Path, size: int | None) -> bool:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return size is not None and path.exists() and sum(file.stat().st_size for file in files) != size


def check_locks(home: Path) -> Line:
    """Which processes are at work here. Locks die with their holders, so a file alone means nothing."""
    holders: defaultdict[str, set[str]] = defaultdict(set)
    runs = home / ".runs"
    for lock in (home / ".mlflow.lock", *runs.glob("*/lock"), *runs.glob("*/*/*/lock"), *runs.glob("*/*/*/feeder.lock")):
        if is_held(lock):
            pid = lock.read_text(encoding="utf-8").strip() or "unknown"
            name = lock.relative_to(home).as_posix().removeprefix(".runs/").removesuffix("/lock")
            holders[pid].add("MLflow's store" if lock.parent == home else name)
    if not holders:
        return Line("locks", Severity.OK, "no stage is running here")
    held = [f"process {pid} holds {' and '.join(sorted(names))}" for pid, names in holders.items()]
    return Line("locks", Severity.OK, listed(held))


def check_scratch(home: Path) -> Line:
    """Runs that nobody will go on with."""
    runs = all_runs(home)
    if stale := list(abandoned(runs, KEEP_DAYS * DAY_S)):
        text = (
            f"{len(stale)} unfinished runs unused for {KEEP_DAYS:g} days; `python -m pipeline gc` shows them, --yes removes them"
        )
        return Line("scratch", Severity.WARN, text)
    return Line("scratch", Severity.OK, f"{len(runs)} runs, none left behind")


def check_mlflow(home: Path, params: Params | None) -> Line:
    """Whether the store answers, and every run that has ended was sent to it; of a SQLite file also whether it still has them."""
    store = tracking_uri(home)
    uri = masked(store)
    if store == own_store(home) and (old := moved_from(home)) is not None:
        return Line("mlflow", Severity.PROBLEM, moved(home, old))
    if fault := _server_fault(store) if is_server(store) else _store_fault(store):
        advice = "training goes on without it; `python -m pipeline replay --all` sends what it missed once it is back"
        return Line("mlflow", Severity.WARN, f"{uri}: {fault}; {advice}")
    named = os.environ.get("MLFLOW_TRACKING_URI")
    ended = [run for run in all_runs(home) if not is_held(run.lock) and not is_held(run.feeder_lock)]
    there = _runs_there(store)
    lost = (run for run in ended if there is not None and _sent_to(run) == uri and not _is_there(run, there))
    lacking = {run.path for run in (*(run for run in ended if not noted_complete(run, named)), *lost)}
    lacks = sorted(path.relative_to(home / ".runs").as_posix() for path in lacking)
    if lacks and (params is None or params.runtime.mlflow):
        text = f"{uri} lacks of {len(lacks)} runs: {listed(lacks)}; `python -m pipeline replay --all` sends it"
        return Line("mlflow", Severity.WARN, text)
    rest = f"; {len(lacks)} are not there whole, and runtime.mlflow is false" if lacks else ""
    return Line("mlflow", Severity.OK, f"{uri}: {len(ended) - len(lacks)} ended runs, sent whole{rest}")


def _sent_to(run: RunFolder) -> str:
    """The store that has got a run, by its note."""
    return masked(str(read_json(run.feeder_note).get("tracking_uri", "")))


def _is_there(run: RunFolder, there: Mapping[str, str]) -> bool:
    """Whether a SQLite store has a run and, where it was sampled, a folder of samples."""
    found = there.get(read_json(run.about).get("uid", ""))
    if found is None or not run.samples.exists() or not run.samples.stat().st_size:
        return found is not None
    place = urlsplit(found)
    return place.scheme != "file" or (Path(unquote(place.path)) / SAMPLES).is_dir()


def _runs_there(uri: str) -> dict[str, str] | None:
    """Where the artifacts of the runs lie that a SQLite file holds, by uid; None of a server, which would be asked for each."""
    if (file := sqlite_file(uri)) is None:
        return None
    query = "SELECT value, artifact_uri FROM tags JOIN runs USING (run_uuid) WHERE key = 'run.uid' AND lifecycle_stage = 'active'"
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        return dict(connection.execute(query).fetchall())
    return {}


def _store_fault(uri: str) -> str | None:
    """What keeps a SQLite file from being read; None also where there is none yet: the first run makes it."""
    file = sqlite_file(uri)
    if file is None or not file.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=ANSWER_S)) as connection:
            connection.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.Error as error:
        return f"cannot be read ({error})"
    return None


def check_prefect(root: Path) -> Line:
    """Whether the server of the flows answers; one that only the project's own file names need not run."""
    named = os.environ.get("PREFECT_API_URL")
    if named is None:
        with (root / "prefect.toml").open("rb") as file:
            named = None if (own := tomllib.load(file).get("api", {}).get("url")) is None else str(own)
            if named is None:
                return Line("prefect", Severity.OK, "no server is configured")
    fault, named = _server_fault(named), masked(named)
    if fault is None:
        return Line("prefect", Severity.OK, f"{named} answers")
    if "PREFECT_API_URL" in os.environ:
        return Line("prefect", Severity.WARN, f"{named}: {fault}; start it, or unset PREFECT_API_URL")
    return Line("prefect", Severity.OK, f"no server at {named}; `make flows` starts one")


def _server_fault(url: str) -> str | None:
    """What keeps a server from saying that it is well, which it tells without a password."""
    try:
        with urlopen(f"{without_credentials(url).rstrip('/')}/health", timeout=ANSWER_S):
            return None
    except HTTPError as error:
        return f"answers {error.code}"
    except (URLError, OSError, ValueError) as error:
        return f"no answer ({getattr(error, 'reason', error)})"
