"""What a run needs to go on exactly where it was: weights, moments, counters. Random draws need no state (`seed_for`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from torch import nn

from pipeline.checkpoint.files import broken_tensors
from pipeline.curves import is_clocked
from pipeline.errors import NumericsError
from pipeline.training.updater import Updater

# What the progress bar shows of a step's metrics.
SHOWN = {"loss": "train/loss", "reward": "reward/mean", "tokens_per_s": "train/tokens_per_s"}


class Progress(Protocol):
    """A progress bar, used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def update(self, step: int, **figures: float) -> None: ...


class Recorder(Protocol):
    """What a loop may do to the outside world; `pipeline.tracking` implements it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...  # writes the step beside each row
    def load(self) -> dict[str, Any] | None: ...
    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> AbstractContextManager[None]: ...
    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None: ...
    def progress(self, total: int) -> Progress: ...


@dataclass(slots=True)
class TrainState:
    """Modules and their updaters by name, the number of finished steps, running totals, and the newest results."""

    modules: dict[str, nn.Module]
    updaters: dict[str, Updater]
    step: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, amount: float) -> float:
        """Adds to a counter that survives a resume; the new total."""
        self.counters[name] = self.counters.get(name, 0.0) + amount
        return self.counters[name]

    @property
    def skipped_steps(self) -> float:
        """Optimizer steps that were left out because gradients were not finite, of all updaters."""
        return float(sum(updater.skipped for updater in self.updaters.values()))

    def summary(self, *counters: str) -> dict[str, float]:
        """`results` with the run's totals under `train/`: steps, skipped steps, and the named counters."""
        totals = {name: self.counters.get(name, 0.0) for name in counters}
        totals |= {"steps": float(self.step), "skipped_steps": self.skipped_steps}
        return self.results | {f"train/{name}": value for name, value in totals.items()}

    def average_tail(self, metrics: Mapping[str, float], *, step: int, first: int) -> None:
        """Keeps in `results` the running means of `metrics` over the steps from `first` on (all steps when negative).

        The last step alone is noise. Each mean is over the steps that have the key and a finite value; clock-bound keys are
        left out.
        """
        if step < first:
            return
        for name, value in metrics.items():
            if is_clocked(name) or not math.isfinite(value):
                continue
            before = self.results.get(name, 0.0)
            self.results[name] = before + (value - before) / self.count(f"tail_steps/{name}", 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "counters": dict(self.counters),
            "results": dict(self.results),
            "modules": {name: trainable_state(module) for name, module in self.modules.items()},
            "updaters": {name: updater.state_dict() for name, updater in self.updaters.items()},
        }

    def as_it_is(self) -> Callable[[], dict[str, Any] | None]:
        """What gives the state of this moment later on; None once an update has begun, from which on nobody has it."""
        known = {"step": self.step, "counters": dict(self.counters), "results": dict(self.results)}
        begun = self._begun

        def later() -> dict[str, Any] | None:
            return self.state_dict() | known if self._begun == begun else None

        return later

    @property
    def _begun(self) -> int:
        return sum(updater.begun for updater in self.updaters.values())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.counters, self.results = dict(state["counters"]), dict(state["results"])
        for name, module in self.modules.items():
            wanted = dict(module.named_parameters())
            for key, value in state["modules"][name].items():
                wanted[key].data.copy_(value)
        for name, updater in self.updaters.items():
            updater.load_state_dict(state["updaters"][name])


def trainable_state(module: nn.Module) -> dict[str, Any]:
    """Trainable tensors only: frozen weights come from the parent checkpoint, which is part of the run's key."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def run_steps(
    state: TrainState,
    recorder: Recorder,
    total_steps: int,
    one_step: Callable[[int], dict[str, float]],
    at_start: Callable[[], None] = lambda: None,
) -> None:
    """Runs `one_step(step)` from where `recorder` left off; saves on schedule and when asked to stop.

    A step is the unit of progress: what a kill interrupts is done again from the last save, with the same draws. A stop amid a
    step leaves it, if weights are still as they were before it.
    `at_start` runs before the first step of a run that has no save yet (measuring the start weights, for example).

    Raises:
        NumericsError: the gradients of every step were not finite, so that the weights would end as they began; or a weight is
            not finite in the end.
    """
    saved = recorder.load()
    if saved is None:
        at_start()
    else:
        state.load_state_dict(saved)
    with recorder.progress(total_steps) as bar:
        while state.step < total_steps:
            with recorder.step(state.step, state.as_it_is()):
                metrics = one_step(state.step)
            state.step += 1
            recorder.log(state.step, metrics)
            bar.update(state.step, **{name: metrics[key] for name, key in SHOWN.items() if key in metrics})
            recorder.checkpoint(state.step, state.state_dict)
    if state.skipped_steps and not any(updater.applied for updater in state.updaters.values()):
        raise NumericsError(
            f"none of {state.step} steps had finite gradients, so nothing was learned; lower the learning rate, "
            "or look at the weights that the stage starts from"
        )
    for name, module in state.modules.items():
        if broken := broken_tensors(trainable_state(module)):
            raise NumericsError(f"after {state.step} steps the {name} has diverged, {broken}; lower the learning rate")
