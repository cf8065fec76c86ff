"""The supervised loop of pretrain, full_sft, lora, dpo and reward: one optimizer step per accumulation window."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.errors import NumericsError
from pipeline.maths.metrics import combine, on_host
from pipeline.params.schema import Supervised
from pipeline.training.device import Device
from pipeline.training.objectives import Objective
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.state import Recorder, TrainState, run_steps
from pipeline.training.updater import seed_for

# Where a metric of an objective belongs; what is not named here goes under the loop's own prefix.
TRAIN_KEYS = {"loss": "train/loss", "aux_loss": "moe/aux_loss", "expert_load_max": "moe/expert_load_max"}

# Sums of an objective that are no means over its count, and which of them are divided by bytes of text.
SUMS = ("bytes", "written", "written_loss", "written_bytes")
PER_BYTE = (("val/bits_per_byte", "loss", "bytes"), ("val/bits_per_byte_written", "written_loss", "written_bytes"))


class Batches(Protocol):
    """Batches as a pure function of (epoch, index), which ranks cut by `part`; `pipeline.data.batches` has them."""

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

    Raises:
        NumericsError: the end weights, or what they do on the held-out rows, are not finite; and as `run_steps`.
    """
    state, steps = task.state, total_steps(settings, task.train)
    window = max(1, steps // 10)

    def validate_and_log(step: int) -> None:
        metrics = validate(task, device.ranks)
        if step == 0:
            metrics["val/loss_start"] = metrics["val/loss"]
        state.results.update(metrics)
        recorder.log(step, metrics)
        recorder.log_samples(step, task.panel())

    def one_step(step: int) -> dict[str, float]:
        task.objective.training_mode()
        metrics = train_window(task, settings, device, step)
        if (step + 1) % settings.val_every == 0 or step + 1 == steps:
            validate_and_log(step + 1)
        state.average_tail(metrics, step=step, first=steps - window)
        return metrics

    run_steps(state, recorder, steps, one_step, at_start=lambda: validate_and_log(0))
    broken = [
        f"{name} is {value}" for name, value in state.results.items() if name.startswith("val/") and not math.isfinite(value)
    ]
    if broken:
        raise NumericsError(
            f"after {state.step} steps {', '.join(broken)}: the weights have diverged; lower the learning rate, or look at the "
            "weights that the stage starts from"
        )
    return state.summary("tokens_seen")


def train_window(task: SupervisedTask, settings: Supervised, device: Device, step: int) -> dict[str, float]:
    """One optimizer step: the mean over all terms of its whole window is both the gradient's and the logged loss.

    Every rank knows the whole window and takes a part of the rows of each of its batches. Dropout masks are a function of step
    and rank: with dropout, several ranks draw other masks than one.
    """
    started, ranks = time.perf_counter(), device.ranks
    per_epoch = windows_per_epoch(settings, task.train)
    epoch, window = divmod(step, per_epoch)
    torch.manual_seed(seed_for(settings.seed, "dropout", step, *ranks.key))
    first = window * settings.accumulation_steps
    indices = range(first, min(first + settings.accumulation_steps, task.train.batches_per_epoch))
    batches = [task.train.batch(epoch, index) for index in indices]
    total = sum(task.objective.count(batch) for batch in batches)
    parts = []
    for batch in batches:
        if own := batch.part(ranks.rank, ranks.size):
            part = task.objective(own)
            (part.loss / total).backward()
            parts.append(part.metrics)
    means = combine(ranks.gather(on_host(parts)))
    means.pop("bytes", None)
    (updater,) = task.state.updaters.values()
    ranks.sum_gradients(updater.parameters)
    rows = [row for batch in batches for row in batch.rows]
    done = updater.update(step, context=f"epoch {epoch}, rows {rows[:8]}{'...' if len(rows) > 8 else ''}")
    tokens = sum(task.objective.tokens(batch) for batch in batches)
    elapsed = time.perf_counter() - started
    return {
        **{TRAIN_KEYS.get(name, f"{task.prefix}/{name}"): value for name, value in means.items()},
        "train/lr": done.lr,
        "train/grad_norm": done.grad_norm,
        "train/tokens_seen": task.state.count("tokens_seen", tokens),
        "train/skipped_steps": task.state.skipped_steps,
        "train/tokens_per_s": tokens / elapsed,
        "time/step_s": elapsed,
        "memory/peak_bytes": float(device.peak_memory_bytes()),
    }


@torch.no_grad()
def validate(task: SupervisedTask, ranks: Ranks = ALONE) -> dict[str, float]:
    """Means over all held-out rows: `val/loss`, the objective's own metrics, and `val/bits_per_byte` where bytes are known.

    `val/loss_written` and `val/bits_per_byte_written` are those of the tokens that a model must really write.
    """
    for module in task.state.modules.values():
        module.eval()
    parts = ranks.gather(on_host([task.objective(batch).metrics for batch in ranks.mine(task.held_out.in_order())]))
    metrics = {f"val/{name}": value for name, value in combine(parts).items() if name not in SUMS}
    sums = {name: sum(part[name] for part in parts) for name in ("loss", *SUMS) if parts and name in parts[0]}
    if sums.get("written"):
        metrics["val/loss_written"] = sums["written_loss"] / sums["written"]
    for key, loss, num_bytes in PER_BYTE:
        if sums.get(num_bytes):
            metrics[key] = sums[loss] / math.log(2) / sums[num_bytes]
    return metrics
