"""How single facts of a comparison are put, on a terminal and on a page alike."""

import json
from typing import Any

from pipeline.reading.compare import Metric
from pipeline.reading.judged import Judged
from pipeline.reading.noise import Spread, Verdict
from pipeline.reading.samples import Aligned, Answer
from pipeline.tracking.records import Record


def progress(record: Record | None) -> str:
    """How far a run came."""
    if record is None:
        return "no folder here"
    return f"{record.steps}" + ("" if record.finished else ", running" if record.alive else ", not finished")


def shown(value: Any) -> str:
    """A value of the configuration; `-` for none."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def verdicts(metric: Metric) -> list[str]:
    """Per side after the first: whether it differs from the first by more than seeds do.

    `outside (6)`: of 6 runs with repeated seeds. `seeds: 0.5 ± 0.1`: nothing but the seed differs, and so much does it change.
    """
    first, *others = metric.spreads
    return [_verdict(verdict, first, other) for verdict, other in zip(metric.verdicts, others, strict=True)]


def _verdict(verdict: Verdict, first: Spread | None, other: Spread | None) -> str:
    if verdict == "same recipe" and first is not None:
        return f"seeds: {first.mean:z.3g} ± {first.std:.1g}"
    seeds = sum(each.seeds for each in (first, other) if each)
    return f"{verdict} ({seeds})" if verdict in ("inside", "outside") else verdict


def overlaps(judged: Judged) -> list[str]:
    """Per side after the first: what its interval says of the difference."""
    return ["-" if each is None else "intervals overlap" if each else "intervals apart" for each in judged.overlaps]


def parting(sample: Aligned) -> str:
    """Where answers part: `token 3: "cat" | " sound"`, or the character where no tokens are known; empty when they do not."""
    if sample.parting is None:
        return ""
    if sample.parting.token is None:
        return f"character {sample.parting.at + 1}"
    texts = (json.dumps(text, ensure_ascii=False) if text else "(end)" for text in sample.parting.texts)
    return f"token {sample.parting.token}: {' | '.join(texts)}"


def facts(answer: Answer) -> list[tuple[str, str]]:
    """Name and value of what a sample's row holds beside its text."""
    return [
        (name.removeprefix("term/"), f"{value:z.3g}" if isinstance(value, float) else str(value))
        for name, value in answer.facts.items()
    ]
