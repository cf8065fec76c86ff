"""What a flow run leaves to read: an artifact in Markdown."""

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact

from flows.rebuild import Ran
from pipeline.lineage.plan import Planned


def publish(stage: str, ran: Sequence[Ran], plan: Sequence[Planned]) -> None:
    """Writes the artifact `plan-<stage>`: what ran and why, and what is left as it was."""
    create_markdown_artifact(_table(ran, plan), key=f"plan-{stage.replace('_', '-').replace('@', '-')}")


def _table(ran: Sequence[Ran], plan: Sequence[Planned]) -> str:
    lines = ["| stage | result | seconds | why |", "| --- | --- | --- | --- |"]
    names = {done.planned.stage for done in ran}
    for done in ran:
        lines.append(f"| {done.planned.stage} | {done.error or 'ran'} | {done.seconds:.0f} | {'; '.join(done.planned.causes)} |")
    lines += [f"| {planned.stage} | {planned.verdict} | | |" for planned in plan if planned.stage not in names]
    return "\n".join(lines)
