"""Data-parallel ranks: processes with the same weights that share out the rows of every step and then take the same step.

A rank runs its rows forward and backward, with everything normalised over the whole step; gradients are summed, so that the
step is that of one process with all rows. What looks at the whole step (advantages, whitening, metrics) is gathered first.
Two things differ from one process: masks of dropout, which each rank draws for its own rows (pretrain, full_sft and lora alone
drop anything out), and the balance of experts, which is a matter of what runs forward together.

Torch is imported where several ranks need it: the record of every stage uses this module, that of stages without torch too.
"""

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.nn import Parameter

Item = TypeVar("Item")
NO_ITEM = object()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` (from 0) of `size`; all ranks must make the same calls in the same order. With one rank, none does anything."""

    rank: int
    size: int

    @property
    def key(self) -> tuple[int, ...]:
        """What to add to the key of a draw that should differ between ranks."""
        return () if self.size == 1 else (self.rank,)

    def mine(self, items: Iterable[Item]) -> Iterator[Item]:
        """Every `size`-th item from number `rank` on: this rank's share, empty where there are too few."""
        return islice(items, self.rank, None, self.size)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """The items of all ranks, dealt in turn: shares that `mine` made come back in the order of the whole.

        Items are pickled; tensors of another rank's GPU arrive on this rank's.
        """
        if self.size == 1:
            return list(items)
        import torch.distributed

        shares: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(shares, _pack(list(items)))
        turns = zip_longest(*map(_unpack, shares), fillvalue=NO_ITEM)
        return [item for turn in turns for item in turn if item is not NO_ITEM]

    def first(self, value: Item) -> Item:
        """The value that rank 0 has, on every rank."""
        if self.size == 1:
            return value
        import torch.distributed

        packed = [_pack(value) if self.rank == 0 else b""]
        torch.distributed.broadcast_object_list(packed, src=0)
        received: Item = _unpack(packed[0])
        return received

    def sum_gradients(self, parameters: Sequence["Parameter"]) -> None:
        """Replaces every gradient by its sum over all ranks, bit for bit the same on each.

        A missing gradient counts as zeros; one that all ranks miss (an expert that no token chose) stays missing, so that the
        optimizer leaves its weights and moments alone. Needs room for a second copy of the gradients.
        """
        if self.size == 1:
            return
        import torch.distributed

        by_dtype = defaultdict(list)
        for parameter in parameters:
            by_dtype[parameter.dtype].append(parameter)
        for group in by_dtype.values():
            present = torch.tensor([float(p.grad is not None) for p in group], dtype=group[0].dtype, device=group[0].device)
            gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in group]
            flat = torch.cat([*gradients, present])
            torch.distributed.all_reduce(flat)
            *totals, present = flat.split([*map(len, gradients), len(group)])
            for parameter, total, anywhere in zip(group, totals, present.tolist(), strict=True):
                parameter.grad = total.view_as(parameter) if anywhere else None


ALONE = Ranks(0, 1)


def launched_ranks() -> Ranks:
    """What a launcher such as torchrun says in RANK and WORLD_SIZE; `ALONE` where nothing did."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return ALONE


def _pack(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(packed), map_location=_to_own_gpu, weights_only=False)  # from a process of this very run


def _to_own_gpu(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage
