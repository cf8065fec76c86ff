"""Data-parallel ranks: processes with the same weights that share out the rows of every step and then take the same step.

A rank runs its rows forward and backward, with everything normalised over the whole step; gradients are summed, so that the
step is that of one process with all rows. What looks at the whole step (advantages, whitening, metrics) is gathered first.
Two things differ from one process: masks of dropout, which each rank draws for its own rows (pretrain, full_sft and lora alone
drop anything out), and the balance of experts, which is a matter of what runs forward together.

Torch is imported where several ranks need it: the record of every stage uses this module, that of stages without torch too.
"""

import io
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

RENDEZVOUS = "MINIMIND_RENDEZVOUS"
"""Variable with the file in which the ranks of one machine find each other; without it a launcher's address and port count."""
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

        Items are tensors, records (dataclasses, enums) and plain values; tensors of another rank's GPU arrive on this rank's.
        """
        if self.size == 1:
            return list(items)
        import torch
        from torch.distributed import all_gather

        own = _pack(list(items))
        lengths = list(torch.zeros(self.size, 1, dtype=torch.int64))
        all_gather(lengths, torch.tensor([len(own)]))
        longest = max(map(int, lengths))
        shares = list(torch.empty(self.size, longest, dtype=torch.uint8))
        all_gather(shares, torch.nn.functional.pad(own, (0, longest - len(own))))
        packed = (share[: int(length)] for share, length in zip(shares, lengths, strict=True))
        turns = zip_longest(*map(_unpack, packed), fillvalue=NO_ITEM)
        return [item for turn in turns for item in turn if item is not NO_ITEM]

    def first(self, value: Item) -> Item:
        """The value that rank 0 has, on every rank."""
        if self.size == 1:
            return value
        import torch
        from torch.distributed import broadcast

        own = _pack(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        broadcast(length := torch.tensor([len(own)]), src=0)
        broadcast(packed := own if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8), src=0)
        received: Item = _unpack(packed)
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


def join_ranks(ranks: Ranks, backend: str) -> None:
    """Makes this process one of them, once; waits until all are there."""
    import torch.distributed

    if ranks.size == 1 or torch.distributed.is_initialized():
        return
    store = torch.distributed.FileStore(os.environ[RENDEZVOUS], ranks.size) if RENDEZVOUS in os.environ else None
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)


def _pack(value: Any) -> "Tensor":
    """A value as bytes, `[N]` uint8."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=5)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpack(packed: "Tensor") -> Any:
    import torch

    stream = io.BytesIO(packed.numpy().tobytes())
    return torch.load(stream, map_location=_to_own_gpu, pickle_module=_Records, weights_only=False)


class _Unpickler(pickle.Unpickler):
    """Builds tensors and this project's records, and calls nothing else: other processes may reach the ports of ranks.

    Raises:
        pickle.UnpicklingError: the bytes name anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")):
            return torch._utils._rebuild_tensor_v2 if name == "_rebuild_tensor_v2" else OrderedDict
        found = super().find_class(module, name) if module.startswith("pipeline.") and "." not in name else None
        if not isinstance(found, type) or found.__module__ != module or not (is_dataclass(found) or issubclass(found, Enum)):
            raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which is no record")
        return found


class _Records:
    """What `torch.load` takes for the module `pickle`."""

    Unpickler = _Unpickler


def _to_own_gpu(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage
