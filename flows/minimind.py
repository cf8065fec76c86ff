"""The flow `minimind`: brings a stage and everything before it up to date, siblings side by side, and retries what that can mend.

    prefect deployment run minimind/grpo

DVC says what has to run; the plan is made anew after every stage, because a stage may come out unchanged.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff

from pipeline.lineage.execute import Outcome, bring_up
from pipeline.lineage.plan import Planned, Verdict, read_plan

ROOT = Path(__file__).resolve().parents[1]
FINAL_CODES = {2, 3, 4}
"""Exit codes of configuration, data and numerics: another attempt would end the same way."""
LOG_EVERY_S = 2.0

_stop = threading.Event()


class StageFailed(Exception):
    """A stage did not end well."""

    def __init__(self, stage: str, outcome: Outcome) -> None:
        super().__init__(f"{stage}: {outcome.reason} (exit code {outcome.code})")
        self.outcome = outcome


def worth_retrying(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed stage may succeed when its command is given again, going on from its last save."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.outcome.code not in FINAL_CODES and not _stop.is_set()


@dataclass(frozen=True, slots=True)
class Ran:
    """A stage that the flow ran."""

    planned: Planned
    seconds: float
    error: str | None


@task(
    name="stage",
    task_run_name="{stage}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=10),
    retry_jitter_factor=0.5,
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
)
def run_stage(stage: str, threads: int) -> None:
    """One stage on `threads` cores; its whole output is in `.runs/<stage>/output.log`, its latest lines here."""
    logger = get_run_logger()
    shown_at = 0.0

    def show(line: str) -> None:
        nonlocal shown_at
        if line.strip() and time.monotonic() - shown_at >= LOG_EVERY_S:
            shown_at = time.monotonic()
            logger.info(line[:1000])

    outcome = bring_up(ROOT, stage, on_line=show, stop=_stop, environment={"OMP_NUM_THREADS": str(threads)})
    if outcome.code != 0:
        raise StageFailed(stage, outcome)


@flow(name="minimind", task_runner=cast(TaskRunner[Any], ThreadPoolTaskRunner()), persist_result=False)
def minimind(stage: str = "all") -> None:
    """Brings `stage` (a name in dvc.yaml, or `all`) up to date.

    Raises:
        RuntimeError: a stage failed; those that do not need it have been brought up to date all the same.
    """
    _stop.clear()
    ran: list[Ran] = []
    targets = () if stage == "all" else (stage,)
    try:
        run_stage("code", os.cpu_count() or 1)  # what it writes says whose code changed
        _bring_up_all(targets, ran)
    finally:
        _stop.set()  # whatever ended the flow, no stage outlives it
        create_markdown_artifact(_report(ran, read_plan(ROOT, targets)), key=f"plan-{stage.replace('_', '-').replace('@', '-')}")
    if failed := [done.error for done in ran if done.error]:
        raise RuntimeError("; ".join(failed))


def _bring_up_all(targets: tuple[str, ...], ran: list[Ran]) -> None:
    cores = os.cpu_count() or 1
    running: dict[str, tuple[Planned, float, PrefectFuture[None]]] = {}
    while True:
        over = {done.planned.stage for done in ran}
        plan = {planned.stage: planned for planned in read_plan(ROOT, targets, unsettled=running)}
        ready = [
            planned
            for planned in plan.values()
            if planned.verdict is Verdict.RUNS
            and planned.stage not in running
            and planned.stage not in over
            and all(plan[parent].verdict is Verdict.UP_TO_DATE for parent in planned.parents)
        ]
        threads = cores // max(1, min(cores, len(running) + len(ready)))
        for planned in ready[: cores - len(running)]:
            running[planned.stage] = planned, time.monotonic(), run_stage.submit(planned.stage, threads)
        if not running:
            return
        ran += _finished(running)


def _finished(running: dict[str, tuple[Planned, float, PrefectFuture[None]]]) -> list[Ran]:
    """Waits until at least one stage has ended, and takes those out."""
    ended: list[Ran] = []
    while not ended:
        for stage, (planned, started, future) in list(running.items()):
            future.wait(timeout=0.2)
            if future.state.is_final():
                del running[stage]
                error = None if future.state.is_completed() else future.state.message or future.state.name
                ended.append(Ran(planned, time.monotonic() - started, error))
    return ended


def _report(ran: list[Ran], plan: list[Planned]) -> str:
    """What ran and why, and what is left as it was."""
    lines = ["| stage | result | seconds | why |", "| --- | --- | --- | --- |"]
    names = {done.planned.stage for done in ran}
    for done in ran:
        lines.append(f"| {done.planned.stage} | {done.error or 'ran'} | {done.seconds:.0f} | {'; '.join(done.planned.causes)} |")
    lines += [f"| {planned.stage} | {planned.verdict} | | |" for planned in plan if planned.stage not in names]
    return "\n".join(lines)
