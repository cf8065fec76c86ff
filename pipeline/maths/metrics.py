"""Means over a whole optimizer step from the sums of its micro-batches."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def combine(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Mean metrics of a step from the sums of its micro-batches; with several mini-batches in it, each weighs by its count.

    Args:
        parts: one mapping per micro-batch, all with the same names; `count` is the number of summands, names ending in `_max`
            are maxima, every other value is a sum over `count` summands.

    Returns:
        Plain floats without `count`; means are 0.0 when nothing was counted. Empty for no parts.
    """
    if not parts:
        return {}
    count = sum(float(part["count"]) for part in parts)
    combined = {}
    for name in parts[0]:
        values = [float(part[name]) for part in parts]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name != "count":
            combined[name] = sum(values) / count if count else 0.0
    return combined
