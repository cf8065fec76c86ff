"""One optimizer over one module: AdamW, warm-up + cosine, clipping, and a guard against non-finite gradients."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.maths.schedules import warmup_cosine
from pipeline.params.schema import Optimizer

MAX_SKIPPED_IN_A_ROW = 5
COUNTS = ("applied", "skipped", "skipped_in_a_row")


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did: the rate it used, the gradient norm before clipping, whether weights moved."""

    lr: float
    grad_norm: float
    applied: bool


class Updater:
    """Applies accumulated gradients once per optimizer step.

    Weight decay acts on matrices only (not on norms, biases or the tied embedding), which MiniMind decays too.

    Attributes:
        begun: updates that this process has begun; as long as it stays, weights and moments are as they were.
    """

    def __init__(self, module: nn.Module, settings: Optimizer, *, total_steps: int, lr: float | None = None) -> None:
        self.peak_lr = settings.lr if lr is None else lr
        self.settings = settings
        self.total_steps = total_steps
        self.skipped_in_a_row = 0
        self.skipped = 0
        self.applied = 0
        self.begun = 0
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not self.named:
            raise ValueError("the module has no trainable parameter")
        decays = [p for name, p in self.named if p.ndim >= 2 and "embed_tokens" not in name]
        rest = [p for name, p in self.named if not (p.ndim >= 2 and "embed_tokens" not in name)]
        groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.peak_lr, betas=settings.betas, fused=True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based optimizer step `step`."""
        s = self.settings
        return self.peak_lr * warmup_cosine(
            step, total_steps=self.total_steps, warmup_steps=s.warmup_steps, min_lr_frac=s.min_lr_frac
        )

    def update(self, step: int, *, context: str) -> Update:
        """Clips, applies and clears the gradients; a step whose gradients are not finite is skipped and counted.

        Args:
            step: 0-based optimizer step, decides the rate.
            context: names the batch in the error (rows, epoch).

        Raises:
            NumericsError: `MAX_SKIPPED_IN_A_ROW` steps in a row had non-finite gradients.
        """
        lr = self.lr_at(step)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        grad_norm = float(norm)
        finite = bool(torch.isfinite(norm))
        self.begun += 1  # before any weight moves: a stop may interrupt everything up to here
        if finite:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.applied += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        self.adamw.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NumericsError(
                f"gradients were not finite for {self.skipped_in_a_row} steps in a row, last at step {step + 1} ({context}); "
                "lower the learning rate or look at these rows"
            )
        return Update(lr, grad_norm, finite)

    def discard(self) -> None:
        """Drops accumulated gradients: weights, moments and schedule stay as they are."""
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in COUNTS}
        return {"adamw": self.adamw.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for name in COUNTS:
            setattr(self, name, state[name])


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed that is a fixed function of `parts`: every random draw names what it is for."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
