"""Bringing stages up to date in the order of the lineage: siblings side by side, each as a task that Prefect retries.

DVC says what has to run or comes from its run cache; the plan is made anew after every stage, because a stage may come out
unchanged. What counts in the end is the last plan alone.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.tasks import exponential_backoff
from pydantic import Field

from flows.faults import FlowFault
from flows.gpus import gpu_slots
from pipeline.errors import PipelineError
from pipeline.lineage.execute import TIMED_OUT, Outcome, bring_up
from pipeline.lineage.plan import Planned, Verdict, read_plan
from pipeline.lineage.sharing import sole_runner

FINAL_CODES = {2, 3, 4, 7, 8, TIMED_OUT}
"""Configuration, data, numerics, a full disk, and a time limit: another attempt would end the same way. Memory (5) is not among
them, because it is often a neighbour's fault and a retry goes on from the last save."""
LOG_EVERY_S = 2.0
NAME_CHARS = 120
TimeLimit = Annotated[float, Field(gt=0, description="Seconds that an attempt at a stage may last before it saves and fails.")]
"""A parameter of every flow: Prefect refuses a run whose limit no attempt could keep."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where stages run, and with what.

    Attributes:
        root: a repository.
        cores: what all stages at work share.
        environment: variables of the stages on top of this process's own.
        timeout_s: what an attempt at a stage may last; None for any time.
        label: what stands behind a stage's name in Prefect: the overrides of an isolated copy.
        stop: when set, stages save and end, and none starts.
    """

    root: Path
    cores: int
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    label: str = ""
    stop: threading.Event = field(default_factory=threading.Event)


class StageFailed(FlowFault):
    """A stage did not end well; `retry` says whether it may when its command is given again, going on from its last save."""

    def __init__(self, stage: str, outcome: Outcome, *, retry: bool) -> None:
        super().__init__(f"{stage}: {outcome.reason} (exit code {outcome.code})")
        self.retry = retry


def worth_retrying(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's question after a failed attempt."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.retry


@dataclass(frozen=True, slots=True)
class Ran:
    """A stage that was not up to date, and what became of it: a `result` of `bring_up`, or an `error`."""

    planned: Planned
    seconds: float
    result: str = ""
    error: str = ""


def shown_name(*parts: str) -> str:
    """Of a run in Prefect: what there is of the parts, such as a stage and its overrides."""
    name = " · ".join(filter(None, parts))
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"


@dataclass(frozen=True, slots=True)
class BroughtUp:
    """What came of bringing targets up to date.

    Attributes:
        ran: the stages that had to run or came from the cache, in the order in which they ended.
        plan: of the targets and all that they need, made after that.
    """

    ran: list[Ran]
    plan: list[Planned]

    @property
    def faults(self) -> list[str]:
        """Why not everything is up to date: what failed, or where nothing did, what the plan still finds to do."""
        open_ = [planned for planned in self.plan if planned.verdict is not Verdict.UP_TO_DATE]
        left = [f"{planned.stage}: is not up to date ({planned.verdict}: {'; '.join(planned.causes)})" for planned in open_]
        return [done.error for done in self.ran if done.error] or left


@task(
    name="stage",
    task_run_name="{planned.stage}{workspace.label}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=10),
    retry_jitter_factor=0.5,
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
)
def run_stage(planned: Planned, workspace: Workspace, threads: int) -> str:
    """One stage on `threads` cores; whether it ran. Its whole output is in `.runs/<stage>/output.log`, its latest lines here."""
    logger = get_run_logger()
    stage, shown_at = planned.stage, 0.0

    def show(line: str) -> None:
        nonlocal shown_at
        if line.strip() and time.monotonic() - shown_at >= LOG_EVERY_S:
            shown_at = time.monotonic()
            logger.info(line[:1000])

    environment = {**workspace.environment, "OMP_NUM_THREADS": str(threads)}
    try:
        # In this order: who waits for another workspace's run of the recipe holds no GPU meanwhile.
        with (
            sole_runner(workspace.root, stage, planned.recipe, environment, workspace.stop),
            nullcontext() if planned.verdict is Verdict.RESTORED else gpu_slots(stage, workspace.root, workspace.stop),
        ):
            outcome = bring_up(
                workspace.root,
                stage,
                on_line=show,
                on_wait=logger.info,
                stop=workspace.stop,
                environment=environment,
                timeout_s=workspace.timeout_s,
            )
    except PipelineError as error:
        outcome = Outcome(error.exit_code, "; ".join(error.lines))
    if outcome.code != 0:
        raise StageFailed(stage, outcome, retry=outcome.code not in FINAL_CODES and not workspace.stop.is_set())
    return outcome.reason


def bring_up_all(workspace: Workspace, targets: tuple[str, ...]) -> BroughtUp:
    """Runs or restores what the targets (all stages when empty) need, parents first and each once."""
    ran: list[Ran] = []
    running: dict[str, tuple[Planned, float, PrefectFuture[str]]] = {}
    while True:
        over = {done.planned.stage for done in ran}
        plan = {planned.stage: planned for planned in read_plan(workspace.root, targets, unsettled=running)}
        ready = [
            planned
            for planned in plan.values()
            if not workspace.stop.is_set()
            and planned.verdict is not Verdict.UP_TO_DATE
            and planned.stage not in running
            and planned.stage not in over
            and all(plan[parent].verdict is Verdict.UP_TO_DATE for parent in planned.parents)
        ]
        threads = workspace.cores // max(1, min(workspace.cores, len(running) + len(ready)))
        for planned in ready[: workspace.cores - len(running)]:
            future = run_stage.submit(planned, workspace, threads)
            running[planned.stage] = planned, time.monotonic(), future
        if not running:
            return BroughtUp(ran, list(plan.values()))
        ran += _finished(running)


def _finished(running: dict[str, tuple[Planned, float, PrefectFuture[str]]]) -> list[Ran]:
    """Waits until at least one stage has ended, and takes those out."""
    ended: list[Ran] = []
    while not ended:
        for stage, (planned, started, future) in list(running.items()):
            future.wait(timeout=0.2)
            state = future.state  # once: it may change while it is looked at
            if state.is_final():
                del running[stage]
                end = {"result": future.result()} if state.is_completed() else {"error": state.message or str(state.name)}
                ended.append(Ran(planned, time.monotonic() - started, **end))
    return ended
