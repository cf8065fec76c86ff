"""What one optimizer step takes with the parameters as they are: memory and arithmetic, before there is a model.

Of rows that are as long as they may be. Activations are those that a layer keeps for its backward pass, counted as
`model.transformer` makes them; arithmetic is that of the matrices (two operations per weight and token forward, four backward)
and of causal attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from pipeline.params.sizes import cache_bytes, num_parameters

if TYPE_CHECKING:
    from pipeline.params.schema import ModelParams, Params

FLOAT_BYTES = 4
ADAMW = 3  # a weight and its two moments
KEPT_LOGITS = 2**24  # at a time, as `maths.chunks` has them
LOGIT_BYTES = 3 * FLOAT_BYTES  # itself, its softmax and its gradient
SAMPLERS = 4  # frozen copies of stages that sample: reference, judge, and the sampler's own, which a CPU holds twice
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Needs:
    """One stage.

    Attributes:
        memory: bytes of a step: weights, gradients, moments, activations, keys and values.
        flops: operations of a step; 0 where a stage samples, whose rows are as long as they turn out.
        save: bytes of a resumable state.
        output: bytes of what it leaves.
    """

    stage: str
    memory: int
    flops: float
    save: int
    output: int


def needs(params: "Params", item_bytes: int = FLOAT_BYTES) -> Iterator[Needs]:
    """What each stage that trains takes, in the order of the lineage.

    Args:
        item_bytes: of a number in the type in which layers compute.
    """
    model, ranks = params.model, params.runtime.ranks
    weights = num_parameters(model, params.tokenizer.vocab_size)
    active = weights - _idle_weights(model)
    kept_per_token = kept_bytes(params, item_bytes)
    for step in (*_supervised_steps(params, weights), *_sampling_steps(params, weights, item_bytes)):
        tokens = ceil(step.rows / ranks) * step.length
        kept = tokens * kept_per_token + LOGIT_BYTES * min(tokens * params.tokenizer.vocab_size, KEPT_LOGITS)
        save = ADAMW * FLOAT_BYTES * step.trained
        memory = save + FLOAT_BYTES * (step.trained + step.frozen * weights) + kept + step.cache
        attention = model.num_hidden_layers * model.num_attention_heads * model.head_dim * step.length
        output = step.trained if step.stage == "lora" else weights
        flops = 2.0 * (active + attention) * step.passes * step.rows * step.length * step.windows
        yield Needs(step.stage, memory, flops, save, FLOAT_BYTES * output)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a stage does in a step.

    Attributes:
        rows, length: of one forward pass with a backward pass.
        trained: weights.
        windows: such passes of a step, where that is known.
        passes: forward passes over each row; a backward pass counts as two.
        frozen: further copies of the model.
        cache: bytes of keys and values.
    """

    stage: str
    rows: int
    length: int
    trained: int
    windows: int = 0
    passes: int = 0
    frozen: int = 0
    cache: int = 0


def _supervised_steps(params: "Params", weights: int) -> Iterator[_Step]:
    both = 4 if params.runtime.gradient_checkpointing else 3
    live = int(params.dpo.reference == "live")
    for stage, rows, passes, trained, frozen in (
        ("pretrain", 1, both, weights, 0),
        ("full_sft", 1, both, weights, 0),
        ("lora", 1, both - 1, _adapter_weights(params), 1),  # no gradients of frozen matrices
        ("dpo", 2, both + live, weights, live),  # pairs
        ("reward", 2, both, weights, 0),
    ):
        own = getattr(params, stage)
        length = params.dpo.max_seq_len if stage == "reward" else own.max_seq_len  # whose pairs it reads
        rows *= own.batch_size
        yield _Step(stage, rows, length, trained, own.accumulation_steps, passes, frozen)


def _sampling_steps(params: "Params", weights: int, item_bytes: int) -> Iterator[_Step]:
    for stage in ("ppo", "grpo", "agent"):
        own = getattr(params, stage)
        models = 2 if stage == "ppo" else 1  # a critic of the policy's size beside it
        rows = min(own.batch_size * getattr(own, "group_size", 1), own.max_rows)
        length = getattr(own, "max_total_len", own.max_prompt_len + own.max_new_tokens)
        cache = min(int(own.cache_gib * GIB), rows * cache_bytes(params.model, length, item_bytes))
        yield _Step(stage, own.micro_batch_size, length, models * weights, frozen=SAMPLERS, cache=cache)


def kept_bytes(params: "Params", item_bytes: int) -> int:
    """Bytes of a token that the layers keep for the backward pass, or of which they can be computed again."""
    model = params.model
    width, layers = model.hidden_size, model.num_hidden_layers
    heads, groups = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    if model.use_moe:
        mlp = model.num_experts_per_tok * (4 * model.moe_intermediate_size + 2 * width)
    else:
        mlp = 4 * model.intermediate_size
    # normalised rows in fp32; scaled ones, queries and keys before and behind the rotation, repeated keys and values, their mix
    layer = FLOAT_BYTES * 2 * width + item_bytes * (2 * width + 6 * heads + 2 * groups + mlp)
    if params.runtime.gradient_checkpointing:
        return layers * FLOAT_BYTES * width + layer
    return layers * layer


def _idle_weights(model: "ModelParams") -> int:
    """Weights of the experts that a token does not meet."""
    idle = model.num_experts - model.num_experts_per_tok if model.use_moe else 0
    return model.num_hidden_layers * idle * 3 * model.hidden_size * model.moe_intermediate_size


def _adapter_weights(params: "Params") -> int:
    """Weights of lora's two factors per matrix."""
    model = params.model
    heads, groups = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    inner = model.moe_intermediate_size if model.use_moe else model.intermediate_size
    others = {"q_proj": heads, "o_proj": heads, "k_proj": groups, "v_proj": groups}
    sums = [
        (model.hidden_size + others.get(name, inner)) * (model.num_experts if model.use_moe and name not in others else 1)
        for name in params.lora.targets
    ]
    return params.lora.rank * model.num_hidden_layers * sum(sums)
