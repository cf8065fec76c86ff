"""A comparison on a terminal: tables that fit 100 columns, plain text where the output is piped."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.reading.compare import Comparison
from pipeline.reading.console import EscapingConsole
from pipeline.reading.judged import Interval
from pipeline.reading.measured import Measured
from pipeline.reading.samples import Aligned, Answer, Parting
from pipeline.reading.wording import facts, overlaps, parting, progress, shown, verdicts
from pipeline.tracking.records import Record

PIPED_WIDTH = 100
SAMPLES = 3
PROMPT_CHARS = 160
BEFORE_CHARS, AFTER_CHARS = 80, 240
"""How much of an answer stands around the place where the answers part."""
DIFFERS = "▶"


def print_comparison(comparison: Comparison) -> None:
    """Prints it on stdout."""
    console = EscapingConsole(highlight=False)
    if not console.is_terminal:
        console = EscapingConsole(highlight=False, width=PIPED_WIDTH)
    for part in _parts(comparison):
        console.print(part)


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    yield _sides(comparison)
    yield from (Text(note, style="yellow") for side in comparison.sides for note in side.notes)
    if len(comparison.equal) < len(comparison.sides) - 1:
        yield from _differences(comparison)
    yield Text("")
    yield from (Text(line, style="bold") for line in comparison.conclusions)


def _differences(comparison: Comparison) -> Iterator[RenderableType]:
    yield _heading("What differs in the configuration")
    yield _config(comparison) if comparison.config else Text("nothing")
    if comparison.metrics:
        yield _heading("Metrics: last value (@step where it is not the run's last), best value @step")
        yield _metrics(comparison)
        yield _noise(comparison)
    if comparison.judged:
        yield _heading("Evaluation on the held-out panel, with intervals")
        yield _judged(comparison)
    yield from _samples(comparison)


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _sides(comparison: Comparison) -> Table:
    table = _table("", "run", "steps", "seeds", "from")
    for label, side, repeats in zip(comparison.labels, comparison.sides, comparison.repeats, strict=True):
        seeds = str(len(repeats.runs)) if repeats else ""
        table.add_row(label, Text(side.title), progress(side.record), seeds, Text(side.place))
    return table


def _config(comparison: Comparison) -> Table:
    table = _table("key", *comparison.labels)
    for row in comparison.config:
        table.add_row(Text(row.key), *(Text(shown(value)) for value in row.values))
    return table


def _metrics(comparison: Comparison) -> Table:
    others = comparison.labels[1:] if not comparison.hint else []
    table = _table("metric", *comparison.labels, *(f"{label} vs A" for label in others))
    between = ", " if len(comparison.sides) == 2 else "\n"  # more columns than two are narrow
    for row in comparison.metrics:
        cells = [_measured(value, side.record, between) for value, side in zip(row.values, comparison.sides, strict=True)]
        table.add_row(Text(row.key), *cells, *(verdicts(row) if others else ()))
    return table


def _measured(value: Measured | None, record: Record | None, between: str) -> str:
    if value is None or record is None:
        return "-"
    last = f"{value.last:z.4g}" + ("" if value.last_step == record.steps else f" @{value.last_step}")
    return last if value.best is None else f"{last}{between}best {value.best:z.4g} @{value.best_step}"


def _noise(comparison: Comparison) -> Text:
    if comparison.hint:
        return Text(f"Whether other seeds differ as much is unknown: {comparison.hint}", style="yellow")
    return Text("inside/outside the spread of seeds (t-test, 95 %; in brackets the runs with repeated seeds)", style="dim")


def _judged(comparison: Comparison) -> Table:
    table = _table("metric", *comparison.labels, *(f"{label} vs A" for label in comparison.labels[1:]))
    for row in comparison.judged:
        table.add_row(Text(row.key), *map(_interval, row.values), *overlaps(row))
    return table


def _interval(interval: Interval | None) -> Text:
    return Text("-" if interval is None else f"{interval.value:z.3f} [{interval.low:z.3f}, {interval.high:z.3f}]")


def _samples(comparison: Comparison) -> Iterator[Text]:
    if not comparison.samples:
        return
    last = max(sample.answers[0].step for sample in comparison.samples)
    firsts: dict[str, Aligned] = {}
    for sample in comparison.samples:
        if sample.answers[0].step == last:
            firsts.setdefault(sample.prompt, sample)
    yield _heading(f"Samples: the same prompt at step {last}; {DIFFERS} is where the answers part")
    for sample in list(firsts.values())[:SAMPLES]:
        yield from _sample(comparison.labels, sample)


def _sample(labels: Sequence[str], sample: Aligned) -> Iterator[Text]:
    prompt = sample.prompt if len(sample.prompt) <= PROMPT_CHARS else "…" + sample.prompt[-PROMPT_CHARS:]
    yield Text("\n" + " ".join(filter(None, (sample.subject, printable(prompt)))), style="italic")
    if sample.parting is not None:
        yield Text(f"parts at {printable(parting(sample))}", style="dim")
    for label, answer in zip(labels, sample.answers, strict=True):
        told = "  ".join(f"{name} {value}" for name, value in facts(answer))
        yield Text(f"{label}  {printable(told)}", style="dim")
        yield Text("   ") + _answer(answer, sample.parting)


def _answer(answer: Answer, parting: Parting | None) -> Text:
    at = len(answer.text) if parting is None else parting.at
    before, after = answer.text[max(0, at - BEFORE_CHARS) : at], answer.text[at : at + AFTER_CHARS]
    text = Text(("…" if at > BEFORE_CHARS else "") + printable(before))
    if parting is not None:
        text.append(DIFFERS + printable(after) + ("…" if len(answer.text) > at + AFTER_CHARS else ""), style="bold")
    return text


def printable(text: str) -> str:
    """Generated text without what could steer a terminal; line ends as signs."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in text)
