"""What `dvc repro` would run, and why: `dvc status` names the stages whose own inputs changed, not those behind them."""

import difflib
import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ParamsError, PipelineError

if TYPE_CHECKING:
    from dvc.stage import PipelineStage


IN_PROCESS = threading.Lock()
"""DVC is not made for several threads, and the members of a sweep plan at any time."""


class Verdict(StrEnum):
    """What becomes of a stage."""

    RUNS = "runs"
    """Its command, a parameter, an input or an output changed. Where its run cache knows the inputs, it is restored instead."""
    MAY_RUN = "may run"
    """A stage before it runs; it runs too unless what it reads comes out unchanged."""
    UP_TO_DATE = "up to date"


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage of the plan.

    Attributes:
        stage: its name, such as `data@pretrain`.
        causes: what changed, such as `grpo.lr modified`; for `MAY_RUN` the stages it waits for.
        parents: the stages whose outputs it reads.
        recipe: a digest of its command, parameters and inputs where these are known and it runs: equal ones give the same result.
    """

    stage: str
    verdict: Verdict
    causes: list[str]
    parents: list[str]
    recipe: str | None = None


def read_plan(root: Path, targets: Sequence[str] = (), *, unsettled: Collection[str] = ()) -> list[Planned]:
    """The targets (all stages when left out) and everything before them, parents first, from the files as they are now.

    `code` runs first in practice, because whether the others' code changed shows in what it writes.

    Args:
        root: the repository.
        targets: names of stages; `data` is every `data@SET`.
        unsettled: stages that are running at this moment: their outputs say nothing yet, so those behind them may run.

    Raises:
        ParamsError: there is no such target.
        PipelineError: dvc.yaml or dvc.lock cannot be read.
    """
    from dvc.repo import Repo  # slow to import, and only who plans needs it
    from dvc.repo.reproduce import get_active_graph, plan_repro

    with faults_of_dvc(root), IN_PROCESS, Repo(os.fspath(root), _wait_for_lock=True) as repo:
        with repo.lock:  # DVC writes dvc.lock in place: without it half of one may be read
            graph = get_active_graph(repo.index.graph)
        chosen = [stage for target in targets for stage in _named(graph, target)]
        planned: dict[str, Planned] = {}
        for stage in plan_repro(graph, chosen or None):
            planned[stage.name] = _planned(stage, list(graph.successors(stage)), planned, unsettled)
        return list(planned.values())


@contextmanager
def faults_of_dvc(root: Path) -> Iterator[None]:
    """Makes one line of what DVC finds wrong with dvc.yaml, dvc.lock or its settings.

    Raises:
        PipelineError: in place of a `DvcException` of the block.
    """
    from dvc.exceptions import DvcException

    try:
        yield
    except DvcException as error:
        mend = "; `git checkout dvc.lock` brings the committed one back, DVC's cache what was made since"
        raise PipelineError(f"{root}: {' '.join(str(error).split())}{mend if 'dvc.lock' in str(error) else ''}") from None


def _named(stages: Iterable["PipelineStage"], target: str) -> list["PipelineStage"]:
    found = [stage for stage in stages if target in (stage.name, stage.name.partition("@")[0])]
    if not found:
        near = difflib.get_close_matches(target, [stage.name for stage in stages], n=1)
        hint = f"did you mean `{near[0]}`?" if near else "`dvc stage list` names them"
        raise ParamsError(f"{target!r}: dvc.yaml has no such stage; {hint}")
    return found


def _planned(
    stage: "PipelineStage", before: Sequence["PipelineStage"], planned: Mapping[str, Planned], unsettled: Collection[str]
) -> Planned:
    parents = sorted(parent.name for parent in before)
    if stage.name in unsettled:
        return Planned(stage.name, Verdict.RUNS, ["is running"], parents)
    waits = [name for name in parents if planned[name].verdict is not Verdict.UP_TO_DATE]
    pending = {out.fs_path for parent in before if parent.name in waits for out in parent.outs}
    if causes := list(_own_causes(stage, pending)):
        return Planned(stage.name, Verdict.RUNS, causes, parents, None if waits else _recipe(stage))
    return Planned(stage.name, Verdict.MAY_RUN if waits else Verdict.UP_TO_DATE, [f"{name} runs" for name in waits], parents)


def _recipe(stage: "PipelineStage") -> str | None:
    """What DVC's run cache looks results up by, as a digest; None where an input is missing."""
    from dvc.exceptions import DvcException
    from dvc.stage.serialize import to_single_stage_lockfile

    try:
        stage.save_deps()
    except DvcException:  # the stage itself will say so
        return None
    known = to_single_stage_lockfile(stage)
    recipe = [known.get("cmd"), known.get("deps"), known.get("params"), sorted(out.def_path for out in stage.outs)]
    return hashlib.sha256(json.dumps(recipe, default=str).encode()).hexdigest()[:16]


def _own_causes(stage: "PipelineStage", pending: Collection[str]) -> Iterator[str]:
    """What differs from dvc.lock, the files at the paths in `pending` left out: a stage before this one writes them anew."""
    if stage.cmd_changed:
        yield "command changed"
    for entry in [*stage.deps, *stage.outs]:
        if entry.fs_path in pending:
            continue
        for path, change in entry.status().items():
            if isinstance(change, dict):  # a parameter file: one change per key
                yield from (f"{key} {what}" for key, what in change.items())
            else:
                yield f"{path} {change}"
