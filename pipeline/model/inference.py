"""The forward pass that samples: over cached keys and values, without gradients, in as few operations as it takes.

A small model's decoding step is bound by the number of its operations, on a GPU and on a CPU: matrices that read the same input
are one, and no module is called on the way.
Dimensions: B sequences, T positions, V vocabulary, W width, I inner width, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.kv_block import Prefixes
from pipeline.model.kv_cache import KVCache, Span
from pipeline.model.lora import LoraLinear
from pipeline.model.matrix import Matrix
from pipeline.model.moe import SwiGLU
from pipeline.model.norm import rms_norm
from pipeline.model.transformer import Block, CausalLM


class _Layer(NamedTuple):
    """A block's weights.

    Attributes:
        attention_norm, mlp_norm: [W].
        qkv: [(H + 2 K) D, W], the projections of queries, keys and values one below the other.
        qk_norm: [H + K, D], the norm's weight of every query and key head.
        output: [W, H D].
        gate_up: [2 I, W]; None for a mixture of experts.
        down: [W, I]; None for a mixture of experts.
    """

    attention_norm: Tensor
    qkv: Matrix
    qk_norm: Tensor
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix | None = None
    down: Matrix | None = None

    @classmethod
    def of(cls, weights: Sequence[Tensor]) -> Self:
        """Of what `_weights` gives."""
        attention_norm, qkv, qk_norm, output, mlp_norm, *mlp = weights
        return cls(attention_norm, Matrix(qkv), qk_norm, Matrix(output), mlp_norm, *map(Matrix, mlp))


class InferenceModel:
    """A copy of a `CausalLM`'s weights that is brought up to date in place, adapters merged, and what it computes.

    Attributes:
        config: the model's.
        dtype: what the layers' products are computed in; keys and values are kept in it. Norms, rotations, the stream between
            the layers and the head stay fp32, as under autocast.
    """

    def __init__(self, model: CausalLM, dtype: torch.dtype | None = None) -> None:
        """Copies the weights.

        Args:
            model: must stay on its device, and in evaluation mode whenever this is called.
            dtype: None for that of the weights.
        """
        self.config = model.config
        self.dtype = dtype or model.lm_head.weight.dtype
        self._source = model
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written outside inference mode
            self._copies = [weight.clone(memory_format=torch.contiguous_format) for weight in self._present()]
        self._embedding, self._final_norm, *rest = self._copies
        self._head = Matrix(self._embedding)
        size = len(rest) // self.config.num_hidden_layers
        self._layers = [_Layer.of(rest[start : start + size]) for start in range(0, len(rest), size)]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._source.lm_head.weight.device

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows may go on from a prefix that lies in another block: attention in two parts needs a kernel of the CPU's."""
        return self.device.type == "cpu" and self.dtype == torch.float32

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the model's present weights; the copies stay where they are in memory."""
        for copy, weight in zip(self._copies, self._present(), strict=True):
            copy.copy_(weight)
        for matrix in (self._head, *(each for layer in self._layers for each in layer if isinstance(each, Matrix))):
            matrix.pack()

    def hidden(self, input_ids: Tensor, cache: KVCache) -> Tensor:
        """Hidden states after the final norm, [B, T, W], fp32, of ids [B, T] behind what each row has in the cache.

        Keys and values are written behind each row's own length; `cache.advance` makes them visible afterwards.
        """
        forward = cache.open(input_ids.shape[1])
        cos, sin = self._source.model.rotation(forward.positions)
        x = F.embedding(input_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            q, k, v = self._queries_keys_values(layer, self._normed(x, layer.attention_norm), cos, sin)
            mixed = [self._attend(q, k, v, span) for span in forward.write(number, k, v)]
            x = x + layer.output((mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(2))
            x = x + self._feed_forward(number, layer, self._normed(x, layer.mlp_norm))
        return self._normed(x, self._final_norm, torch.float32)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., W], in fp32."""
        return self._head(hidden)

    def _queries_keys_values(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H, D], [B, T, K, D] and [B, T, K, D] of normalised states [B, T, W]."""
        config = self.config
        heads = config.num_attention_heads, config.num_key_value_heads
        projected = layer.qkv(x).unflatten(-1, (-1, config.head_dim))
        both, v = projected.split((sum(heads), heads[1]), dim=2)
        both = rms_norm(both.float(), layer.qk_norm, config.rms_norm_eps)
        rotated = torch.addcmul(both * cos, both.roll(config.head_dim // 2, dims=-1), sin).to(self.dtype)
        q, k = rotated.split(heads, dim=2)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """Attention of a span's rows over what is cached of them, [rows, T, H, D]; `q`, `k` and `v` are the new positions.

        The queries that share a key head are laid out as further queries of that head: nothing is repeated but the mask.
        """
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        q = q[span.rows].transpose(1, 2)
        if span.mask is None:
            # one key head per query head, because not every fused kernel knows grouped queries
            k, v = (states[span.rows].repeat_interleave(repeats, dim=2).transpose(1, 2) for states in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        rows, num_heads, length, head_dim = q.shape
        grouped = q.reshape(rows, -1, repeats * length, head_dim)
        if span.prefixes is not None:
            return _attend_behind(grouped, span, span.prefixes).view(rows, num_heads, length, head_dim).transpose(1, 2)
        mask = span.mask if length == 1 else span.mask.repeat(1, 1, repeats, 1)
        mixed = F.scaled_dot_product_attention(grouped, span.keys, span.values, mask)
        return mixed.view(rows, num_heads, length, head_dim).transpose(1, 2)

    def _feed_forward(self, number: int, layer: _Layer, x: Tensor) -> Tensor:
        """[B, T, W] of normalised states [B, T, W]."""
        if layer.gate_up is None or layer.down is None:
            with torch.autocast(x.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                update, _ = self._blocks[number].mlp(x, None)
                return cast(Tensor, update)
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _normed(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps).to(dtype or self.dtype)

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self._source.model.layers))

    def _present(self) -> list[Tensor]:
        """The model's weights as they are now: embedding, final norm, layers."""
        layers = [weight for block in self._blocks for weight in _weights(block, self.dtype)]
        return [self._source.lm_head.weight, self._source.model.norm.weight, *layers]


def _attend_behind(q: Tensor, span: Span, prefixes: Prefixes) -> Tensor:
    """Attention of one position per row over the prefix that it shares and over what is its own.

    Each part has its own softmax; they are weighted by the sums of their exponentials, which the kernel returns as logarithms.

    Args:
        q: [rows, K, H / K, D].
        span: what is the rows' own.
        prefixes: what they share; it is read once for all rows of a prefix.

    Returns:
        As `q`.
    """

    def apart(shared: Tensor) -> Tensor:  # [P, K, G H / K, ...] -> [rows, K, H / K, ...]
        return shared.unflatten(2, (-1, q.shape[2])).transpose(1, 2).flatten(0, 1)[prefixes.places]

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    together = q[prefixes.rows].transpose(1, 2).flatten(2, 3)
    shared, shared_sum = attend(together, prefixes.keys, prefixes.values, attn_mask=prefixes.mask)
    own, own_sum = attend(q, span.keys, span.values, attn_mask=span.mask)
    weight = torch.sigmoid(apart(shared_sum) - own_sum)
    mixed: Tensor = torch.lerp(own, apart(shared), weight[..., None])
    return mixed


def _weights(block: Block, dtype: torch.dtype) -> list[Tensor]:
    """Those of a `_Layer`, in its order."""
    attention, mlp = block.self_attn, block.mlp
    matrices = [_matrix(attention.q_proj), _matrix(attention.k_proj), _matrix(attention.v_proj)]
    norms = [attention.q_norm.weight.expand(attention.num_heads, -1), attention.k_norm.weight.expand(attention.num_kv_heads, -1)]
    weights = [
        block.input_layernorm.weight,
        torch.cat(matrices).to(dtype),
        torch.cat(norms),
        _matrix(attention.o_proj).to(dtype),
        block.post_attention_layernorm.weight,
    ]
    if isinstance(mlp, SwiGLU):
        weights += torch.cat((_matrix(mlp.gate_proj), _matrix(mlp.up_proj))).to(dtype), _matrix(mlp.down_proj).to(dtype)
    return weights


def _matrix(layer: nn.Linear) -> Tensor:
    return layer.merged().weight if isinstance(layer, LoraLinear) else layer.weight
