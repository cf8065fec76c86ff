"""Running a function of logits over chunks of positions, so that memory does not grow with B * T * V."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.data.labels import IGNORED_LABEL

# Logits of one call that are simply kept for the backward pass: 64 MiB in fp32. Forming them again costs time.
KEPT_LOGITS = 2**24

Result = TypeVar("Result")


def over_wanted(
    function: Callable[..., Result], hidden: Tensor, head_weight: Tensor, labels: Tensor, *args: float, chunk: int | None
) -> tuple[list[Result], Tensor]:
    """Calls `function(hidden [N, D], head_weight, labels [N], *args)` on the positions whose label is not -100.

    What fits into one chunk is one plain call. More is done a chunk at a time and recomputed in the backward pass, so that
    no more than one chunk of logits lives at once.

    Args:
        hidden: [..., W].
        labels: [...], on the device of `hidden`, or on the CPU: then nothing has to wait for the device.
        chunk: positions per call; as many as make `KEPT_LOGITS` logits when left out.

    Returns:
        The results in order, and the mask of wanted positions on the device of `hidden`. At least one call, on nothing if need
        be: it keeps the graph.
    """
    wanted = labels != IGNORED_LABEL
    places = wanted.flatten().nonzero()[:, 0]
    chosen_labels = labels.flatten().index_select(0, places).to(hidden.device, non_blocking=True)
    chosen_hidden = hidden.flatten(0, -2).index_select(0, places.to(hidden.device, non_blocking=True))
    wanted = wanted.to(hidden.device, non_blocking=True)
    size = chunk or max(1, KEPT_LOGITS // len(head_weight))
    if len(chosen_labels) <= size:
        return [function(chosen_hidden, head_weight, chosen_labels, *args)], wanted
    return [
        checkpoint(
            function,
            chosen_hidden[start : start + size],
            head_weight,
            chosen_labels[start : start + size],
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, len(chosen_labels), size)
    ], wanted
