"""The lineage at a glance: of every stage its state, what it measured, its age and its run."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pipeline.lineage.headlines import HEADLINES
from pipeline.lineage.history import lock_at
from pipeline.lineage.plan import Planned, Verdict
from pipeline.lineage.records import final_metrics, page_of
from pipeline.lineage.runs import run_that_made
from pipeline.reading.attempts import last_attempt, what_changed_since
from pipeline.reading.console import EscapingConsole
from pipeline.reading.words import duration, figure
from pipeline.supervise import is_held
from pipeline.tracking.description import LIBRARIES
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder, read_json

STATES = {
    Verdict.UP_TO_DATE: "up to date",
    Verdict.RUNS: "out of date",
    Verdict.RESTORED: "in the cache",
    Verdict.MAY_RUN: "behind one that runs",
}
PIPED_WIDTH = 140
COLOURS = {"up to date": "green", "running": "cyan", "in the cache": "blue", "behind one that runs": "yellow"}


@dataclass(frozen=True, slots=True)
class State:
    """A stage as it is now.

    Attributes:
        stage: its name.
        under: the stage below which it is drawn: the one whose weights it starts from, or the last one that it reads.
        state: one of `STATES`, `running`, `stopped`, `failed`.
        note: the first cause, the reason of the failure, or how far it is; empty when all is well.
        metrics: what to look at first, from `metrics/<stage>.json`.
        age_s: since the end of the run that made the outputs; None where its run folder is gone.
        run: that run's folder.
        mlflow: id of its MLflow run.
        url: that run's page; where no server owns the store, `make ui` must run.
        versions: libraries that it was made with and that are others now: name to version.
    """

    stage: str
    under: str | None
    state: str
    note: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    age_s: float | None = None
    run: str | None = None
    mlflow: str | None = None
    url: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def status(plan: Sequence[Planned], root: Path, home: Path) -> list[State]:
    """The state of every stage of a plan.

    Args:
        plan: of `pipeline.lineage.plan.read_plan`, parents first.
        root: the repository.
        home: where `.runs` is.
    """
    lock, runs = lock_at(root, None), home / ".runs"
    installed = {name: version(name) for name in LIBRARIES}
    states: list[State] = []
    for planned in plan:
        made = lock.stages.get(planned.stage) if lock is not None else None
        folder = run_that_made(made, runs) if made is not None else None
        record = Record(folder) if folder is not None else None
        values = final_metrics(root, planned.stage)
        state, note = _state(planned, root, home)
        states.append(
            State(
                stage=planned.stage,
                under=_under(planned, made.deps if made is not None else {}),
                state=state,
                note=note,
                metrics={key: values[key] for key in HEADLINES.get(planned.stage, {}) if key in values},
                age_s=round(time.time() - ended, 1) if record is not None and (ended := record.ended_s) is not None else None,
                run=str(record.folder.path.relative_to(home)) if record is not None else None,
                mlflow=record.mlflow_id if record is not None else None,
                url=page.url if record is not None and (page := page_of(record)) else None,
                versions=_others(record, installed) if record is not None else {},
            )
        )
    return states


def _state(planned: Planned, root: Path, home: Path) -> tuple[str, str]:
    """State and note. What runs now counts before what the plan says, and so does a failure of what the stage would do now."""
    if is_held(home / ".runs" / planned.stage / "lock"):
        return "running", _how_far(home, planned.stage)
    state, note = STATES[planned.verdict], planned.causes[0] if planned.causes else ""
    attempt = last_attempt(home, planned.stage) if planned.verdict in (Verdict.RUNS, Verdict.MAY_RUN) else None
    if attempt is None or attempt.code == 0:
        return state, note
    if planned.verdict is Verdict.MAY_RUN or None in planned.inputs.values():  # what it is going to read is not known
        return state, f"{note}; {attempt}"
    if since := what_changed_since(attempt, root, planned.params, planned.inputs):
        return state, f"{note}; {attempt} {since}"
    return "stopped" if attempt.stopped else "failed", attempt.reason


def _how_far(home: Path, stage: str) -> str:
    """Of the run at work: its step, and the time left at the speed it has had; empty before its steps begin."""
    for path in (home / ".runs" / stage).glob("*/*/progress.json"):
        record = Record(RunFolder(path.parent))
        if not record.alive or not (told := read_json(path)):
            continue
        total, taken = told["total"], record.steps - told["done"]
        left = (time.time() - told["began_s"]) / taken * (total - record.steps) if taken > 0 else None
        return f"step {record.steps} of {total}" + (f", about {duration(left)} left" if left is not None else "")
    return ""


def _under(planned: Planned, deps: Mapping[str, str]) -> str | None:
    """The stage whose weights it starts from: those that it names first; without weights the last stage that it reads."""
    weights = [Path(path).stem for path in deps if path.startswith("checkpoints/") and path.endswith(".pth")]
    if weights and planned.stage != "eval":
        return next((name for name in ("full_sft", "pretrain") if name in weights), weights[0])
    others = [name for name in planned.parents if name != "code"]
    return None if planned.stage == "eval" or not others else others[0]


def _others(record: Record, installed: Mapping[str, str]) -> dict[str, str]:
    tags = record.about.get("tags", {})
    return {name: made for name, now in installed.items() if (made := tags.get(f"version.{name}", now)) != now}


def as_json(states: Sequence[State]) -> str:
    """Everything, for programs."""
    return json.dumps([asdict(state) for state in states], ensure_ascii=False, allow_nan=False, indent=2)


def print_status(states: Sequence[State]) -> None:
    """The lineage as a tree, a line per stage, and what to do about it; plain text where the output is no terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "state", "age"):
        table.add_column(name, no_wrap=True)
    for name in ("measured", "run, or why"):  # give way where the terminal is narrow or the reason long
        table.add_column(name)
    for state, branch in _tree(states):
        shown = ", ".join(f"{key} {figure(value)}" for key, value in list(state.metrics.items())[:1])
        age = duration(state.age_s) if state.age_s is not None and state.age_s >= 0 else ""  # the clock was set back
        coloured = Text(state.state, style=COLOURS.get(state.state, "red"))
        table.add_row(
            Text(branch + state.stage),
            coloured,
            age,
            Text(shown, no_wrap=True, overflow="ellipsis"),
            Text(
                state.note or state.run or "",
                style=f"dim link {state.url}" if state.url else "dim",
                no_wrap=True,
                overflow="ellipsis",
            ),
        )
    console = EscapingConsole(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(table)
    for line in _advice(states):
        console.print(line, markup=False)


def _tree(states: Sequence[State]) -> Iterator[tuple[State, str]]:
    """The states in the order of a tree, each with what is drawn before its name."""
    names = {state.stage for state in states}
    below: dict[str | None, list[State]] = {}
    for state in states:
        below.setdefault(state.under if state.under in names else None, []).append(state)

    def walk(parent: str | None, indent: str) -> Iterator[tuple[State, str]]:
        children = below.get(parent, [])
        for number, child in enumerate(children, start=1):
            last = number == len(children)
            mark = "" if parent is None else ("└─ " if last else "├─ ")
            yield child, indent + mark
            yield from walk(child.stage, indent + ("" if parent is None else "   " if last else "│  "))

    yield from walk(None, "")


def _advice(states: Sequence[State]) -> Iterator[str]:
    """What the table cannot say in a line."""
    changed: dict[tuple[str, str], list[str]] = {}
    for state in states:
        for name, made in state.versions.items():
            changed.setdefault((name, made), []).append(state.stage)
    for (name, made), stages in changed.items():
        made_with = f"{', '.join(stages)} were made with {made}"
        yield f"warning: {name} {version(name)} is installed, but {made_with}; reruns may give other bytes"
    if waiting := [state.stage for state in states if state.state not in ("up to date", "running")]:
        yield f"{len(waiting)} of {len(states)} stages wait for `dvc repro`; `python -m pipeline plan` says why and how long"
