"""How the last attempt at a stage ended, and whether it was one at what the stage would do now.

A stage leaves code and reason in `.runs/<stage>/exit.json`, and one that trains also says in its run folder what it read. Of the
others no more is known than when it was.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digests import digest
from pipeline.lineage.history import CODE
from pipeline.lineage.runs import inputs_of, params_of
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.saves import resumption
from pipeline.tracking.usage import SECONDS


@dataclass(frozen=True)
class Attempt:
    """One start of a stage.

    Attributes:
        code: its exit code; None where it was killed and could leave no record.
        reason: one line.
        began_s: Unix time.
        record: its run; None for a stage without runs, or where it failed before there was one.
    """

    code: int | None
    reason: str
    began_s: float
    record: Record | None

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it: the same command goes on."""
        return self.code is None or self.code > 128

    def __str__(self) -> str:
        if self.code is None:
            return "the last attempt was killed"
        return f"the last attempt {'was stopped' if self.stopped else 'failed'} (exit {self.code})"


def last_attempt(home: Path, stage: str) -> Attempt | None:
    """The last start of a stage that has ended; None where there is no record of one.

    Args:
        home: where `.runs` is.
        stage: its name, such as `data@pretrain`.
    """
    scratch = home / ".runs" / stage
    records = [Record(RunFolder(path.parent)) for path in scratch.glob("*/*/run.json")]
    end = read_json(scratch / "exit.json")
    ended = float(end.get("time_s", 0.0))
    killed = [record for record in records if _start(record) > ended and not record.end and not record.alive]
    if killed:
        newest = max(killed, key=_start)
        return Attempt(None, how_it_was_killed(newest), _start(newest), newest)
    if not end:
        return None
    began = ended - end.get("used", {}).get(SECONDS, 0.0)
    own = [record for record in records if began <= (record.ended_s or 0.0) <= ended]
    return Attempt(end["code"], end.get("reason", ""), began, max(own, key=lambda record: record.ended_s or 0.0, default=None))


def how_it_was_killed(record: Record) -> str:
    """The reason that a process could not leave itself."""
    return f"was killed; {resumption(record.folder)}"


def _start(record: Record) -> float:
    return float(record.about.get("attempt_s", record.started_s))


def what_changed_since(attempt: Attempt, root: Path, params: Mapping[str, Any], inputs: Mapping[str, str | None]) -> str | None:
    """How an attempt differs from one that would begin now, in words; None where it does not.

    Args:
        attempt: of a stage.
        root: the repository.
        params: of the stage now, by full key.
        inputs: digest by path of what it would read, code included; None for what is not known.
    """
    if attempt.record is not None:
        about = attempt.record.about
        return None if params_of(about) == params and inputs_of(about) == inputs else "with older settings"
    if any(path.startswith(CODE) and digest(root / path) != md5 for path, md5 in inputs.items() if (root / path).exists()):
        return "with older code"
    newer = written_since(root, ["params.yaml", *inputs] if params else inputs, attempt.began_s)
    return f"before {newer} was written" if newer else None


def written_since(root: Path, paths: Iterable[str], time_s: float) -> str | None:
    """The first of some files and folders that is not there any more, or younger than a time."""
    for path in paths:
        files = [file for file in (root / path).rglob("*") if file.is_file()] if (root / path).is_dir() else [root / path]
        if any(not file.exists() or file.stat().st_mtime > time_s for file in files):
            return path
    return None
