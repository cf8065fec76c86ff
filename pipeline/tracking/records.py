"""Runs as their folders tell them: what each was, what it measured and generated, how it ended."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError
from pipeline.masking import masked
from pipeline.supervise import is_held
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.shapes import read_samples, read_steps
from pipeline.tracking.usage import SECONDS, total


@dataclass(slots=True)
class Series:
    """The values of one metric in order of steps, those that were not finite left out."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def last(self) -> float:
        return self.values[-1]


@dataclass(frozen=True)
class Record:
    """One run, read from its folder when asked for; a file that is missing or torn counts as empty."""

    folder: RunFolder

    @cached_property
    def about(self) -> dict[str, Any]:
        """run.json: name, params, tags, start."""
        return read_json(self.folder.about)

    @cached_property
    def end(self) -> dict[str, Any]:
        """exit.json: code, reason, time; empty while the run lives and after SIGKILL."""
        return read_json(self.folder.exit)

    @property
    def stage(self) -> str:
        return self.folder.stage

    @property
    def name(self) -> str:
        """As MLflow shows it, such as `grpo · cispo lr 1e-4 · s42`."""
        return str(self.about.get("name", self.stage))

    @property
    def params(self) -> Mapping[str, Any]:
        """What decided its result, by section."""
        return dict(self.about.get("params", {}))

    @property
    def started_s(self) -> float:
        """Unix time of its first start."""
        return float(self.about.get("started_s", 0.0))

    @property
    def ended_s(self) -> float | None:
        """Unix time of its end; None before, and after SIGKILL."""
        return self.end.get("time_s")

    @property
    def tracking_uri(self) -> str:
        """The store that has it, else the one that it is to be fed to, without a password; empty where run.json does not say."""
        return masked(str(self._note.get("tracking_uri") or self.about.get("tracking_uri", "")))

    @property
    def why(self) -> list[str]:
        """Why it ran, a line per cause."""
        return list(self.about.get("why", []))

    @property
    def used(self) -> dict[str, float]:
        """`seconds`, `cpu_s`, `device_s` and `energy_j` of all its attempts, as far as they are known; pauses do not count."""
        return total(self.about.get("spent", {}), self.end.get("used", {}))

    @property
    def seconds(self) -> float | None:
        """That it ran, pauses left out; None without an orderly end."""
        return self.used.get(SECONDS) if self.end else None

    @property
    def finished(self) -> bool:
        return self.end.get("code") == 0

    @property
    def alive(self) -> bool:
        """Whether its trainer lives."""
        return is_held(self.folder.lock)

    @property
    def outputs(self) -> dict[str, str]:
        """Digest by path of what it made, as dvc.lock has it once DVC has taken that over; empty before its end."""
        return dict(self.end.get("outputs", {}))

    @property
    def mlflow_id(self) -> str | None:
        """Of its MLflow run; None when none was fed (yet)."""
        return self._note.get("run_id") or None

    @property
    def _note(self) -> dict[str, Any]:
        """feeder.json."""
        return read_json(self.folder.feeder_note)

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Every metric by name, in the order in which they first came."""
        found: dict[str, Series] = {}
        for line in self.lines():
            for key, value in line["metrics"].items():
                if value is not None:
                    series = found.setdefault(key, Series())
                    series.steps.append(line["step"])
                    series.values.append(value)
        return found

    @property
    def steps(self) -> int:
        """The last step that it measured; 0 before any."""
        return max((series.steps[-1] for series in self.metrics.values()), default=0)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Every logged step in order: `step`, `time_s` and its `metrics`; what was not finite is None."""
        return read_steps(self.folder.metrics)

    def samples(self) -> Iterator[dict[str, Any]]:
        """What it generated, a row each, `step` first; none once `pipeline gc` has removed them."""
        return read_samples(self.folder.samples)

    def newest_samples(self) -> list[dict[str, Any]]:
        """What it generated last: the rows of the highest step that has any."""
        rows: list[dict[str, Any]] = []
        for row in self.samples():
            if rows and row["step"] != rows[0]["step"]:
                rows = []
            rows.append(row)
        return rows


def last_changed(path: Path) -> float:
    """Unix time; 0 for what has gone meanwhile, such as a run that `pipeline gc` removes."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def all_runs(home: Path) -> list[RunFolder]:
    """Every run below `.runs`, in order of their last starts.

    Args:
        home: the folder with `.runs` (`pipeline.tracking.home`).
    """
    abouts = (home / ".runs").glob("*/*/*/run.json")
    return [RunFolder(path.parent) for path in sorted(abouts, key=last_changed)]


def run_at(path: Path) -> RunFolder | None:
    """The run whose folder this is; None for any other path, also one that no file system would take."""
    try:
        folder = RunFolder(path.resolve())
        return folder if folder.about.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long a name, a loop of links, a NUL
        return None


def find_runs(home: Path, names: Sequence[str]) -> list[RunFolder]:
    """The run folders that are meant.

    Args:
        home: the folder with `.runs`.
        names: each the path of a run folder, a stage (its newest run) or the id of an MLflow run.

    Raises:
        ParamsError: a name is none of these.
    """
    folders = all_runs(home)
    return [_find(home, name, folders) for name in names]


def noted_complete(folder: RunFolder, uri: str | None = None) -> bool:
    """Whether feeder.json says that the store at `uri`, or whichever it names, has all that the last attempt left."""
    about, noted = read_json(folder.about), read_json(folder.feeder_note)
    asked, sent = uri or noted.get("tracking_uri"), noted.get("tracking_uri")
    return bool(noted) and noted.get("complete") == about.get("attempt") and masked(str(sent)) == masked(str(asked))


def _find(home: Path, name: str, folders: Sequence[RunFolder]) -> RunFolder:
    if name and (named := run_at(home / name)):
        return named
    for folder in reversed(folders):
        if name in (folder.stage, read_json(folder.feeder_note).get("run_id")):
            return folder
    raise ParamsError(
        f"{name}: no run folder, no stage that has run here and no MLflow run of one; `ls -d .runs/*/*/*` shows them"
    )
