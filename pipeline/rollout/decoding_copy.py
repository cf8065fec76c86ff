"""A copy of a model that takes fewer operations per forward: decoding a small model on a GPU is bound by their number."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.model.transformer import CausalLM

ONE_INPUT = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
"""Layers of a dense block that read the same input: one product gives all of them."""


def decoding_copy(model: CausalLM, autocast_dtype: torch.dtype | None) -> CausalLM:
    """The model's twin for inference; `load_state_dict` brings it up to date and leaves its tensors where they are.

    Args:
        model: a dense one, with adapters or without.
        autocast_dtype: the mixed precision that it will run under. The layers' matrices are kept in this type: autocast would
            cast them at every forward, with the same result.
    """
    with torch.inference_mode(False):
        twin = copy.deepcopy(model).requires_grad_(False)
        for block in twin.model.layers:
            for layer in block.modules():
                if isinstance(layer, nn.Linear) and autocast_dtype is not None:
                    layer.to(autocast_dtype)
            for owner, names in ONE_INPUT:
                _share_product(block.get_submodule(owner), names)
    return twin


def _share_product(owner: nn.Module, names: Sequence[str]) -> None:
    """Makes one product of the named layers, unless one of them has an adapter."""
    layers = [owner.get_submodule(name) for name in names]
    weights = [layer.weight for layer in layers if type(layer) is nn.Linear]
    if len(weights) == len(layers):
        product = _Product(torch.cat(weights), [len(weight) for weight in weights])
        for number, name in enumerate(names):
            setattr(owner, name, _Part(product, number))


class _Product:
    """x W^T for the matrices of several layers, one below the other in W; computed when the first of them is called.

    Args:
        weight: W.
        sizes: how many rows of W belong to each layer.
    """

    def __init__(self, weight: Tensor, sizes: list[int]) -> None:
        self.weight = weight
        self.sizes = sizes
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., size] of every layer, of [..., in]."""
        if x is not self._input:
            self._input, self._outputs = x, nn.functional.linear(x, self.weight).split(self.sizes, dim=-1)
        return self._outputs


class _Part(nn.Module):
    """A linear layer that has its output from a product; its parameter is part of the product's matrix."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(product.weight.split(product.sizes)[number], requires_grad=False)
        self._product = product
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] in, [..., out] out."""
        return self._product.outputs(x)[self._number]
