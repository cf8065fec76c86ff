"""Sampling from a `CausalLM` in this process: shared prefill, one batch that rows leave and waiting rows join."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from pipeline.model.inference import InferenceModel
from pipeline.model.transformer import CausalLM
from pipeline.rollout.block_decode import BlockDecoder
from pipeline.rollout.records import Completion, Continuation
from pipeline.rollout.rows import Row
from pipeline.rollout.static_decode import StaticDecoder
from pipeline.rollout.truncation import Truncation


class TorchRolloutEngine:
    """A `RolloutEngine` over a model that others may train meanwhile: every call samples from a copy of its present weights.

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
            static: Decode with static shapes, on a GPU as CUDA graphs (`StaticDecoder`), or with shapes that follow the rows
                (`BlockDecoder`). None takes static shapes where the model lies on a GPU and is dense: which experts a token
                goes to decides shapes.
            truncation: For inference, what is ruled out of the distribution; its shapes follow the rows. Logprobs are those of
                the truncated distribution.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: must be >= 1")
        if static is None:
            static = model.lm_head.weight.device.type == "cuda" and not model.config.use_moe and truncation is None
        if static and model.config.use_moe:
            raise ValueError("static shapes need a dense model: which experts a token goes to decides the shapes of a mixture")
        if static and truncation is not None:
            raise ValueError("static shapes know no truncation: leave one of the two out")
        self._source = model
        self._autocast_dtype = autocast_dtype
        self._model: InferenceModel | None = None
        self._decoder: BlockDecoder | StaticDecoder
        if static:
            self._decoder = StaticDecoder(frozenset(stop_ids), pad_id, max_rows)
        else:
            self._decoder = BlockDecoder(frozenset(stop_ids), pad_id, max_rows, truncation)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        greedy: bool | Sequence[bool] = False,
        finished: Callable[[int, Completion], Continuation | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: An empty prompt, a limit below 1, a temperature that is not positive, counts that differ, or a next turn
                that does not go on from where its completion ended.
            ParamsError: A prompt and its new tokens exceed the model's window.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        greedy = [greedy] * len(prompts) if isinstance(greedy, bool) else greedy
        if not len(prompts) == len(keys) == len(limits) == len(greedy):
            raise ValueError(
                f"{len(prompts)} prompts, {len(keys)} keys, {len(limits)} limits, {len(greedy)} greedy flags: "
                "must be equally many"
            )
        if temperature <= 0 or min(limits, default=1) < 1 or not all(len(prompt) for prompt in prompts):
            raise ValueError("generate: temperature must be > 0, max_new_tokens >= 1, and no prompt empty")
        last: dict[int, Completion] = {}

        def announce(number: int, completion: Completion) -> Continuation | None:
            last[number] = completion
            return finished(number, completion) if finished else None

        rows = [
            Row(tuple(prompt), key, limit, flag, partial(announce, number))
            for number, (prompt, key, limit, flag) in enumerate(zip(prompts, keys, limits, greedy, strict=True))
        ]
        with self._inference() as model:
            self._decoder.decode(model, rows, temperature)
        return [last[number] for number in range(len(rows))]

    @contextlib.contextmanager
    def _inference(self) -> Iterator[InferenceModel]:
        """The model with its present weights, without dropout: the sampling distribution is the one that is scored."""
        was_training = self._source.training
        self._source.eval()
        try:
            # what is computed in which type is the model's own affair
            with torch.inference_mode(), torch.autocast(self._source.lm_head.weight.device.type, enabled=False):
                if self._model is None:
                    self._model = InferenceModel(self._source, self._autocast_dtype)
                else:
                    self._model.refresh()
                yield self._model
        finally:
            self._source.train(was_training)
