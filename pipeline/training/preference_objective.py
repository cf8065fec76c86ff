"""Direct preference optimisation: what dpo minimises, and where it has the reference's logprobs from."""

from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.files import load_state, write_atomically
from pipeline.data.batches import PairBatch, PairBatches
from pipeline.errors import DataError
from pipeline.maths.logprobs import token_logprobs
from pipeline.maths.preference import chance_accuracies, dpo_loss
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Dpo
from pipeline.training.arithmetic import arithmetic
from pipeline.training.device import Device
from pipeline.training.objectives import LossSum, answer_lengths, routed_positions, sums_of, with_router_balance, without_dropout

Reference = Callable[[PairBatch], Tensor]
"""The frozen reference's answer logprobs of a batch, [2n], on the CPU or the device."""


class DirectPreference:
    """A loss of the DPO family on sequence logprobs against a frozen reference, plus the router's balance loss.

    Without dropout, as trl by default: its noise, summed over an answer, would be read as distance from the reference.
    """

    def __init__(self, model: CausalLM, reference: Reference, device: Device, settings: Dpo) -> None:
        self.model, self.reference, self.device, self.settings = model, reference, device, settings

    def training_mode(self) -> None:
        without_dropout(self.model)

    def count(self, batch: PairBatch) -> int:
        return batch.num_pairs

    def tokens(self, batch: PairBatch) -> int:
        return batch.num_trained

    def __call__(self, batch: PairBatch) -> LossSum:
        policy = answer_logprobs(self.model, batch, self.device)
        loss, metrics = dpo_loss(
            policy,
            self.reference(batch).to(policy.device),
            beta=self.settings.beta,
            loss=self.settings.loss,
            label_smoothing=self.settings.label_smoothing,
            num_pairs=1,
        )
        metrics |= chance_accuracies(answer_lengths(batch.labels).to(policy.device))
        return with_router_balance(LossSum(loss, batch.num_pairs, sums_of(loss, metrics)), self.model)


def answer_logprobs(model: CausalLM, batch: PairBatch, device: Device) -> Tensor:
    """Logprobs of the answers, summed over their trained tokens, [2n]."""
    with device.autocast():
        hidden = model.hidden(device.upload(batch.input_ids), visible=device.upload(routed_positions(model, batch.labels)))
    logprobs, _ = token_logprobs(hidden, model.lm_head.weight, batch.labels)
    return logprobs.sum(dim=1)  # 0 where nothing is trained


def live_reference(model: CausalLM, device: Device) -> Reference:
    """Scores every batch anew: a forward pass per step, nothing kept."""

    @torch.no_grad()
    def reference(batch: PairBatch) -> Tensor:
        return answer_logprobs(model, batch, device)

    return reference


def cached_reference(
    model: CausalLM, train: PairBatches, held_out: PairBatches, device: Device, scratch: Path, identity: str, *, epochs: int
) -> Reference:
    """Looks the logprobs up in a table that is computed once, before training, and kept in `scratch`.

    Args:
        model: the frozen reference.
        train: pairs that are asked for as `epochs` epochs draw them.
        held_out: pairs that are asked for as stored.
        scratch: folder of such tables; a damaged one is made again.
        identity: everything that decides the logprobs but the arithmetic: model, data, draws and code.
    """
    path = scratch / f"{sha256(f'{identity} {arithmetic(device)}'.encode()).hexdigest()[:16]}.pt"
    tables = _read_tables(path)
    if tables is None:
        tables = {
            train.split: _score(model, train, train.of_epochs(epochs), device),
            held_out.split: _score(model, held_out, held_out.in_order(), device),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: torch.save(tables, file))

    def reference(batch: PairBatch) -> Tensor:
        return tables[batch.split][torch.tensor(batch.dropped).long(), batch.rows].T.reshape(-1)

    return reference


@torch.no_grad()
def _score(model: CausalLM, pairs: PairBatches, batches: Iterable[PairBatch], device: Device) -> Tensor:
    """[2, rows, 2] fp32: as stored and without empty think blocks (0 where not in `batches`), per pair, chosen and rejected."""
    table = torch.zeros(2, pairs.num_rows, 2)
    for batch in batches:
        logprobs = answer_logprobs(model, batch, device).view(2, -1).T.float().cpu()
        table[torch.tensor(batch.dropped).long(), batch.rows] = logprobs
    return table


def _read_tables(path: Path) -> dict[str, Tensor] | None:
    try:
        return load_state(path)
    except DataError:
        return None
