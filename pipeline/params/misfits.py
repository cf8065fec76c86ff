"""Values that do not fit those of another section."""

from collections.abc import Iterator

from pipeline.params.ranges import MAX_PARAMETERS
from pipeline.params.schema import Params
from pipeline.params.sizes import cache_bytes, num_parameters

FLOAT_BYTES = 4
GIB = 2**30


def misfits(params: Params) -> Iterator[str]:
    """A line each, which begins with a key."""
    model, window = params.model, params.model.max_position_embeddings
    allowed = f"must be <= model.max_position_embeddings={window}"
    for name in ("pretrain", "full_sft", "lora", "dpo"):
        length = getattr(params, name).max_seq_len
        if length > window:
            yield f"{name}.max_seq_len={length}: {allowed}"
    longest = {name: getattr(params, name).max_prompt_len + getattr(params, name).max_new_tokens for name in ("ppo", "grpo")}
    for name, length in longest.items():
        if length > window:
            yield f"{name}.max_prompt_len + {name}.max_new_tokens = {length}: {allowed}"
    if params.agent.max_total_len > window:
        yield f"agent.max_total_len={params.agent.max_total_len}: {allowed}"
    if params.eval.max_new_tokens >= window:  # prompts need room, too
        yield f"eval.max_new_tokens={params.eval.max_new_tokens}: must be < model.max_position_embeddings={window}"
    if (weights := num_parameters(model, params.tokenizer.vocab_size)) > MAX_PARAMETERS:
        yield f"model.hidden_size={model.hidden_size}: {weights:.3g} parameters in all, must be <= {MAX_PARAMETERS:.3g}"
    for name, length in (longest | {"agent": params.agent.max_total_len}).items():
        if length > window:
            continue
        given, needed = getattr(params, name).cache_gib, cache_bytes(model, length, FLOAT_BYTES) / GIB
        if given < needed:
            yield f"{name}.cache_gib={given:g}: must be >= {needed:.3g}, the keys and values of a row of {length} positions"
