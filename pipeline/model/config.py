"""The shape of a model: what a checkpoint's `.json` says and the weights alone cannot. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from pipeline.params.schema import ModelParams, RopeScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The `model` section of params.yaml and the vocabulary size, which comes from the tokenizer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    dropout: float
    use_moe: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    router_aux_loss_coef: float

    @classmethod
    def from_params(cls, params: ModelParams, vocab_size: int) -> Self:
        """The configuration that validated parameters and a tokenizer's vocabulary size make."""
        return cls(vocab_size=vocab_size, **{name: getattr(params, name) for name in ModelParams.model_fields})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` reads them back."""
        scaling = None if self.rope_scaling is None else self.rope_scaling.model_dump()
        return {**asdict(self), "rope_scaling": scaling}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration that `to_dict` wrote.

        Raises:
            ValueError: a key is missing, unknown, of another type or out of its range.
        """
        section = {name: value for name, value in values.items() if name != "vocab_size"}
        vocab_size = values.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size!r}: must be an integer >= 1")
        return cls.from_params(ModelParams.model_validate(section), vocab_size)
