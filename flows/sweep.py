"""The flow behind `minimind/sweep`: every combination of a grid of parameters as an experiment, a few at a time.

prefect deployment run minimind/sweep -p stage=grpo -p grid='{"grpo.lr": [1e-4, 3e-4]}'
"""

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.automations import FLOW, Restarts
from flows.experiments import Finished, run_experiment
from flows.faults import FlowFault, log_faults_as_lines
from flows.minimind import terminated_with_worker
from flows.rebuild import TimeLimit, Workspace, shown_name
from flows.report import artifact_key, cell, leave, link, number, ui_hint
from pipeline.errors import ParamsError
from pipeline.lineage.experiment import Experiment, describe_all
from pipeline.lineage.headlines import EVAL_HEADLINES, HEADLINES, Goal
from pipeline.lineage.history import experiment_commit, lock_at
from pipeline.lineage.overrides import shown
from pipeline.lineage.plan import read_plan
from pipeline.lineage.spread import outside
from pipeline.lineage.yardstick import differing, yardstick

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.2
MAX_MEMBERS = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """One combination, as overrides, and how its experiment ended: with a result or an error."""

    overrides: tuple[str, ...]
    experiment: Experiment
    finished: Finished | None = None
    error: str = ""


@task(name="member", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_member(name: str, stage: str, overrides: Sequence[str], workspace: Workspace) -> Finished:
    """One experiment; its stages are tasks of their own."""
    return run_experiment(workspace, stage, overrides)


def run_name(parameters: Mapping[str, Any]) -> str:
    """What Prefect calls a flow run: its stage and the keys that it tries."""
    return shown_name("sweep", parameters["stage"], " × ".join(parameters["grid"]))


@flow(
    name=FLOW,
    flow_run_name=lambda: run_name(flow_run.parameters),
    task_runner=cast(TaskRunner[Any], ThreadPoolTaskRunner()),
    persist_result=False,
)
def sweep(
    stage: str,
    grid: dict[str, list[Any]],
    metric: str | None = None,
    goal: Goal | None = None,
    concurrency: int = 1,
    timeout_s: TimeLimit | None = None,
    restarts: Restarts = 0,
) -> None:
    """Runs every combination of the grid as an experiment, and names the best.

    Args:
        stage: what each brings up to date, with all that it needs; `all` for everything.
        grid: key of params.yaml to the values to try.
        metric: what to go by: a key of metrics/<stage>.json; for `eval` and `all` a model's metric, such as `grpo/reward_mean`.
            Left out: the first of the stage's headline metrics.
        goal: whether more or less of it is better; known for headline metrics.
        concurrency: experiments at a time; they share the cores.
        timeout_s: seconds that an attempt at a stage may last before it saves and fails; null for any time.
        restarts: how often this run has crashed and been started again: the server counts. What has finished is not run again.

    Raises:
        ParamsError: the grid or the metric is wrong.
        FlowFault: no member succeeded.
    """
    log_faults_as_lines()
    metric, goal = choose_metric(stage, grid, metric, goal)
    members = combinations(stage, grid)
    read_plan(ROOT, () if stage == "all" else (stage,))  # a stage that does not exist shows before any copy is made
    if concurrency < 1:
        raise ParamsError(f"concurrency={concurrency}: must be >= 1")
    cores = max(1, (os.cpu_count() or 1) // min(concurrency, len(members)))
    workspace = Workspace(ROOT, cores, timeout_s=timeout_s)
    ended: list[Member] = []
    try:
        with terminated_with_worker():
            _run_all(members, stage, concurrency, workspace, ended)
    finally:
        workspace.stop.set()  # whatever ended the sweep, no stage outlives it
        _publish(stage, ended, metric, goal)
    if not any(member.finished for member in ended):
        raise FlowFault("no member succeeded: " + "; ".join(dict.fromkeys(member.error for member in ended)))


def combinations(stage: str, grid: Mapping[str, Sequence[Any]]) -> list[Member]:
    """Every combination of the grid's values; its values are JSON, which YAML reads alike.

    Raises:
        ParamsError: the grid is empty or has more than `MAX_MEMBERS` combinations, or one is not valid.
    """
    if not grid or not all(isinstance(values, list) and values for values in grid.values()):
        raise ParamsError('grid: must give each key a list of values, such as {"grpo.lr": [1e-4, 3e-4]}')
    number = math.prod(len(values) for values in grid.values())
    if number > MAX_MEMBERS:
        raise ParamsError(f"grid: {number} combinations, of at most {MAX_MEMBERS}; give fewer values, or parts of it one by one")
    texts = [[f"{key}={json.dumps(value, ensure_ascii=False)}" for value in values] for key, values in grid.items()]
    chosen = list(itertools.product(*texts))
    members = map(Member, chosen, describe_all(ROOT, stage, chosen))
    return list({member.experiment.name: member for member in members}.values())  # values given twice are tried once


def choose_metric(stage: str, grid: Mapping[str, Any], metric: str | None, goal: Goal | None) -> tuple[str, Goal]:
    """The metric and its direction, where they are not given.

    Raises:
        ParamsError: there is no telling.
    """
    if stage in ("eval", "all"):
        sections = [key.partition(".")[0] for key in grid]
        known = {f"{model}/{key}": better for model in HEADLINES for key, better in EVAL_HEADLINES.items()}
        default = next((f"{section}/{next(iter(EVAL_HEADLINES))}" for section in sections if section in HEADLINES), None)
    else:
        known = HEADLINES.get(stage, {})
        default = next(iter(known), None)
    metric = metric or default
    if metric is None:
        raise ParamsError(f"metric: must be given for stage {stage}, such as grpo/reward_mean of eval")
    goal = goal or known.get(metric)
    if goal is None:
        raise ParamsError(f"goal: must be max or min, as {metric} is no headline metric of stage {stage} ({', '.join(known)})")
    return metric, goal


def _run_all(members: Sequence[Member], stage: str, concurrency: int, workspace: Workspace, ended: list[Member]) -> None:
    """Runs at most `concurrency` members at a time, and notes in `ended` how each ended."""
    waiting = list(members)
    running: dict[str, tuple[Member, PrefectFuture[Finished]]] = {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            member = waiting.pop(0)
            name = member.experiment.name
            running[name] = (
                member,
                run_member.submit(str(member.experiment), stage, member.overrides, workspace),
            )
        for name, (member, future) in list(running.items()):
            future.wait(timeout=POLL_S)
            state = future.state  # once: it may change while it is looked at
            if state.is_completed():
                ended.append(replace(member, finished=future.result()))
                del running[name]
            elif state.is_final():
                ended.append(replace(member, error=state.message or str(state.name)))
                del running[name]


def _publish(stage: str, ended: Sequence[Member], metric: str, goal: Goal) -> None:
    """Writes the artifact `sweep-<stage>`: the members, the best one first, and how to take it."""

    def value_of(member: Member) -> float | None:
        return member.finished.metrics.get(metric) if member.finished else None

    sign = -1 if goal == "max" else 1
    ranked = sorted(ended, key=lambda member: (value_of(member) is None, sign * (value_of(member) or 0.0)))
    lines = [f"| overrides | `{metric}` ({goal}) | state | run | experiment |", "| --- | --- | --- | --- | --- |"]
    for member in ranked:
        state, run = ("finished", link(member.finished.run)) if member.finished else (cell(member.error), "")
        cells = f"`{cell(str(member.experiment))}` | {number(value_of(member))} | {state} | {run} | {member.experiment.name}"
        lines.append(f"| {cells} |")
    found = [(member.experiment, value) for member in ranked if (value := value_of(member)) is not None]
    best = measured_apart([experiment for experiment, _ in found], metric) or conclusion(found, metric, goal)
    get_run_logger().info(best)
    hint = ui_hint(member.finished.run for member in ended if member.finished)
    leave("\n\n".join(filter(None, [best, "\n".join(lines), hint])), artifact_key(f"sweep-{stage}"))


def measured_apart(experiments: Sequence[Experiment], metric: str) -> str | None:
    """Why no value of the metric is the best: a grid over reward weights, say, changes what it means; None where it does not."""
    used = [_measured_with(experiment, metric) for experiment in experiments]
    apart = sorted({key for other in used[1:] for key in differing(used[0], other)})
    if not apart:
        return None
    keys = ", ".join(apart)
    return f"No best: `{metric}` was measured with another {keys}, so its values do not compare; choose another metric."


def _measured_with(experiment: Experiment, metric: str) -> Mapping[str, Any]:
    """By the lock file that the experiment left; nothing where it left none."""
    panel = experiment.stage in ("eval", "all")
    stage, name = ("eval", metric.partition("/")[2]) if panel else (experiment.stage, metric)
    commit = experiment_commit(experiment.root, experiment.name)
    lock = lock_at(experiment.root, commit) if commit else None
    made = lock.stages.get(stage) if lock is not None else None
    return yardstick(stage, name, made.params, made.deps) if made is not None else {}


def conclusion(found: Sequence[tuple[Experiment, float]], metric: str, goal: Goal) -> str:
    """Which combination is best, against the next one, and whether seeds may have made the difference.

    Args:
        found: experiments and their values, the best first; those that differ in `*.seed` alone count as one combination.
        metric: the values' name.
        goal: which way is better.
    """
    if not found:
        return f"No member has `{metric}`."
    groups: defaultdict[str, list[tuple[Experiment, float]]] = defaultdict(list)
    for experiment, value in found:
        settings = {key: text for key, text in experiment.overrides.items() if not key.endswith(".seed")}
        groups[" ".join(f"{key}={shown(text)}" for key, text in settings.items())].append((experiment, value))
    means = {settings: fmean(value for _, value in group) for settings, group in groups.items()}
    first, *others = sorted(means, key=lambda settings: means[settings], reverse=goal == "max")
    name, seeds = groups[first][0][0].name, len(groups[first])
    said = f"Best: **{name}** with `{metric}` {number(groups[first][0][1])}"
    said += f" (mean of {seeds} seeds: {number(means[first])})" if seeds > 1 else ""
    if others:
        left, right = ([value for _, value in groups[settings]] for settings in (first, others[0]))
        sure = {True: "more than seeds differ", False: "other seeds differ as much", None: "one seed cannot tell more"}
        said += f" against {number(means[others[0]])} of the next, `{others[0] or 'as it is'}`; {sure[outside(left, right)]}"
    return f"{said}. `dvc exp apply {name}` takes it into the workspace."
