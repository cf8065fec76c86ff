"""Which pairs of a head YaRN stretches (arXiv:2309.00071, section 3.2). No torch: parameters are checked with it."""

import math
from collections.abc import Iterator


def stretched_band(head_dim: int, theta: float, window: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """The pairs between which the stretch grows from none to the whole factor; rounded as in the paper's code and transformers.

    Args:
        head_dim: D; the pairs are 0 to D/2 - 1, from fast to slow.
        theta: the base of RoPE.
        window: positions that the model was trained with.
        beta_fast: a pair that turns more often than this over the window keeps its frequency.
        beta_slow: one that turns less often is stretched by the whole factor.

    Returns:
        low: pairs up to here keep their frequency, >= 0.
        high: pairs from here on are stretched by the whole factor, <= D - 1; it may lie behind the last pair.
    """

    def pair(rotations: float) -> float:
        # that turns so many times over the window
        return head_dim * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), head_dim - 1)


def band_faults(head_dim: int, theta: float, window: int, beta_fast: float, beta_slow: float) -> Iterator[str]:
    """Why a setting stretches nothing, or has no band at all, of which every implementation makes something else."""
    if beta_fast <= beta_slow:
        yield f"rope_scaling.beta_fast={beta_fast:g}: must be > beta_slow={beta_slow:g}"
        return
    low, high = stretched_band(head_dim, theta, window, beta_fast, beta_slow)
    if low >= head_dim // 2 - 1:
        yield (
            f"rope_scaling.beta_fast={beta_fast:g}: must be higher, or YaRN stretches nothing: all {head_dim // 2} pairs of "
            f"dimensions turn that often over original_max_position_embeddings={window} (rope_theta={theta:g})"
        )
    elif high < low:
        yield (
            f"rope_scaling.beta_slow={beta_slow:g}: must be lower, no pair of dimensions turns that often over "
            f"original_max_position_embeddings={window}"
        )
