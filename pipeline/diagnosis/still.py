"""Metrics that cannot move, whatever a run does, because of how it is set up: no fault, but nothing to read either."""

import math
from collections.abc import Iterator

from pipeline.diagnosis.signals import Signals

RATIO_METRICS = ("policy/approx_kl", "policy/clip_frac", "policy/ratio_max")


def still_metrics(run: Signals) -> Iterator[str]:
    """A line per setting that holds metrics at one value, with these metrics and what would let them move."""
    updates = run.param("updates_per_rollout")
    if not updates or not any(key in run.series for key in RATIO_METRICS):
        return
    batch, part = run.param("batch_size"), run.param("mini_batch_size")
    if updates * (math.ceil(batch / part) if batch and part else 1) == 1:
        more = f"{run.key('updates_per_rollout')} above 1" + (f" or a smaller {run.key('mini_batch_size')}" if part else "")
        yield (
            f"{', '.join(RATIO_METRICS)} cannot move: with one update per rollout the policy is the one that sampled, every "
            f"ratio is 1 up to rounding, and clips and caps never act; {more} lets them"
        )
