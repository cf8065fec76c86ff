"""What the supervised stages minimise, each as a sum over a micro-batch with the count it will be divided by.

Dividing is the loop's business, once per optimizer step, so micro-batches of any cut give the same gradient.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.labels import IGNORED_LABEL
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.transformer import Backbone


@dataclass(slots=True)
class LossSum:
    """`loss` (differentiable) and `sums` of metrics are sums over `count` terms (tokens or pairs); metrics ending in `_max` are
    maxima. Sums stay on the device until somebody wants to read them.
    """

    loss: Tensor
    count: int
    sums: dict[str, Tensor | float]

    @property
    def metrics(self) -> dict[str, Tensor | float]:
        """`sums` beside their count, as `metrics.combine` takes them."""
        return {"count": float(self.count), **self.sums}


class Objective(Protocol):
    """A loss over micro-batches; `count` is known before the forward pass so that a window can be normalised as one.

    `training_mode` is called before every optimizer step and decides whether its forward passes drop anything out.
    """

    def training_mode(self) -> None: ...
    def count(self, batch: Any) -> int: ...
    def tokens(self, batch: Any) -> int: ...
    def __call__(self, batch: Any) -> LossSum: ...


def sums_of(loss: Tensor, metrics: dict[str, Tensor]) -> dict[str, Tensor | float]:
    """A loss and the sums beside it, without their count and without gradient."""
    return {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items() if name != "count"}}


def with_router_balance(part: LossSum, model: Backbone) -> LossSum:
    """`part` with the balance loss of the model's last forward added once per counted term; without one, as it is."""
    if not model.model.router_stats:
        return part
    aux = model.router_aux_loss() * part.count
    sums: dict[str, Tensor | float] = {"aux_loss": aux.detach(), "expert_load_max": model.expert_load_max()}
    sums["loss"] = part.loss.detach().double() + aux.detach().double()
    return LossSum(part.loss + aux, part.count, part.sums | sums)


def without_dropout(model: Backbone) -> None:
    """Evaluation mode, in which the policy that is updated is the one that is compared; routers alone go on taking statistics."""
    model.eval()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.train()


def answer_lengths(labels: Tensor) -> Tensor:
    """Trained tokens of each row, [B]; labels [B, T] with -100 = not trained."""
    return (labels != IGNORED_LABEL).sum(dim=1)


def real_positions(labels: Tensor) -> Tensor:
    """True up to each row's last trained label, [B, T]: every row ends there, what follows is padding.

    Only routers look at it: padding must not count as load that experts have to share.
    """
    positions = torch.arange(labels.shape[1], device=labels.device)
    return positions <= last_trained(labels)[:, None]


def routed_positions(model: Backbone, labels: Tensor) -> Tensor | None:
    """`real_positions` for a model with routers; None for one without."""
    return real_positions(labels) if model.config.use_moe else None


def last_trained(labels: Tensor) -> Tensor:
    """Index of the last trained position of each row, [B]; labels [B, T] with -100 = not trained."""
    positions = torch.arange(labels.shape[1], device=labels.device)
    return torch.where(labels != IGNORED_LABEL, positions, -1).amax(dim=1)
