"""Useful tokens per second of supervised training: ours, the same with other padding, and a loop with `transformers`.

A useful token is a real one that the model reads; padding is none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Work
from pipeline.data.batches import Batch, PairBatches, SupervisedBatches
from pipeline.data.labels import IGNORED_LABEL
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Dpo, Supervised
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.device import Device
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.objectives import Objective, real_positions
from pipeline.training.preference_objective import DirectPreference, Reference
from pipeline.training.state import TrainState
from pipeline.training.supervised import Batches, SupervisedTask, train_window
from pipeline.training.updater import Updater


def useful(batch: Batch) -> int:
    """Real tokens of a batch: each row's up to its last trained label."""
    return int(real_positions(batch.labels).sum())


class Padded:
    """The rows of a file in random order, `batch_size` at a time, padded to the longest of the batch or to `width`."""

    def __init__(self, path: Path, *, batch_size: int, seed: int, tokenizer: Tokenizer, width: int | None = None) -> None:
        self._rows = SupervisedBatches(path, batch_size=1, seed=seed, tokenizer=tokenizer)
        self._batch_size, self._width, self._pad_id = batch_size, width, tokenizer.pad_id
        self.batches_per_epoch = self._rows.batches_per_epoch // batch_size

    def batch(self, epoch: int, index: int) -> Batch:
        """See `SupervisedBatches.batch`; rows that do not fill a last batch are left out."""
        rows = [self._rows.batch(epoch, index * self._batch_size + offset) for offset in range(self._batch_size)]
        width = self._width or max(row.input_ids.shape[1] for row in rows)

        def padded(tensors: list[Tensor], value: int) -> Tensor:
            return torch.cat([F.pad(tensor, (0, width - tensor.shape[1]), value=value) for tensor in tensors])

        return Batch(
            padded([row.input_ids for row in rows], self._pad_id),
            padded([row.labels for row in rows], IGNORED_LABEL),
            sum(row.num_trained for row in rows),
            [number for row in rows for number in row.rows],
            [size for row in rows for size in row.row_bytes],
        )

    def in_order(self) -> Iterator[Batch]:
        """No held-out rows."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Positions:
    """What the batches of an epoch are made of: the share of real tokens, and how many a batch has on average."""

    useful: float
    tokens_per_batch: float


def positions(batches: Batches, *, first: int = 256) -> Positions:
    """Of the first batches of an epoch, which come in random order."""
    some = [batches.batch(0, index) for index in range(min(first, batches.batches_per_epoch))]
    real, all_ = sum(map(useful, some)), sum(batch.input_ids.numel() for batch in some)
    return Positions(real / all_, real / len(some))


class Counting:
    """Batches as they are, and how much of something they held.

    Args:
        batches: what is asked.
        measure: how much a batch holds.
    """

    def __init__(self, batches: Batches, measure: Callable[[Any], int]) -> None:
        self._batches, self._measure, self.total = batches, measure, 0
        self.batches_per_epoch, self.in_order = batches.batches_per_epoch, batches.in_order

    def batch(self, epoch: int, index: int) -> Any:
        """See `SupervisedBatches.batch`."""
        batch = self._batches.batch(epoch, index)
        self.total += self._measure(batch)
        return batch


def our_steps(model: CausalLM, batches: Batches, settings: Supervised, device: Device, per_call: int) -> Work:
    """What pretrain and full_sft do per step; each call goes on with the next `per_call` steps and counts useful tokens."""
    return _stage_steps(model, LanguageModelling(model, device), Counting(batches, useful), settings, device, per_call)


def our_pair_steps(
    model: CausalLM, reference: Reference, pairs: PairBatches, settings: Dpo, device: Device, per_call: int
) -> Work:
    """What stage dpo does per step; counts pairs."""
    counted = Counting(pairs, lambda batch: batch.num_pairs)
    return _stage_steps(model, DirectPreference(model, reference, device, settings), counted, settings, device, per_call)


def _stage_steps(
    model: CausalLM, objective: Objective, counted: Counting, settings: Supervised, device: Device, per_call: int
) -> Work:
    state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=10**6)})
    task = SupervisedTask(state, objective, counted, counted, "train", list)
    done = 0

    def steps() -> float:
        nonlocal done
        before = counted.total
        objective.training_mode()
        for _ in range(per_call):
            train_window(task, settings, device, done)
            done += 1
        return float(counted.total - before)

    return steps


def transformers_steps(twin: Any, batches: Batches, settings: Supervised, device: Device, per_call: int) -> Work:
    """A training loop as one writes it with `transformers`: right padding, logits of all positions, AdamW, clipping."""
    counted, done = Counting(batches, useful), 0
    optimizer = torch.optim.AdamW(twin.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
    twin.train()

    def steps() -> float:
        nonlocal done
        before = counted.total
        for _ in range(per_call):
            for _ in range(settings.accumulation_steps):
                batch = counted.batch(*divmod(done, batches.batches_per_epoch))
                ids, labels = batch.input_ids.to(device.device), batch.labels.to(device.device)
                with device.autocast():
                    logits = twin(input_ids=ids, attention_mask=real_positions(labels).long(), use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
                (loss / settings.accumulation_steps).backward()
                done += 1
            torch.nn.utils.clip_grad_norm_(twin.parameters(), settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return float(counted.total - before)

    return steps
