"""One experiment: stages brought up to date with other parameters, in an isolated copy, and kept for `dvc exp`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.faults import FlowFault
from flows.rebuild import Workspace, bring_up_all, shown_name
from flows.report import publish
from pipeline.lineage.experiment import open_experiment
from pipeline.lineage.records import TrackedRun, final_metrics, tracked_run


class ExperimentFailed(FlowFault):
    """Not all stages of an experiment are up to date; its copy is left for the next try."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An experiment that was kept.

    Attributes:
        name: what `dvc exp apply` takes.
        metrics: final ones of the stage that was asked for; of `eval` for `all`.
        run: the MLflow run of that stage.
    """

    name: str
    metrics: dict[str, float]
    run: TrackedRun | None


def run_experiment(original: Workspace, stage: str, overrides: Sequence[str]) -> Finished:
    """Brings `stage` up to date with the overrides, reports, and keeps what came out.

    Args:
        original: of which a copy is made; it stays as it is. Its stages run with the same means.
        stage: a stage, or `all`.
        overrides: texts such as `grpo.lr=1e-4`.

    Raises:
        ParamsError: an override or the stage is wrong.
        DataError: a file that a stage reads is nowhere.
        ExperimentFailed: a stage failed, was stopped, or is not up to date by the plan made after it.
    """
    root, stop = original.root, original.stop
    with open_experiment(root, stage, overrides, stop) as experiment:
        copy = experiment.workspace
        workspace = replace(original, root=copy, environment=experiment.environment, label=f" · {shown_name(str(experiment))}")
        done = bring_up_all(workspace, experiment.targets)
        failed = "; ".join(done.faults)
        if failed:
            closing = f"Its copy, `{copy}`, stays: the same overrides go on there."
        else:
            experiment.save()
            name = experiment.name
            closing = f"`dvc exp apply {name}` takes it into the workspace, `dvc exp branch {name}` makes a branch of it."
        title = f"Experiment **{experiment.name}**: `{experiment}`"
        publish(stage, done, root=copy, home=root, title=title, closing=closing)
        if failed:
            raise ExperimentFailed(failed)
        measured = "eval" if stage == "all" else stage
        finished = Finished(experiment.name, final_metrics(copy, measured), tracked_run(copy, root, measured))
        experiment.discard()
        return finished
