"""What a flow run leaves to read: an artifact in Markdown."""

from collections.abc import Sequence

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows.rebuild import Ran
from pipeline.lineage.plan import Planned


def publish(stage: str, ran: Sequence[Ran], plan: Sequence[Planned]) -> None:
    """Writes the artifact `plan-<stage>`: what ran and why, and what is left as it was. Without the API there is none."""
    try:
        create_markdown_artifact(_table(ran, plan), key=f"plan-{stage.replace('_', '-').replace('@', '-')}")
    except httpx.HTTPError as error:
        get_run_logger().warning("No report: the Prefect API does not take it (%s)", error)


def _table(ran: Sequence[Ran], plan: Sequence[Planned]) -> str:
    lines = ["| stage | result | seconds | why |", "| --- | --- | --- | --- |"]
    names = {done.planned.stage for done in ran}
    for done in ran:
        lines.append(f"| {done.planned.stage} | {done.error or 'ran'} | {done.seconds:.0f} | {'; '.join(done.planned.causes)} |")
    lines += [f"| {planned.stage} | {planned.verdict} | | |" for planned in plan if planned.stage not in names]
    return "\n".join(lines)
