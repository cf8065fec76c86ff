"""Where a file came from as one page: the lineage drawn, evaluation, curves, samples, parameters."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.lineage.records import run_page
from pipeline.lineage.whence import BOUNDS, Origin
from pipeline.pages.chart import charts
from pipeline.pages.compare_page import measured
from pipeline.pages.lineage import draw
from pipeline.pages.page import render
from pipeline.reading.measured import measure
from pipeline.reading.samples import Aligned, align
from pipeline.reading.wording import facts
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder

SAMPLES = 8


def whence_page(origin: Origin, root: Path) -> str:
    """The HTML.

    Args:
        origin: what `whence` found.
        root: the repository.
    """
    made = origin.steps[-1]
    run = made.run
    record = Record(RunFolder(root / run.folder)) if run else None
    return render(
        "whence.html.jinja",
        title=f"Where {origin.file} came from",
        origin=origin,
        made=made,
        page=run_page(run.tracking_uri, run.mlflow) if run and run.mlflow else None,
        drawing=draw(origin),
        evaluation=list(_evaluation(origin.evaluation)),
        curves=charts([record.metrics]) if record else [],
        metrics=[(key, *measured(value)) for key, value in measure(record).items()] if record else [],
        samples=_samples(record) if record else [],
    )


def _evaluation(evaluation: Mapping[str, float]) -> Iterator[dict[str, str]]:
    for key, value in evaluation.items():
        if not key.endswith(BOUNDS):
            low, high, rows = (evaluation.get(f"{key}{bound}") for bound in BOUNDS)
            interval = "" if low is None or high is None else f"[{low:z.3f}, {high:z.3f}]"
            yield {"key": key, "value": f"{value:z.3f}", "interval": interval, "rows": "" if rows is None else f"{rows:.0f}"}


def _samples(record: Record) -> list[dict[str, Any]]:
    """A few of the last step with samples."""
    rows = align([record.samples()])
    last = [row for row in rows if row.answers[0].step == rows[-1].answers[0].step]
    return [_sample(row) for row in last[:SAMPLES]]


def _sample(row: Aligned) -> dict[str, Any]:
    (answer,) = row.answers
    return {"step": answer.step, "prompt": row.prompt, "text": answer.text, "facts": facts(answer)}
