"""The flow `minimind`: brings a stage and everything before it up to date.

prefect deployment run minimind/grpo
"""

import os
from pathlib import Path
from typing import Any, cast

from prefect import flow
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.rebuild import Ran, Workspace, bring_up_all
from flows.report import publish
from pipeline.lineage.plan import read_plan

ROOT = Path(__file__).resolve().parents[1]


@flow(name="minimind", task_runner=cast(TaskRunner[Any], ThreadPoolTaskRunner()), persist_result=False)
def minimind(stage: str = "all") -> None:
    """Brings `stage` (a name in dvc.yaml, or `all`) up to date.

    Raises:
        RuntimeError: a stage failed; those that do not need it have been brought up to date all the same.
    """
    workspace = Workspace(ROOT, os.cpu_count() or 1)
    ran: list[Ran] = []
    targets = () if stage == "all" else (stage,)
    try:
        bring_up_all(workspace, targets, ran)
    finally:
        workspace.stop.set()  # whatever ended the flow, no stage outlives it
        publish(stage, ran, read_plan(ROOT, targets))
    if failed := [done.error for done in ran if done.error]:
        raise RuntimeError("; ".join(failed))
