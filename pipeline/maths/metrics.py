"""Means over a whole optimizer step from the sums of its micro-batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Sums = Mapping[str, Tensor | float]


def on_host(parts: Sequence[Sums]) -> list[dict[str, float]]:
    """The mappings with plain floats for their 0-d tensors, all of one device; the device is waited for once."""
    tensors = [value.detach().double() for part in parts for value in part.values() if isinstance(value, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(values) if isinstance(value, Tensor) else float(value) for name, value in part.items()} for part in parts]


def combine(parts: Sequence[Sums]) -> dict[str, float]:
    """Mean metrics of a step from the sums of its micro-batches; with several mini-batches in it, each weighs by its count.

    Args:
        parts: one mapping per micro-batch, all with the same names; `count` is the number of summands, names ending in `_max`
            are maxima, every other value is a sum over `count` summands.

    Returns:
        Plain floats without `count`; means are 0.0 when nothing was counted. Empty for no parts.
    """
    if not parts:
        return {}
    read = on_host(parts)
    count = sum(part["count"] for part in read)
    combined = {}
    for name in read[0]:
        values = [part[name] for part in read]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name != "count":
            combined[name] = sum(values) / count if count else 0.0
    return combined
