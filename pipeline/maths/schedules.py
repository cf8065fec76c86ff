"""Learning-rate schedules as multipliers of the peak."""

import math


def warmup_cosine(step: int, *, total_steps: int, warmup_steps: int, min_lr_frac: float) -> float:
    """Multiplier of the peak learning rate for optimizer step `step`, counted from 0.

    Rises linearly over the first `warmup_steps` steps from 1 / (warmup_steps + 1), never from 0, reaches 1 at step
    `warmup_steps`, then follows half a cosine to `min_lr_frac` at the last step and stays there: a resumed or
    prolonged run never sees the cosine rise again.

    Args:
        step: >= 0.
        total_steps: optimizer steps of the run; with `warmup_steps >= total_steps` the peak is never reached.
        warmup_steps: 0 starts at the peak.
        min_lr_frac: fraction of the peak at the end, in [0, 1].

    Returns:
        A factor in (0, 1] (0 only at the end of a schedule with floor 0).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 1.0)
    return min_lr_frac + (1 - min_lr_frac) * 0.5 * (1 + math.cos(math.pi * progress))
