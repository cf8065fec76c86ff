"""`python -m pipeline doctor`: is the machine fit, is the repository in order, are the runs healthy?"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.diagnosis.checks import checks_of
from pipeline.diagnosis.checks import diagnose as findings_of
from pipeline.diagnosis.findings import Finding, Severity
from pipeline.diagnosis.signals import Signals
from pipeline.diagnosis.still import still_metrics
from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.declaration import declaration, read_lock
from pipeline.lineage.records import recorded_runs
from pipeline.params import Params
from pipeline.reading.attempts import how_it_was_killed, last_attempt, written_since
from pipeline.reading.lines import Line
from pipeline.reading.machine import check_device, check_disk, check_libraries, check_python, check_steps
from pipeline.reading.workspace import (
    check_lineage,
    check_locks,
    check_mlflow,
    check_params,
    check_prefect,
    check_scratch,
    stage_names,
)
from pipeline.supervise import is_held
from pipeline.tracking.outlook import missing_sources, never_warm
from pipeline.tracking.records import Record, all_runs, find_runs
from pipeline.tracking.run_folder import RunFolder, cut_record, read_json


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A run and what is wrong with it, or the last attempt at a stage that came to no run.

    Attributes:
        run: its folder, relative to the home of the runs; None without a run.
        state: how it ended or that it trains, in a word or a line.
        severity: the worst of the state and the findings.
        steps: that it has taken.
        checks: that were made.
        notes: what is no fault and good to know: metrics that cannot move.
    """

    run: str | None
    stage: str
    name: str
    state: str
    severity: Severity
    steps: int
    checks: int
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[Line]:
        """The run itself, then a line per finding and note."""
        if self.run is None:
            return [Line(self.stage, self.severity, self.state)]
        seen = f"{self.steps} steps, " if self.steps else ""
        asked = f"{len(self.findings) or 'nothing'} found by {self.checks} checks" if self.checks else "has no signals to check"
        own = Line(self.stage, self.severity, f"{self.name} ({self.run}): {self.state}; {seen}{asked}")
        found = (Line(self.stage, finding.severity, str(finding)) for finding in self.findings)
        return [own, *found, *(Line(self.stage, Severity.OK, note) for note in self.notes)]


def diagnose(root: Path, home: Path, name: str | None = None) -> list[Diagnosis]:
    """What is to be said of runs, and of stages without.

    Args:
        root: the repository.
        home: where `.runs` is.
        name: a stage (`data` is every `data@SET`), a run folder or the id of an MLflow run; the newest run of every stage and all
            stages whose last attempt failed without one when left out.

    Raises:
        ParamsError: the name is none of these, or `root` is no repository of this project.
    """
    _check_repository(root)
    params, _ = check_params(root)
    stages = list(stage_names(root, params))
    if params is None:  # the sets of `data` are not known, but the ones that have run
        stages += [stage for stage in read_lock(root / "dvc.lock") if stage not in stages]
    chosen = [stage for stage in stages if name in (None, stage, stage.partition("@")[0])]
    if name is not None and not chosen:
        return [diagnose_run(folder, root, home) for folder in find_runs(home, [name])]
    newest = newest_runs(home)
    runs = [folder for folder in newest if name is None or folder.stage in chosen]
    without = [stage for stage in chosen if stage not in {folder.stage for folder in newest}] if name else []
    failed = [stage for stage in chosen if stage not in without and _failed_without_run(home, stage)]
    return [
        *(diagnose_run(folder, root, home) for folder in runs),
        *(diagnose_stage(stage, root, home, params) for stage in [*without, *failed]),
    ]


def _failed_without_run(home: Path, stage: str) -> bool:
    attempt = last_attempt(home, stage)
    return attempt is not None and attempt.code != 0 and attempt.record is None


def diagnose_stage(stage: str, root: Path, home: Path, params: Params | None) -> Diagnosis:
    """How the last attempt at a stage ended that came to no run. One at other inputs is no problem any more."""
    attempt = last_attempt(home, stage)
    if is_held(home / ".runs" / stage / "lock"):
        state, severity = "is running", Severity.OK
    elif attempt is not None:
        state, severity = _ended(attempt.code, attempt.reason)
        if severity is not Severity.OK and (newer := _written_since(stage, root, params, attempt.began_s)):
            state, severity = f"{state}; {newer} was written since", Severity.WARN
    elif stage in read_lock(root / "dvc.lock"):
        state, severity = "dvc.lock has its results; no attempt is recorded here", Severity.OK
    else:
        state, severity = f"has not run here; `dvc repro {stage}` runs it", Severity.WARN
    return Diagnosis(None, stage, stage, state, severity, 0, 0, [])


def _written_since(stage: str, root: Path, params: Params | None, time_s: float) -> str | None:
    if params is None:
        return None
    name, _, item = stage.partition("@")
    declared = declaration(name, params, item or None, dvc_file=root / "dvc.yaml")
    paths = [*(["params.yaml"] if declared.params else []), f"data/code/{name}.json", *declared.deps]
    return written_since(root, paths, time_s)


