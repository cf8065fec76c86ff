"""Low-rank adapters (LoRA, arXiv:2106.09685): y = W x + alpha / rank * B (A x), with W frozen.

An adapted layer keeps its parameter names, so base checkpoints fit a model before and after.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import DataError, ParamsError, PipelineError
from pipeline.model.transformer import INIT_STD, Backbone


class Adapter(nn.Module):
    """B (A x): through `rank` dimensions and back."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Linear(in_features, rank, bias=False)
        self.B = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] in, [..., out] out."""
        return self.B(self.A(x))


class LoraLinear(nn.Linear):
    """A linear layer without bias and its adapter, `lora`; the layer's own parameter keeps its name and memory."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.scale = alpha / rank
        self.lora = Adapter(base.in_features, base.out_features, rank).to(base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] in, [..., out] out."""
        return super().forward(x) + self.scale * self.lora(x)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer with the adapter folded into the weight, in fp32."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight + self.scale * self.lora.B.weight @ self.lora.A.weight)
        return linear


def add_lora(model: Backbone, *, rank: int, alpha: float, targets: Iterable[str], seed: int) -> None:
    """Freezes the model and adapts every linear layer whose name ends in one of `targets`; A from N(0, 0.02), B zero.

    Args:
        model: changed in place; its outputs stay the same until the adapters are trained.
        rank, alpha: width of the adapters and their scale, alpha / rank.
        targets: names of layers, such as `q_proj`.
        seed: decides every A.

    Raises:
        ParamsError: a target names no layer of the model, or the model has adapters already.
    """
    if _adapted(model):
        raise ParamsError("lora: the model has adapters already; merge them first")
    targets = tuple(targets)
    layers = {name: module for name, module in model.model.named_modules(prefix="model") if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name in layers} - {"gate"})
    for target in targets:
        if target not in known:
            raise ParamsError(f"lora.targets: {target!r} is no layer of the model; allowed are {', '.join(known)}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in layers.items():
        if name.rpartition(".")[2] in targets:
            adapted = LoraLinear(module, rank, alpha)
            draw = torch.randn((rank, module.in_features), generator=generator) * INIT_STD
            with torch.no_grad():
                adapted.lora.A.weight.copy_(draw)
                adapted.lora.B.weight.zero_()
            _replace(model, name, adapted)


def lora_state_dict(model: Backbone) -> dict[str, Tensor]:
    """The adapters alone: `{module}.lora.A.weight` and `{module}.lora.B.weight`, sharing memory with the model."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora." in name}


def load_lora(model: Backbone, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Adapts the model as `meta` says (rank, alpha, targets) and gives the adapters the saved tensors.

    Raises:
        DataError: the tensors are not exactly those that `meta` asks for on this model.
    """
    add_lora(model, rank=meta["rank"], alpha=meta["alpha"], targets=meta["targets"], seed=0)
    own = lora_state_dict(model)
    wrong = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    wrong += sorted(own.keys() ^ state.keys())
    if wrong:
        raise DataError(f"the adapters do not fit the model; missing, unexpected or of another shape ({len(wrong)}): {wrong[0]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def merge_lora(model: Backbone) -> None:
    """Folds every adapter into its layer, in place; the model is then an ordinary, trainable one.

    Raises:
        PipelineError: the model has no adapters.
    """
    adapted = _adapted(model)
    if not adapted:
        raise PipelineError("merge_lora: the model has no adapters; they are merged once, after add_lora or load_lora")
    for name, module in adapted.items():
        _replace(model, name, module.merged())
    model.requires_grad_(True)


def _adapted(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
