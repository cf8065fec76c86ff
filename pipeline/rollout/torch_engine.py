"""Sampling from a `CausalLM` in this process: shared prefill, one batch that rows leave and waiting rows join."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from pipeline.model.kv_cache import KVBlock
from pipeline.model.transformer import CausalLM
from pipeline.rollout.block_decode import BlockDecoder
from pipeline.rollout.records import Completion
from pipeline.rollout.rows import Row
from pipeline.rollout.static_decode import StaticDecoder
from pipeline.rollout.truncation import Truncation


class TorchRolloutEngine:
    """A `RolloutEngine` over a model that others may train meanwhile: every call samples from its present weights.

    Rows of equal prompt are prefilled once, and a later turn of an episode reads only what is new in it. Logits are computed at
    last positions only, and logprobs are recorded from the logits that were sampled from. An id's random number depends on its
    row's key and position, so a row's text does not depend on its neighbours, up to near-ties of floating point.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        stop_ids: Iterable[int],
        pad_id: int,
        max_rows: int,
        autocast_dtype: torch.dtype | None = None,
        static: bool | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """Keeps the model.

        Args:
            model: Run in evaluation mode and without gradients; its mode is restored after each call.
            stop_ids: Ids that end a completion; the one sampled is its last id.
            pad_id: Fills prompts to equal length. It can be sampled like any other id.
            max_rows: Most rows in memory together, >= 1; others wait until there is room.
            autocast_dtype: Mixed precision of the forward passes; None for the weights' own.
            static: Decode with static shapes, on a GPU as CUDA graphs (`StaticDecoder`, which keeps a copy of the weights), or
                with shapes that follow the rows (`BlockDecoder`). None takes static shapes where the model lies on a GPU and
                is dense: which experts a token goes to decides shapes. With static shapes the model keeps the layers it has
                at the first call; adapters are added or merged before.
            truncation: For inference, what is ruled out of the distribution; its shapes follow the rows. Logprobs are those of
                the truncated distribution.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: must be >= 1")
        self._model = model
        self._autocast_dtype = autocast_dtype
        if static is None:
            static = self._device.type == "cuda" and not model.config.use_moe and truncation is None
        self._decoder: BlockDecoder | StaticDecoder
        if static:
            self._decoder = StaticDecoder(model, frozenset(stop_ids), pad_id, max_rows, autocast_dtype)
        else:
            self._decoder = BlockDecoder(model, frozenset(stop_ids), pad_id, max_rows, truncation)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        greedy: bool | Sequence[bool] = False,
        previous: Sequence[Completion | None] | None = None,
        remember: bool = False,
        finished: Callable[[int, Completion], object] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: An empty prompt, a limit below 1, a temperature that is not positive, counts that differ, or a prompt
                that does not go on from where its previous completion ended.
            ParamsError: A prompt and its new tokens exceed the model's window.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        greedy = [greedy] * len(prompts) if isinstance(greedy, bool) else greedy
        previous = previous or [None] * len(prompts)
        if not len(prompts) == len(keys) == len(limits) == len(greedy) == len(previous):
            raise ValueError(
                f"{len(prompts)} prompts, {len(keys)} keys, {len(limits)} limits, {len(greedy)} greedy flags, "
                f"{len(previous)} previous completions: must be equally many"
            )
        if temperature <= 0 or min(limits, default=1) < 1 or not all(len(prompt) for prompt in prompts):
            raise ValueError("generate: temperature must be > 0, max_new_tokens >= 1, and no prompt empty")
        rows = [
            Row(tuple(prompt), key, limit, flag, before.memory if before else None, finished and partial(finished, number))
            for number, (prompt, key, limit, flag, before) in enumerate(zip(prompts, keys, limits, greedy, previous, strict=True))
        ]
        for row in rows:
            if row.memory and (not row.unread or row.prompt[: row.known] != row.memory.context):
                raise ValueError("generate: a prompt must begin with its previous completion's context and add to it")
        KVBlock.check_capacity(self._model.config, max((len(row.prompt) + row.limit for row in rows), default=0))
        with self._inference():
            self._decoder.decode(rows, temperature, remember=remember)
        return [row.completion for row in rows]

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """Evaluation mode (no dropout: the sampling distribution is the one that is scored), no gradients, autocast."""
        device, dtype, was_training = self._device, self._autocast_dtype, self._model.training
        self._model.eval()
        try:
            with torch.inference_mode(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                yield
        finally:
            self._model.train(was_training)

    @property
    def _device(self) -> torch.device:
        return self._model.lm_head.weight.device
