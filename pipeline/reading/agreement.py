"""Whether a replayed step agrees with its record, and how that is shown."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.curves import is_clocked
from pipeline.reading.console import EscapingConsole

TOLERANCE = 1e-6
SHOWN_NAMES = 3
PIPED_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Compared:
    """A value that was logged, and what the replay has for it; None where there is none or it is not finite."""

    name: str
    logged: float | None
    replayed: float | None

    @property
    def difference(self) -> float | None:
        """Absolute; None where one side alone has a value."""
        if self.logged is None or self.replayed is None:
            return 0.0 if self.logged == self.replayed else None
        return abs(self.logged - self.replayed)

    @property
    def agrees(self) -> bool:
        """Whether the difference is at most `TOLERANCE`, of the logged value where that is above 1."""
        return self.difference is not None and self.difference <= TOLERANCE * max(1.0, abs(self.logged or 0.0))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step beside its record.

    Attributes:
        run: the run folder.
        step: from 1, as logged.
        start: the step of the save that the replay began with; 0 for the start of the run.
        metrics: all that no clock decides, by name.
        rows: what was trained on, a row per trajectory as in samples.jsonl.
        samples: per row of samples.jsonl its numbers; the rows of a step are the first of `rows`.
        first_apart: the first step after `start` of which a metric differs; None where all agree.
    """

    run: Path
    step: int
    start: int
    metrics: list[Compared]
    rows: list[dict[str, Any]]
    samples: list[list[Compared]]
    first_apart: int | None

    @property
    def apart(self) -> list[Compared]:
        """Everything that differs."""
        of_rows = [
            Compared(f"row {number} {each.name}", each.logged, each.replayed)
            for number, row in enumerate(self.samples)
            for each in row
        ]
        return [each for each in [*self.metrics, *of_rows] if not each.agrees]


def compare(logged: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[Compared]:
    """The numbers of both sides by name, those left out that a clock decides."""
    names = [name for name, value in {**logged, **replayed}.items() if not isinstance(value, str) and name != "step"]
    kept = sorted(name for name in names if not is_clocked(name))
    return [Compared(name, _finite(logged.get(name)), _finite(replayed.get(name))) for name in kept]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def summary(replayed: Replayed) -> str:
    """One line: that everything agrees, or what does not."""
    start = f"the save of step {replayed.start}" if replayed.start else "the start of the run"
    title = f"{replayed.run.parents[1].name} step {replayed.step}, replayed from {start}"
    counted = f"{len(replayed.metrics)} metrics" + (f" and {len(replayed.samples)} logged rows" if replayed.samples else "")
    apart = replayed.apart
    if not apart:
        return f"{title}: {counted} agree within {TOLERANCE:g} (of the logged value where that is above 1)"
    names = ", ".join(each.name for each in apart[:SHOWN_NAMES]) + (", ..." if len(apart) > SHOWN_NAMES else "")
    earlier = replayed.first_apart
    since = f"; it begins at step {earlier}" if earlier is not None and earlier < replayed.step else ""
    return f"{title}: of {counted}, {len(apart)} values differ by more than {TOLERANCE:g}: {names}{since}"


def as_json(replayed: Replayed, *, rows: bool) -> str:
    """Everything, for programs; with `rows` the trajectories, too."""
    tree = {
        "run": str(replayed.run),
        "step": replayed.step,
        "start": replayed.start,
        "agrees": not replayed.apart,
        "first_apart": replayed.first_apart,
        "metrics": [_tree(each) for each in replayed.metrics],
    }
    if rows:
        logged = [[_tree(each) for each in row] for row in replayed.samples]
        found = [{"replayed": row, "compared": beside} for row, beside in zip_longest(replayed.rows, logged)]
        tree |= {"rows": found}
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, indent=1)


def _tree(each: Compared) -> dict[str, Any]:
    return asdict(each) | {"difference": each.difference, "agrees": each.agrees}


def print_replayed(replayed: Replayed, *, rows: bool) -> None:
    """A row per metric; with `rows` a second table, of the trajectories; plain text where the output is no terminal."""
    console = EscapingConsole(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    table = _table("metric", "logged", "replayed", "difference")
    for each in replayed.metrics:
        table.add_row(each.name, _shown(each.logged), _shown(each.replayed), _marked([each]))
    console.print(table)
    if rows:
        numbers = [name for name, value in replayed.rows[0].items() if not isinstance(value, str)]
        table = _table("row", *(name.removeprefix("term/") for name in numbers), "stop", "difference")
        for number, (row, logged) in enumerate(zip_longest(replayed.rows, replayed.samples)):
            table.add_row(str(number), *(_shown(row[name]) for name in numbers), row["stop"], _marked(logged or []))
        console.print(table)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("metric", "row", "stop") else "right")
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


def _marked(compared: Sequence[Compared]) -> Text:
    """The largest difference, marked where one is too large; nothing where nothing was logged."""
    if not compared:
        return Text("")
    known = [each.difference for each in compared if each.difference is not None]
    words = f"{max(known):.1g}" if len(known) == len(compared) else "one side only"
    return Text(words, style="" if all(each.agrees for each in compared) else "bold red")
