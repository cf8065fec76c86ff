"""A logged step of ppo, grpo or agent, computed again from the trajectories that it sampled.

The stage is opened as its script opens it, with the parameters of the run. Its loop goes from the nearest save before the step
up to it; where it would sample, it gets what was sampled then. Rewards, advantages, losses and gradient norms are computed
anew and compared with the record. The run folder is only read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.recipe import check_recipe
from pipeline.params import Params
from pipeline.params.load import parse_params
from pipeline.params.schema import Group, Ppo
from pipeline.reading.agreement import Replayed, compare
from pipeline.rollout.records import Trajectory
from pipeline.text.tokenizer import Tokenizer
from pipeline.tracking.console import Mode, ProgressBar
from pipeline.tracking.records import Record
from pipeline.tracking.rollouts import read_rollouts
from pipeline.tracking.run_folder import RunFolder
from pipeline.tracking.saves import fault_of, read_save
from pipeline.training.device import Device, open_device
from pipeline.training.group_loop import group_step
from pipeline.training.policy_setup import Environment
from pipeline.training.ppo_loop import PpoTask, ppo_step
from pipeline.training.rollouts import Collected, Rollout, RolloutTask, sample_rows, train_rollouts
from pipeline.yaml_files import read_yaml

OpenTask = Callable[[Params, Device, Callable[[str], None]], tuple[RolloutTask, Environment]]
"""How a stage's script opens what it trains."""


def replay_step(root: Path, home: Path, folder: RunFolder, step: int, scripts: Mapping[str, OpenTask]) -> Replayed:
    """Replays a logged step of a run, which may be alive.

    Args:
        root: the repository, which must be the current directory.
        home: where its `.runs` are.
        folder: the run.
        step: from 1, as logged.
        scripts: by stage, how it is opened.

    Raises:
        PipelineError: in one line, why the step cannot be replayed.
    """
    record, stage = Record(folder), folder.stage
    if stage not in scripts:
        raise ParamsError(f"{folder.path}: a run of {stage}; only steps of {', '.join(sorted(scripts))} can be replayed")
    params = params_of(record, root)
    _logged(record, step)
    check_recipe(root, home, stage, record.about, params)
    device = open_device(params.runtime)
    task, environment = scripts[stage](params, device, lambda line: None)
    return replay(record, step, task, getattr(params, stage), device, environment.tokenizer, params.runtime.progress)


def params_of(record: Record, root: Path) -> Params:
    """The parameters of a run; what is none of its own, such as `runtime`, is that of params.yaml."""
    return parse_params(_over(read_yaml(root / "params.yaml"), record.params), f"{record.folder.about} over params.yaml")


def _over(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: _over(tree.get(key) or {}, value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {**tree, **new}


def _logged(record: Record, step: int) -> dict[int, dict[str, Any]]:
    """The metrics of all logged steps, by step."""
    logged = {line["step"]: line["metrics"] for line in record.lines()}
    if step not in logged:
        there = f"it has steps {min(logged)} to {max(logged)}" if logged else "it has none"
        raise ParamsError(f"{record.folder.path}: step {step} is not logged; {there}{' so far' if record.alive else ''}")
    return logged


def replay(
    record: Record,
    step: int,
    task: RolloutTask,
    settings: Ppo | Group,
    device: Device,
    tokenizer: Tokenizer,
    progress: Mode = "off",
) -> Replayed:
    """Replays a step on an open task, as the stage has it before its first step."""
    logged = _logged(record, step)
    start, state = _nearest_save(record.folder, step)
    recorder = _UpTo(step, state, ProgressBar(f"{record.stage} replay", step, mode=progress, done=start))
    task.rollout = _as_sampled(record.folder, task, tokenizer)
    rows: list[dict[str, Any]] = []

    def take_step(index: int) -> tuple[dict[str, float], Collected, Tensor]:
        if isinstance(task, PpoTask):
            assert isinstance(settings, Ppo)
            taken = ppo_step(task, settings, device, index)
        else:
            assert isinstance(settings, Group)
            taken = group_step(task, settings, device, index)
        if index + 1 == step:
            _, collected, advantages = taken
            rows.extend(sample_rows(collected, advantages, task.decode, len(collected.trajectories)))
        return taken

    with suppress(_Reached):
        train_rollouts(task, settings, device, recorder, take_step, table_rows=0)
    compared = {number: compare(logged.get(number, {}), metrics) for number, metrics in recorder.metrics.items()}
    first_apart = next((number for number, each in compared.items() if not all(one.agrees for one in each)), None)
    of_step = [row for row in record.samples() if row["step"] == step]
    samples = [compare(row, replayed) for row, replayed in zip(of_step, rows, strict=False)]
    return Replayed(record.folder.path, step, start, compared[step], rows, samples, first_apart)


def _nearest_save(folder: RunFolder, step: int) -> tuple[int, dict[str, Any] | None]:
    """The newest intact save of fewer than `step` steps, and what it holds; (0, None) where there is none."""
    for saved in folder.commits():
        if saved < step and fault_of(folder, saved) is None:
            with suppress(OSError):  # a live run has removed it meanwhile
                return saved, read_save(folder, saved)
    return 0, None


def _as_sampled(folder: RunFolder, task: RolloutTask, tokenizer: Tokenizer) -> Rollout:
    """In place of sampling: what the run sampled at the same step with the same keys."""

    @lru_cache(maxsize=1)
    def kept(step: int) -> dict[int, Trajectory]:
        return read_rollouts(folder.rollout(step), tokenizer)

    def rollout(prompts: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        step = task.state.step + 1
        known = kept(step)
        found = [known[key] for prompt, key in zip(prompts, keys, strict=True) if _answers(prompt, known.get(key))]
        if len(found) < len(prompts):
            raise PipelineError(
                f"{folder.rollout(step)}: lacks trajectories that the replay asks for: rewards came out otherwise than in the "
                "run, so that other prompts were sampled"
            )
        return found

    return rollout


def _answers(prompt: PromptTask, trajectory: Trajectory | None) -> bool:
    return trajectory is not None and trajectory.prompt_ids == prompt.prompt_ids


class _Reached(Exception):
    """The step is done."""


class _UpTo:
    """A `RolloutRecorder` that keeps metrics in memory, and ends the loop after a step."""

    def __init__(self, last: int, state: dict[str, Any] | None, bar: ProgressBar) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self._last, self._state, self._bar = last, state, bar

    def load(self) -> dict[str, Any] | None:
        return self._state

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = dict(metrics)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def keep_rollouts(self, step: int, rollouts: Mapping[int, Trajectory]) -> None:
        """Nothing."""

    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        if step == self._last:
            raise _Reached

    def progress(self, total: int) -> ProgressBar:
        return self._bar