def diagnose_run(folder: RunFolder, root: Path, home: Path) -> Diagnosis:
    """All that the record of a run says about its health, and metrics/eval.json where it is about this run's model."""
    record = Record(folder)
    state, fine = _state(record)
    evaluation = evaluation_of(folder, root, home)
    signals = Signals(record.stage, record.params, record.metrics, not record.alive, evaluation, record.newest_samples())
    findings = findings_of(signals)
    severities = [fine, *(finding.severity for finding in findings)]
    return Diagnosis(
        folder.path.relative_to(home).as_posix() if folder.path.is_relative_to(home) else str(folder.path),
        record.stage,
        record.name,
        state,
        max(severities, key=list(Severity).index),
        record.steps,
        len(checks_of(record.stage, ended=signals.ended)),
        findings,
        list(still_metrics(signals)),
    )


def _state(record: Record) -> tuple[str, Severity]:
    if record.alive:
        return "is running", Severity.OK
    if not record.end:
        return how_it_was_killed(record), Severity.WARN
    if cut := cut_record(record.folder):
        return f"finished; {cut}", Severity.WARN
    return _ended(record.end.get("code"), str(record.end.get("reason")))


def _ended(code: int | None, reason: str) -> tuple[str, Severity]:
    if code == 0:
        return "finished", Severity.OK
    if code is None:
        return reason, Severity.WARN
    return f"ended with code {code}: {reason}", Severity.WARN if code > 128 else Severity.PROBLEM


def evaluation_of(folder: RunFolder, root: Path, home: Path) -> Mapping[str, Mapping[str, float]]:
    """metrics/eval.json if it has measured what this very run made; else nothing."""
    stage, lock_file = folder.stage, root / "dvc.lock"
    try:
        if not lock_file.exists() or folder not in recorded_runs(root, home, stage):
            return {}
    except (ParamsError, KeyError):  # a params.yaml that is wrong made no run, nor did a dvc.yaml without the stage
        return {}
    locked, weights = read_lock(lock_file), f"checkpoints/{stage}.pth"
    if stage not in locked or "eval" not in locked:
        return {}
    made, measured = locked[stage].outs.get(weights), locked["eval"].digests.get(weights)
    return read_json(root / "metrics/eval.json") if made and made == measured else {}


def newest_runs(home: Path) -> list[RunFolder]:
    """The newest run of every stage, in the order in which they started."""
    newest: dict[str, RunFolder] = {}
    for folder in all_runs(home):
        newest.pop(folder.stage, None)
        newest[folder.stage] = folder
    return list(newest.values())


def checkup(root: Path, home: Path) -> Iterator[Line]:
    """Machine and repository, a line each.

    Raises:
        ParamsError: `root` is no repository of this project.
    """
    _check_repository(root)
    params, lines = check_params(root)
    yield from lines
    if params:
        yield from (Line("data", Severity.PROBLEM, line) for line in missing_sources(params, root))
        yield from (Line("params.yaml", Severity.WARN, line) for line in never_warm(params, root))
    yield _looked("python", lambda: check_python(root))
    yield _looked("libraries", lambda: check_libraries(root))
    if params:
        yield check_device(params.runtime)
        yield _looked("disk", lambda: check_disk(root, home, params))
        yield from check_steps(params)
    yield _looked("lineage", lambda: check_lineage(root, params))
    yield _looked("locks", lambda: check_locks(home))
    yield _looked("scratch", lambda: check_scratch(home))
    yield _looked("mlflow", lambda: check_mlflow(home, params))
    yield _looked("prefect", lambda: check_prefect(root))


def _looked(what: str, check: Callable[[], Line]) -> Line:
    """What a check says. Files that it reads may be gone or hold anything: that is a problem of its own, and the others go on."""
    try:
        return check()
    except PipelineError as error:
        return Line(what, Severity.PROBLEM, error.lines[0])
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        fault = f"a file that says it is missing or damaged ({type(error).__name__}: {error})"
        return Line(what, Severity.PROBLEM, f"{fault}; `git status` names it")


def _check_repository(root: Path) -> None:
    if not (root / "dvc.yaml").exists():
        raise ParamsError(f"{root}: no dvc.yaml; run the command in the repository")


def as_json(lines: Sequence[Line], diagnoses: Sequence[Diagnosis]) -> str:
    """Both parts for programs: lists `checks` and `runs`, and whether anything is a problem."""
    value: dict[str, Any] = {
        "problem": has_problem(lines, diagnoses),
        "checks": [asdict(line) for line in lines],
        "runs": [asdict(diagnosis) for diagnosis in diagnoses],
    }
    return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)


def has_problem(lines: Iterable[Line], diagnoses: Iterable[Diagnosis]) -> bool:
    """Whether the command ends with 1."""
    severities = [*(line.severity for line in lines), *(diagnosis.severity for diagnosis in diagnoses)]
    return Severity.PROBLEM in severities
