"""The model: a Qwen3-shaped decoder, dense or with experts, its KV cache, adapters, scalar heads and conversions."""
