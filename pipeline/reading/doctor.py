"""`python -m pipeline doctor`: is the machine fit, is the repository in order, are the runs healthy?"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.diagnosis.checks import checks_of, diagnose
from pipeline.diagnosis.findings import Finding, Severity
from pipeline.diagnosis.signals import Signals
from pipeline.errors import ParamsError
from pipeline.lineage.records import recorded_runs
from pipeline.reading.lines import Line
from pipeline.reading.machine import check_device, check_disk, check_libraries, check_python
from pipeline.reading.workspace import check_lineage, check_locks, check_mlflow, check_params, check_prefect, check_scratch
from pipeline.tracking.records import Record, all_runs
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.yaml_files import read_yaml


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A run and what is wrong with it.

    Attributes:
        run: its folder, relative to the home of the runs.
        state: how it ended or that it trains, in a word or a line.
        severity: the worst of the state and the findings.
        steps: that it has taken.
        checks: that were made.
    """

    run: str
    stage: str
    name: str
    state: str
    severity: Severity
    steps: int
    checks: int
    findings: list[Finding]

    def lines(self) -> list[Line]:
        """The run itself, then a line per finding."""
        seen = f"{self.steps} steps, " if self.steps else ""
        asked = f"{len(self.findings) or 'nothing'} found by {self.checks} checks" if self.checks else "has no signals to check"
        own = Line(self.stage, self.severity, f"{self.name} ({self.run}): {self.state}; {seen}{asked}")
        return [own, *(Line(self.stage, finding.severity, str(finding)) for finding in self.findings)]


def diagnose_run(folder: RunFolder, root: Path, home: Path) -> Diagnosis:
    """All that the record of a run says about its health, and metrics/eval.json where it is about this run's model."""
    record = Record(folder)
    state, fine = _state(record)
    signals = Signals(record.stage, record.params, record.metrics, not record.alive, evaluation_of(folder, root, home))
    findings = diagnose(signals)
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
    )


def _state(record: Record) -> tuple[str, Severity]:
    if record.alive:
        return "is running", Severity.OK
    if record.finished:
        return "finished", Severity.OK
    if not record.end:
        return "was killed; the same command goes on from its last save", Severity.WARN
    code, reason = record.end.get("code"), record.end.get("reason")
    stopped = isinstance(code, int) and code > 128
    return f"ended with code {code}: {reason}", Severity.WARN if stopped else Severity.PROBLEM


def evaluation_of(folder: RunFolder, root: Path, home: Path) -> Mapping[str, Mapping[str, float]]:
    """metrics/eval.json if it has measured what this very run made; else nothing."""
    stage, lock_file = folder.stage, root / "dvc.lock"
    try:
        if not lock_file.exists() or folder not in recorded_runs(root, home, stage)[:1]:
            return {}
    except ParamsError:  # a params.yaml that is wrong made no run
        return {}
    locked = (read_yaml(lock_file) or {}).get("stages", {})
    made, measured = (
        {entry["path"]: entry.get("md5") for entry in locked.get(name, {}).get(part, [])}.get(f"checkpoints/{stage}.pth")
        for name, part in ((stage, "outs"), ("eval", "deps"))
    )
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
    if not (root / "dvc.yaml").exists():
        raise ParamsError(f"{root}: no dvc.yaml; run the command in the repository")
    params, lines = check_params(root)
    yield from lines
    yield check_python(root)
    yield check_libraries(root)
    if params:
        yield check_device(params.runtime)
        yield check_disk(root, home, params.runtime)
    yield check_lineage(root, params)
    yield check_locks(home)
    yield check_scratch(home)
    yield check_mlflow(home, params)
    yield check_prefect(root)


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
