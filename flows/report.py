"""What a flow run leaves to read: artifacts in Markdown with the plan, final metrics and MLflow runs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows.rebuild import BroughtUp
from pipeline.lineage.headlines import EVAL_HEADLINES, HEADLINES
from pipeline.lineage.plan import Planned
from pipeline.lineage.records import LOCAL_UI, TrackedRun, final_metrics, tracked_run


def publish(stage: str, done: BroughtUp, *, root: Path, home: Path, title: str = "", closing: str = "") -> None:
    """Writes the artifact `plan-<stage>`: what ran and why, what is left as it was, what came out, and where its curves are.

    Without the Prefect API there is none.

    Args:
        stage: what was brought up to date.
        done: what became of all that was asked for.
        root: where they ran.
        home: where their run folders are.
        title: stands first.
        closing: stands last.
    """
    plan = done.plan
    runs = {planned.stage: tracked_run(root, home, planned.stage) for planned in plan}
    parts = [
        title,
        _plan_table(done),
        _metrics_table(root, plan, runs),
        _eval_table(root, plan),
        ui_hint(runs.values()),
        closing,
    ]
    leave("\n\n".join(filter(None, parts)), artifact_key(f"plan-{stage}"))


def leave(markdown: str, key: str) -> None:
    """Creates an artifact; a line in the log says so where the Prefect API does not take it."""
    try:
        create_markdown_artifact(markdown, key=key)
    except httpx.HTTPError as error:
        get_run_logger().warning("No report: the Prefect API does not take it (%s)", error)


def artifact_key(name: str) -> str:
    """The name in the letters that Prefect allows."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def link(run: TrackedRun | None) -> str:
    """To the MLflow run, where there is one."""
    return f"[MLflow]({run.url})" if run else ""


def ui_hint(runs: Iterable[TrackedRun | None]) -> str:
    """How to open links to a store that no server owns; empty where there are none."""
    local = any(run and not run.served for run in runs)
    return f"The MLflow links open while `make ui` runs ({LOCAL_UI})." if local else ""


def cell(text: str) -> str:
    """The text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def number(value: float | None) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:.4g}"


def _plan_table(done: BroughtUp) -> str:
    lines = ["| stage | result | seconds | why |", "| --- | --- | --- | --- |"]
    names = {ran.planned.stage for ran in done.ran}
    for ran in done.ran:
        result, why = cell(ran.error or ran.result), cell("; ".join(ran.planned.causes))
        lines.append(f"| {ran.planned.stage} | {result} | {ran.seconds:.0f} | {why} |")
    lines += [
        f"| {planned.stage} | {planned.verdict} | | {cell('; '.join(planned.causes))} |"
        for planned in done.plan
        if planned.stage not in names
    ]
    return "\n".join(lines)


def _metrics_table(root: Path, plan: Sequence[Planned], runs: Mapping[str, TrackedRun | None]) -> str:
    rows = []
    for planned in plan:
        values = final_metrics(root, planned.stage) if planned.stage in HEADLINES else {}
        shown = [f"`{key}` {number(values[key])}" for key in HEADLINES.get(planned.stage, {}) if key in values]
        if shown or runs[planned.stage]:
            rows.append(f"| {planned.stage} | {', '.join(shown)} | {link(runs[planned.stage])} |")
    return "\n".join(["| stage | final metrics | run |", "| --- | --- | --- |", *rows]) if rows else ""


def _eval_table(root: Path, plan: Sequence[Planned]) -> str:
    if not any(planned.stage == "eval" for planned in plan):
        return ""
    values = final_metrics(root, "eval")
    models = list(dict.fromkeys(key.partition("/")[0] for key in values))
    lines = [f"| model on the held-out panel | {' | '.join(EVAL_HEADLINES)} |", "| --- |" + " --- |" * len(EVAL_HEADLINES)]
    for model in models:
        lines.append(f"| {model} | {' | '.join(number(values.get(f'{model}/{key}')) for key in EVAL_HEADLINES)} |")
    return "\n".join(lines) if models else ""
