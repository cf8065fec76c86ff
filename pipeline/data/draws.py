"""Random draws as a function of (seed, epoch, what): nothing to save, nothing to replay."""

import numpy as np
from numpy.typing import NDArray


def permutation(seed: int, epoch: int, what: str, size: int) -> NDArray[np.int64]:
    """A random order of `size` things."""
    return _generator(seed, epoch, what).permutation(size)


def uniforms(seed: int, epoch: int, what: str, size: int) -> NDArray[np.float64]:
    """`size` numbers in [0, 1); number i does not depend on `size`."""
    return _generator(seed, epoch, what).random(size)


def _generator(seed: int, epoch: int, what: str) -> np.random.Generator:
    key = np.random.SeedSequence([seed, epoch, *what.encode("ascii")])
    return np.random.Generator(np.random.Philox(key))
