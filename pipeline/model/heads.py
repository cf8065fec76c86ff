"""Models that read a number instead of a token: the critic's value of every position, the reward model's score of a reply.

Dimensions: B sequences, T positions, W width.
"""

from typing import Self

import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Backbone, CausalLM


class ScalarModel(Backbone):
    """A decoder with one linear output, `score`, on the hidden states that the final norm has seen once."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        self.init_weights(seed)

    @classmethod
    def from_causal_lm(cls, model: CausalLM, *, seed: int) -> Self:
        """A copy of the language model's decoder, on its device, under a fresh head from N(0, 0.02) drawn from `seed`."""
        scalar = cls(model.config, seed=seed)
        scalar.model.load_state_dict(model.model.state_dict())
        return scalar.to(model.lm_head.weight.device)

    def scalar(self, hidden: Tensor) -> Tensor:
        """The head's number [...] for hidden states [..., W], in fp32 also under autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.score(hidden.float()).squeeze(-1)


class ValueModel(ScalarModel):
    """The critic: the expected return from each position on."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Values [B, T] of right-padded token ids [B, T], fp32."""
        return self.scalar(self.hidden(input_ids))


class RewardModel(ScalarModel):
    """One score per sequence, read at its last token; parameter names as in Qwen3ForSequenceClassification."""

    def forward(self, input_ids: Tensor, last_positions: Tensor) -> Tensor:
        """Scores [B] of right-padded token ids [B, T], fp32.

        Args:
            last_positions: [B] int64, index of each row's last real token; routers do not count what stands behind it.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.hidden(input_ids, visible=positions <= last_positions[:, None])
        rows = torch.arange(len(hidden), device=hidden.device)
        return self.scalar(hidden[rows, last_positions])
