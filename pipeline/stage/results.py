"""The line with which a stage ends: what came out, as its files have it."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.lineage.headlines import HEADLINES, JUDGED_BY
from pipeline.tracking.run_folder import read_json

COUNTED = {"data": "data/prepared", "encode": "data/encoded"}
"""Stages that make sets, and where their reports lie."""


def results(stage: str, root: Path) -> str:
    """What to look at first of what a stage has just written: metrics, or counts of rows."""
    name, _, item = stage.partition("@")
    return ", ".join(("done", *_figures(name, item, root)))


def _figures(name: str, item: str, root: Path) -> Iterator[str]:
    if name in COUNTED:
        report = read_json(root / COUNTED[name] / item / "report.json")
        counts = {"rows": "train", "held out": "held_out", "dropped": "dropped"}
        yield from (f"{report[key]} {words}" for words, key in counts.items() if key in report)
        return
    measured = read_json(root / f"metrics/{name}.json")
    if name == "eval":
        judged = ((model, metric, measured.get(model, {}).get(metric)) for model, metric in JUDGED_BY.items())
        yield from (f"{model} {metric} {value:.4g}" for model, metric, value in judged if value is not None)
        return
    yield from (f"{metric} {measured[metric]:.4g}" for metric in HEADLINES.get(name, {}) if measured.get(metric) is not None)
