"""A weight matrix that only ever multiplies: on a CPU it lies as the products read it, not as it is stored."""

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FROM = 2**20
"""Multiplications of a product from which on the packed layout is faster: its kernel takes some 10 microseconds to call."""


class Matrix:
    """x @ weight.T.

    A product of few rows with a plainly stored matrix spends most of its time on laying the matrix out for the CPU's vector
    units, at every call. oneDNN does that once and keeps the result: at [8, 768] x [768, 4864] a quarter of the time.
    """

    def __init__(self, weight: Tensor) -> None:
        """Packs the weight, where there is a way.

        Args:
            weight: [outputs, inputs], kept; who writes to it calls `pack` afterwards.
        """
        self.weight = weight
        self._packed: Tensor | None
        self.pack()

    def pack(self) -> None:
        """Takes over what the weight holds now."""
        self._packed = None
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] in, [..., outputs] out."""
        if self._packed is not None and x.numel() * len(self.weight) >= PACKED_FROM:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
            return product
        return F.linear(x, self.weight)
