"""The flow `minimind`: brings a stage and everything before it up to date.

prefect deployment run minimind/grpo
prefect deployment run minimind/grpo -p overrides='["grpo.lr=1e-4"]'
"""

import os
import threading
from pathlib import Path
from typing import Any, cast

from prefect import flow
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.experiments import run_experiment
from flows.rebuild import Ran, Workspace, bring_up_all
from flows.report import publish
from pipeline.lineage.plan import read_plan

ROOT = Path(__file__).resolve().parents[1]


@flow(name="minimind", task_runner=cast(TaskRunner[Any], ThreadPoolTaskRunner()), persist_result=False)
def minimind(stage: str = "all", overrides: list[str] | None = None) -> None:
    """Brings `stage` (a name in dvc.yaml, or `all`) up to date; with overrides, in an isolated copy, as a DVC experiment.

    Raises:
        RuntimeError: a stage failed; those that do not need it have been brought up to date all the same.
        ExperimentFailed: the same, with overrides.
    """
    cores = os.cpu_count() or 1
    stop = threading.Event()
    if overrides:
        try:
            run_experiment(ROOT, stage, overrides, cores=cores, stop=stop)
        finally:
            stop.set()  # whatever ended the flow, no stage outlives it
        return
    ran: list[Ran] = []
    targets = () if stage == "all" else (stage,)
    try:
        bring_up_all(Workspace(ROOT, cores, stop=stop), targets, ran)
    finally:
        stop.set()
    publish(stage, ran, read_plan(ROOT, targets), root=ROOT, home=ROOT)
    if failed := [done.error for done in ran if done.error]:
        raise RuntimeError("; ".join(failed))
