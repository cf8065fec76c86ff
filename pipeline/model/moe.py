"""Feed-forward layers: SwiGLU, and a mixture of SwiGLU experts with a softmax router.

Dimensions: B sequences, T positions, N = B * T tokens, E experts, k experts per token, W width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import ModelConfig


class RouterStats(NamedTuple):
    """What one mixture layer reports of a training forward."""

    aux_loss: Tensor  # scalar, with gradient
    load: Tensor  # [E], share of the routed slots per expert, sums to 1


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202), no biases."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] in, [..., W] out."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Each token is processed by the k most probable of E experts, weighted by their probabilities.

    With `norm_topk_prob` the k weights are divided by their sum. For k = 1 the weight is then 1 whatever the router says,
    and the router learns from the auxiliary loss alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.aux_loss_coef = config.router_aux_loss_coef
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts))

    def forward(self, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, RouterStats | None]:
        """Mixes the experts' outputs.

        Args:
            x: [B, T, W].
            visible: [B, T] bool, True where a token counts in the router's statistics; None counts all.

        Returns:
            [B, T, W], and in training mode the router's statistics.
        """
        tokens = x.flatten(0, -2)
        probs = self.gate(tokens).float().softmax(dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        mixed = self._mix(tokens, weights, chosen).view_as(x)
        return mixed, self._stats(probs, chosen, visible) if self.training else None

    def _mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Runs every expert once, on the tokens that chose it, [N, W]."""
        slots = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        mixed = torch.zeros_like(tokens)
        for expert, group in zip(self.experts, slots.split(counts), strict=True):
            # An expert that nobody chose runs on an empty group in training, so that its gradients are zero, not absent.
            if len(group) or self.training:
                rows = group // self.top_k
                output = expert(tokens[rows]) * weights.flatten()[group, None]
                mixed.index_add_(0, rows, output.to(mixed.dtype))
        return mixed

    def _stats(self, probs: Tensor, chosen: Tensor, visible: Tensor | None) -> RouterStats:
        """Load-balancing loss (Switch Transformer, arXiv:2101.03961, eq. 4-6): coef * E * sum_e load_e * mean prob_e."""
        num_experts = probs.shape[-1]
        counted = probs.new_ones(len(probs)) if visible is None else visible.flatten().to(probs.dtype)
        total = counted.sum().clamp(min=1)
        # For k > 1 the load is summed over the k slots, so a balanced router costs coef * k.
        load = F.one_hot(chosen, num_experts).sum(dim=1).to(probs.dtype).T @ counted / total
        mean_probs = counted @ probs / total
        return RouterStats(self.aux_loss_coef * num_experts * (load @ mean_probs), load.detach() / self.top_k)
