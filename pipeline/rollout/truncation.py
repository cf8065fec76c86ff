"""Truncated sampling for inference: repetition penalty, top-k and top-p, in the order of MiniMind's `generate`.

Training samples from the untruncated distribution; nothing there uses this. Dimensions: N rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.errors import ParamsError


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is ruled out, and what is made less likely.

    Attributes:
        top_k: only the k most probable ids (those that tie with the last one too); 0 for all.
        top_p: only the most probable ids that together reach this probability (arXiv:1904.09751), in (0, 1]; at least one.
        repetition_penalty: what the logit of an id that was there before is divided by where positive, and multiplied with
            where negative (arXiv:1909.05858), > 0; 1 for none.
    """

    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ParamsError(f"top_k={self.top_k}: must be >= 1, or 0 for no limit")
        if not 0 < self.top_p <= 1:
            raise ParamsError(f"top_p={self.top_p}: must be > 0 and <= 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ParamsError(f"repetition_penalty={self.repetition_penalty}: must be a number > 0")

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits with -inf where an id is ruled out.

        Args:
            logits: [N, V], divided by the temperature.
            seen: [N, V] bool, True where an id stands in a row's prompt or completion.

        Returns:
            [N, V], in fp32.
        """
        logits = logits.float()
        if self.repetition_penalty != 1:
            penalised = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = torch.where(seen, penalised, logits)
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
            probabilities = ordered.softmax(dim=-1)
            before = probabilities.cumsum(dim=-1) - probabilities
            beyond = before > self.top_p
            beyond[:, 0] = False
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, ids, beyond), -torch.inf)
        return logits
