"""A comparison as one page: configuration, evaluation, curves on common axes, metrics, samples side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.lineage.records import page_of
from pipeline.pages.chart import COLOURS, charts
from pipeline.pages.page import render
from pipeline.reading.compare import Comparison, Metric
from pipeline.reading.judged import Interval, Judged
from pipeline.reading.measured import Measured
from pipeline.reading.noise import Spread
from pipeline.reading.samples import Aligned, Parting
from pipeline.reading.wording import facts, overlaps, parting, progress, shown, verdicts

MAX_STEPS = 6
"""Steps whose samples are shown, evenly spread."""
ENDS = "∎"
"""What is marked in an answer that ends where others go on."""
STRIP = 180
"""Width of the drawing of intervals."""


def compare_page(comparison: Comparison) -> str:
    """The HTML."""
    names = [f"{label} {side.title}" for label, side in zip(comparison.labels, comparison.sides, strict=True)]
    return render(
        "compare.html.jinja",
        title=" against ".join(side.given for side in comparison.sides),
        labels=comparison.labels,
        names=names,
        sides=list(_sides(comparison)),
        notes=[note for side in comparison.sides for note in side.notes],
        config=[(row.key, [shown(value) for value in row.values]) for row in comparison.config],
        judged=[_judged(row) for row in comparison.judged],
        curves=charts([side.record.metrics if side.record else {} for side in comparison.sides]),
        metrics=[_metric(row) for row in comparison.metrics],
        conclusions=comparison.conclusions,
        hint=comparison.hint,
        samples=_samples(comparison.samples),
    )


def _sides(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for label, side, repeats in zip(comparison.labels, comparison.sides, comparison.repeats, strict=True):
        yield {
            "label": label,
            "title": side.title,
            "progress": progress(side.record),
            "seeds": len(repeats.runs) if repeats else "-",
            "place": side.place,
            "page": page_of(side.record) if side.record else None,
        }


def _judged(row: Judged) -> dict[str, Any]:
    known = [value for value in row.values if value]
    low, high = min(value.low for value in known), max(value.high for value in known)
    return {
        "key": row.key,
        "shown": [f"{value.value:z.3f} [{value.low:z.3f}, {value.high:z.3f}]" if value else "-" for value in row.values],
        "verdicts": overlaps(row),
        "strip": [_bar(value, index, low, high - low or 1.0) if value else None for index, value in enumerate(row.values)],
    }


def _bar(value: Interval, index: int, low: float, span: float) -> dict[str, Any]:
    places = [round(4 + (each - low) / span * (STRIP - 8), 1) for each in (value.low, value.value, value.high)]
    return {"colour": index % COLOURS, "y": 10 * index + 5} | dict(zip(("low", "value", "high"), places, strict=True))


def _metric(row: Metric) -> dict[str, Any]:
    sides = zip(row.values, row.spreads, ["", *verdicts(row)], strict=True)
    return {"key": row.key, "cells": [(*measured(value), _spread(spread), verdict) for value, spread, verdict in sides]}


def measured(value: Measured | None) -> tuple[str, str]:
    """Last and best value, each with its step."""
    if value is None:
        return "-", "-"
    best = "" if value.best is None else f"{value.best:z.4g} @{value.best_step}"
    return f"{value.last:z.4g} @{value.last_step}", best


def _spread(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.mean:z.4g} ± {spread.std:.2g}"


def _samples(samples: Sequence[Aligned]) -> Mapping[int, list[dict[str, Any]]]:
    """Step -> its rows, for a few steps."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample.answers[0].step, []).append(_sample(sample))
    return {step: by_step[step] for step in _spread_out(list(by_step))}


def _sample(sample: Aligned) -> dict[str, Any]:
    answers = []
    for index, answer in enumerate(sample.answers):
        same, mark, rest = _cut(answer.text, sample.parting, index)
        answers.append({"step": answer.step, "facts": facts(answer), "same": same, "mark": mark, "rest": rest})
    subject = f"{sample.subject}: " if sample.subject else ""
    return {"subject": subject, "prompt": sample.prompt, "parting": parting(sample), "answers": answers}


def _cut(text: str, parting: Parting | None, index: int) -> tuple[str, str, str]:
    """What answers have in common, the first difference (a token where it is known, else a character), and what follows."""
    if parting is None:
        return text, "", ""
    token = parting.texts[index] if parting.texts else ""
    end = parting.at + (len(token) if token and text.startswith(token, parting.at) else 1)
    mark = text[parting.at : end].replace("\n", "⏎\n") or ENDS
    return text[: parting.at], mark, text[end:]


def _spread_out(steps: Sequence[int]) -> list[int]:
    """At most `MAX_STEPS` of them, first and last included."""
    if len(steps) <= MAX_STEPS:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (MAX_STEPS - 1))] for index in range(MAX_STEPS)]
