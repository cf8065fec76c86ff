"""The decoder: pre-norm, grouped-query attention with normalised queries and keys, RoPE, SwiGLU or experts.

Shapes and parameter names are those of Qwen3 (arXiv:2505.09388), so weights move between the two unchanged.
Dimensions: B sequences, T positions, V vocabulary, W width, H query heads, K key/value heads, D head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig
from pipeline.model.moe import MixtureOfExperts, RouterStats, SwiGLU
from pipeline.model.norm import RMSNorm
from pipeline.model.packing import Packing
from pipeline.model.rope import apply_rope, rope_tables

INIT_STD = 0.02


class Rotation(nn.Module):
    """The RoPE tables; computed once, moved with the model, never saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] or [B, T] in; cosines and sines [..., T, 1, D], one for all heads."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


class Attention(nn.Module):
    """Causal grouped-query attention; queries and keys are normalised per head before the rotation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        width = config.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        packing: Packing | None = None,
    ) -> Tensor:
        """Attends causally.

        Args:
            x: [B, T, W].
            rotation: cosines and sines of the T positions.
            packing: how `x`, with B = 1, is made up of rows.

        Returns:
            [B, T, W].
        """
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim)
        rotated = apply_rope(torch.cat((q, k), dim=2), *rotation).to(v.dtype)
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=2)
        # one key head per query head, because not every fused kernel knows grouped queries
        repeats = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        dropout = self.dropout if self.training else 0.0
        if packing is not None:
            mixed = packing.attend(q, k, v, dropout)
        else:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, length, -1))


class Block(nn.Module):
    """One layer. Under autocast the sublayers work in bf16; adding them to the fp32 stream `x` keeps the stream fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config) if config.use_moe else SwiGLU(config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor | None, *attention_args: Any) -> tuple[Tensor, RouterStats | None]:
        """[B, T, W] in; [B, T, W] and the router's statistics (training mixtures only) out."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), *attention_args)).to(x.dtype)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            update, stats = self.mlp(normed, visible)
        else:
            update, stats = self.mlp(normed), None
        return x + self.dropout(update).to(x.dtype), stats


Layer = Callable[..., tuple[Tensor, RouterStats | None]]


def _run_layer(block: Block, *args: Any) -> tuple[Tensor, RouterStats | None]:
    """`block(*args)`; compiled, it is one graph for all layers of a model, whose weights are its inputs."""
    output: tuple[Tensor, RouterStats | None] = block(*args)
    return output


@functools.cache
def _compiled_layer() -> Layer:
    return torch.compile(_run_layer, dynamic=True)


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but a head.

    Attributes:
        gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
        compiled: run the layers through `torch.compile` where padded rows are trained; what samples, packed rows and mixtures
            change shape too often to gain from it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.compiled = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = Rotation(config)
        self.router_stats: list[RouterStats] = []

    def __getstate__(self) -> dict[str, Any]:
        # The statistics hang on the last forward's graph, which can neither be copied nor pickled.
        return {**self.__dict__, "router_stats": []}

    def forward(self, input_ids: Tensor, visible: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """See `Backbone.hidden`."""
        length = input_ids.shape[1]
        longest = length if packing is None else packing.longest
        limit = self.config.max_position_embeddings
        if longest > limit:
            raise ParamsError(f"model.max_position_embeddings={limit}: must be >= {longest}, the length of a sequence in use")
        positions = torch.arange(length, device=input_ids.device) if packing is None else packing.positions
        rotation = self.rotation(positions)
        x = self.embed_tokens(input_ids)
        self.router_stats = []
        plain = packing is None and not self.config.use_moe
        layer: Layer = _compiled_layer() if self.compiled and plain and torch.is_grad_enabled() else _run_layer
        for block in self.layers:
            args = (block, x, visible, rotation, packing)
            recompute = self.gradient_checkpointing and torch.is_grad_enabled()
            x, stats = checkpoint(layer, *args, use_reentrant=False) if recompute else layer(*args)
            if stats is not None:
                self.router_stats.append(stats)
        return self.norm(x)


class Backbone(nn.Module):
    """A decoder under the name `model`, as Qwen3 has it; its subclasses add a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)

    def init_weights(self, seed: int) -> None:
        """Draws every matrix from N(0, 0.02), sets norms to 1 and biases to 0; a function of `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        visible: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, T, W], fp32.

        Args:
            input_ids: [B, T]; rows are right-padded, a pad position never influences an earlier one.
            visible: [B, T] bool, True where a token counts in the router's statistics; None counts all, padding included.
            packing: where `input_ids` are those of a packing, [1, N]: each row has its own positions and sees itself alone.

        Raises:
            ParamsError: a position lies beyond model.max_position_embeddings.
        """
        return self.model(input_ids, visible, packing)

    def router_aux_loss(self) -> Tensor:
        """Load-balancing loss of the last forward, summed over layers, scalar; 0 for a dense model or in evaluation mode."""
        losses = [stats.aux_loss for stats in self.model.router_stats]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.model.norm.weight.device)

    def expert_load_max(self) -> Tensor:
        """Largest share of a layer's routed slots that one expert took in the last training forward, scalar; 0 when dense."""
        loads = [stats.load.max() for stats in self.model.router_stats]
        return torch.stack(loads).max() if loads else torch.zeros((), device=self.model.norm.weight.device)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward pass instead of keeping their activations."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.model.gradient_checkpointing = enabled

    @property
    def compiled(self) -> bool:
        """Whether layers run through `torch.compile` where that pays."""
        return self.model.compiled

    @compiled.setter
    def compiled(self, enabled: bool) -> None:
        self.model.compiled = enabled


class CausalLM(Backbone):
    """The language model; its head is the embedding matrix (arXiv:1608.05859), present under both names in the state dict."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self.init_weights(seed)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., W], in fp32 also under autocast: what samples and what scores are one."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.lm_head(hidden.float())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of token ids [B, T]."""
        return self.head(self.hidden(input_ids))
