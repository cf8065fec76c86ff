"""Runs as their folders tell them: what each was, what it measured and generated, how it ended."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError
from pipeline.supervise import is_held
from pipeline.tracking.run_folder import RunFolder, read_json


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
    def seconds(self) -> float | None:
        """From its first start to its end, pauses included; None without an orderly end."""
        return round(self.end["time_s"] - self.started_s, 3) if "time_s" in self.end else None

    @property
    def finished(self) -> bool:
        return self.end.get("code") == 0

    @property
    def alive(self) -> bool:
        """Whether its trainer lives."""
        return is_held(self.folder.lock)

    @property
    def mlflow_id(self) -> str | None:
        """Of its MLflow run; None when none was fed (yet)."""
        return read_json(self.folder.feeder_note).get("run_id") or None

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Every metric by name, in the order in which they first came."""
        found: dict[str, Series] = {}
        for line in _lines(self.folder.metrics):
            for key, value in line["metrics"].items():
                if value is not None:
                    series = found.setdefault(key, Series())
                    series.steps.append(line["step"])
                    series.values.append(value)
        return found

    def times(self) -> dict[int, float]:
        """Step -> Unix time at which its metrics were logged."""
        return {line["step"]: line["time_s"] for line in _lines(self.folder.metrics)}

    def samples(self) -> Iterator[dict[str, Any]]:
        """What it generated, a row each, `step` first; none once `pipeline gc` has removed them."""
        return _lines(self.folder.samples)


def all_runs(home: Path) -> list[RunFolder]:
    """Every run below `.runs`, in order of their last starts.

    Args:
        home: the folder with `.runs` (`pipeline.tracking.home`).
    """
    abouts = (home / ".runs").glob("*/*/*/run.json")
    return [RunFolder(path.parent) for path in sorted(abouts, key=lambda path: path.stat().st_mtime)]


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


def _find(home: Path, name: str, folders: Sequence[RunFolder]) -> RunFolder:
    named = RunFolder((home / name).resolve())
    if named.about.exists():
        return named
    for folder in reversed(folders):
        if name in (folder.stage, read_json(folder.feeder_note).get("run_id")):
            return folder
    raise ParamsError(f"{name}: no run folder, no stage that has run here and no MLflow run of one; `ls .runs/*/*` shows them")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file, a torn last one and damaged ones left out."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):
                    yield json.loads(line)
