"""Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467, eq. 4)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in fp32; the output is fp32 and whoever multiplies it next casts it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] in, [..., size] out."""
        x = x.float()
        if x.device.type == "cpu":
            normed: Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)
            return normed
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _CpuRMSNorm(torch.autograd.Function):
    """The same with half the passes over memory: torch has one kernel for it on GPUs only, on CPUs a dozen small ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _inverse_rms(x, eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        rows = (grad * normed).reshape(-1, len(weight))
        # d normed / d x = scale * (identity - normed normed^T / size)
        projected = (rows @ weight).view(scale.shape).div_(-len(weight))
        grad_x = (grad * weight).addcmul_(normed, projected).mul_(scale)
        return grad_x, rows.sum(dim=0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `RMSNorm` computes, without gradients; x [..., size], fp32, and a weight that broadcasts to it."""
    if x.device.type == "cpu":
        return x * _inverse_rms(x, eps) * weight
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), [..., 1], on a CPU and without gradients."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(x.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
