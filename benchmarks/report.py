"""What a benchmark says: a table, the bars it is held to, and what changed since the last time on the same machine."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOSS_SHOWN = 0.05
"""A bar's figure that fell by more than this share is named."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio within one run that must reach `least`: machines differ, the ratios of one run hardly do.

    `least` of None is a figure that is only watched.
    """

    name: str
    value: float
    least: float | None = None

    @property
    def verdict(self) -> str:
        if self.least is None:
            return "-"
        return "met" if self.value >= self.least else "MISSED"


@dataclass(slots=True)
class Report:
    """A benchmark's result.

    Attributes:
        title: its name.
        workload: what was done, in a sentence or two.
        columns: of the table.
        rows: cells as text.
        bars: what is asserted of it.
    """

    title: str
    workload: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: list[Bar] = field(default_factory=list)

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.workload, table(self.columns, self.rows)]
        if self.bars:
            rows = [(bar.name, f"{bar.value:.2f}", shown_least(bar), bar.verdict) for bar in self.bars]
            parts.append(table(("bar", "measured", "at least", ""), rows))
        return "\n\n".join(parts) + "\n"


def shown_least(bar: Bar) -> str:
    return "-" if bar.least is None else f"{bar.least:g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def keep(reports: Sequence[Report], head: str, folder: Path, name: str) -> list[str]:
    """Writes `NAME.md` and, for the next comparison, `NAME.json`; what was not measured this time stays as it was.

    Args:
        reports: what was measured.
        head: the text above them.
        folder: where results are kept.
        name: of the machine.

    Returns:
        One line per bar that lost more than `LOSS_SHOWN` since it was measured here before.
    """
    path = folder / f"{name}.json"
    known: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.is_file() else {}
    before = {bar: value for report in known.values() for bar, value in _bars(report).items()}
    lost = [
        f"{bar.name}: {bar.value:.2f}, was {before[bar.name]:.2f} ({bar.value / before[bar.name] - 1:+.0%})"
        for report in reports
        for bar in report.bars
        if bar.name in before and bar.value < (1 - LOSS_SHOWN) * before[bar.name]
    ]
    known |= {r.title: {"text": r.markdown(), "bars": {bar.name: bar.value for bar in r.bars}} for r in reports}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    (folder / f"{name}.md").write_text("\n".join([head, *(str(known[title]["text"]) for title in sorted(known))]))
    return lost


def _bars(report: Mapping[str, object]) -> dict[str, float]:
    bars = report["bars"]
    assert isinstance(bars, dict)
    return bars
