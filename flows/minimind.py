"""The flow `minimind`: brings a stage and everything before it up to date.

prefect deployment run minimind/grpo
prefect deployment run minimind/grpo -p overrides='["grpo.lr=1e-4"]'
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.automations import FLOW, Restarts
from flows.experiments import run_experiment
from flows.faults import FlowFault, log_faults_as_lines
from flows.rebuild import TimeLimit, Workspace, bring_up_all, shown_name
from flows.report import publish
from pipeline.supervise.ancestry import Ancestor, watched

ROOT = Path(__file__).resolve().parents[1]


def run_name(parameters: Mapping[str, Any]) -> str:
    """What Prefect calls a flow run: its stage and its overrides."""
    return shown_name(parameters["stage"], " ".join(parameters.get("overrides") or ()))


@flow(
    name=FLOW,
    flow_run_name=lambda: run_name(flow_run.parameters),
    task_runner=cast(TaskRunner[Any], ThreadPoolTaskRunner()),
    persist_result=False,
)
def minimind(
    stage: str = "all", overrides: list[str] | None = None, timeout_s: TimeLimit | None = None, restarts: Restarts = 0
) -> None:
    """Brings a stage and everything before it up to date; with overrides, in an isolated copy, as a DVC experiment.

    Args:
        stage: a name in dvc.yaml, or `all`.
        overrides: parameters to change, such as `grpo.lr=1e-4`.
        timeout_s: seconds that an attempt at a stage may last before it saves and fails; null for any time.
        restarts: how often this run has crashed and been started again: the server counts.

    Raises:
        FlowFault: a stage failed, or is not up to date in the end because something changed meanwhile; those that do not need
            it have been brought up to date all the same.
        ExperimentFailed: the same, with overrides.
    """
    log_faults_as_lines()
    if restarts:
        get_run_logger().info("Started again after crash number %d; stages go on from saves that they have left", restarts)
    workspace = Workspace(ROOT, os.cpu_count() or 1, timeout_s=timeout_s)
    targets = () if stage == "all" else (stage,)
    try:
        with terminated_with_worker():
            if overrides:
                run_experiment(workspace, stage, overrides)
                return
            done = bring_up_all(workspace, targets)
    finally:
        workspace.stop.set()  # whatever ended the flow, no stage outlives it
    publish(stage, done, root=ROOT, home=ROOT)
    if done.faults:
        raise FlowFault("; ".join(done.faults))


@contextmanager
def terminated_with_worker() -> Iterator[None]:
    """Terminates this process, as a worker does that ends in order, when the worker that started it has been killed.

    The run is reported as crashed and started again, by that worker's successor. Without a worker, nothing is watched.
    """
    workers = [Ancestor.of(os.getppid())] if "PREFECT__WORKER_NAME" in os.environ else []
    with watched(workers, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        yield
