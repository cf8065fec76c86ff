"""The supervised loop of pretrain, full_sft, lora, dpo and reward: one optimizer step per accumulation window."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.params.schema import Supervised
from pipeline.training.device import Device
from pipeline.training.objectives import Objective
from pipeline.training.state import Recorder, TrainState, run_steps
from pipeline.training.updater import seed_for

# Where a metric of an objective belongs; what is not named here goes under the loop's own prefix.
TRAIN_KEYS = {"loss": "train/loss", "aux_loss": "moe/aux_loss", "expert_load_max": "moe/expert_load_max"}


class Batches(Protocol):
    """Batches as a pure function of (epoch, index); `pipeline.data.batches` has them."""

    batches_per_epoch: int

    def batch(self, epoch: int, index: int) -> Any: ...
    def in_order(self) -> Iterator[Any]: ...


@dataclass(slots=True)
class SupervisedTask:
    """Everything a supervised stage gives to the loop.

    Attributes:
        prefix: metric group of the objective's own metrics, `dpo` gives `dpo/accuracy`.
        panel: greedy samples (or scored pairs) of the current weights as table rows.
    """

    state: TrainState
    objective: Objective
    train: Batches
    held_out: Batches
    prefix: str
    panel: Callable[[], list[dict[str, Any]]]


def total_steps(settings: Supervised, batches: Batches) -> int:
    """Optimizer steps of the whole run; the last window of an epoch may be partial and is applied like any other."""
    return settings.epochs * windows_per_epoch(settings, batches)


def windows_per_epoch(settings: Supervised, batches: Batches) -> int:
    return math.ceil(batches.batches_per_epoch / settings.accumulation_steps)


def train_supervised(task: SupervisedTask, settings: Supervised, device: Device, recorder: Recorder) -> dict[str, float]:
    """Trains to the end; the summary holds `val/*` of the end weights, `val/loss_start` of the start weights, and means of
    the training metrics over the last tenth of the steps.
    """
    state, steps = task.state, total_steps(settings, task.train)
    window = max(1, steps // 10)

    def check(step: int) -> None:
        metrics = validate(task)
        if step == 0:
            metrics["val/loss_start"] = metrics["val/loss"]
        state.results.update(metrics)
        recorder.log(step, metrics)
        recorder.log_samples(step, [{"step": step, **row} for row in task.panel()])

    def one_step(step: int) -> dict[str, float]:
        for module in state.modules.values():
            module.train()
        metrics = train_window(task, settings, device, step)
        if (step + 1) % settings.val_every == 0 or step + 1 == steps:
            check(step + 1)
        state.average_tail(metrics, step=step, first=steps - window)
        return metrics

    run_steps(state, recorder, steps, one_step, at_start=lambda: check(0))
    return {
        **state.results,
        "train/steps": float(state.step),
        "train/tokens_seen": state.counters.get("tokens_seen", 0.0),
        "train/skipped_steps": float(sum(u.skipped for u in state.updaters.values())),
    }


def train_window(task: SupervisedTask, settings: Supervised, device: Device, step: int) -> dict[str, float]:
    """One optimizer step: the token-weighted mean over its whole window is both the gradient's and the logged loss."""
    started = time.perf_counter()
    per_epoch = windows_per_epoch(settings, task.train)
    epoch, window = divmod(step, per_epoch)
    torch.manual_seed(seed_for(settings.seed, "dropout", step))
    first = window * settings.accumulation_steps
    indices = range(first, min(first + settings.accumulation_steps, task.train.batches_per_epoch))
    batches = [task.train.batch(epoch, index) for index in indices]
    total = sum(task.objective.count(batch) for batch in batches)
    sums: Counter[str] = Counter()
    for batch in batches:
        part = task.objective(batch)
        (part.loss / total).backward()
        sums.update(part.sums)
    sums.pop("bytes", None)
    (updater,) = task.state.updaters.values()
    rows = [row for batch in batches for row in batch.rows]
    done = updater.update(step, context=f"epoch {epoch}, rows {rows[:8]}{'...' if len(rows) > 8 else ''}")
    tokens = sum(task.objective.tokens(batch) for batch in batches)
    elapsed = time.perf_counter() - started
    return {
        **{TRAIN_KEYS.get(name, f"{task.prefix}/{name}"): value / total for name, value in sums.items()},
        "train/lr": done.lr,
        "train/grad_norm": done.grad_norm,
        "train/tokens_seen": task.state.count("tokens_seen", tokens),
        "train/skipped_steps": float(updater.skipped),
        "train/tokens_per_s": tokens / elapsed,
        "time/step_s": elapsed,
        "memory/peak_bytes": float(device.peak_memory_bytes()),
    }


@torch.no_grad()
def validate(task: SupervisedTask) -> dict[str, float]:
    """Means over all held-out rows, `val/loss` and the objective's own metrics; `val/bits_per_byte` where bytes are known."""
    for module in task.state.modules.values():
        module.eval()
    sums: Counter[str] = Counter()
    count = 0
    for batch in task.held_out.in_order():
        part = task.objective(batch)
        sums.update(part.sums)
        count += part.count
    num_bytes = sums.pop("bytes", 0.0)
    metrics = {f"val/{name}": value / count for name, value in sums.items()}
    if num_bytes:
        metrics["val/bits_per_byte"] = sums["loss"] / math.log(2) / num_bytes
    return metrics
