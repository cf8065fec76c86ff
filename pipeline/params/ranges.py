"""Ranges that keys of `params.yaml` share.

What a key may be at most lies far beyond any use, and is so low that nothing which computes with it overflows or aborts.
"""

from typing import Annotated

from pydantic import Field

MAX_INT = 2**53  # beyond it JSON readers round
Seed = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=10**9)]  # rows, steps, tokens, characters
Count = Annotated[int, Field(ge=0, le=10**9)]
Epochs = Annotated[int, Field(ge=1, le=10**6)]
Few = Annotated[int, Field(ge=1, le=1024)]  # layers, heads, experts, turns, rounds, processes
Width = Annotated[int, Field(ge=1, le=2**16)]
Window = Annotated[int, Field(ge=1, le=2**20)]  # positions: rotations are tabulated for all of them
Rows = Annotated[int, Field(ge=1, le=2**16)]  # that are computed together
Frac = Annotated[float, Field(ge=0, le=1)]
OpenFrac = Annotated[float, Field(ge=1e-6, le=1 - 1e-6)]  # its distance to 1 counts, too
Rate = Annotated[float, Field(gt=0, le=1e10)]  # far below, runs diverge, and say so
PositiveFloat = Annotated[float, Field(ge=1e-12, le=1e6)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Rotations = Annotated[float, Field(ge=1e-6, le=1e6)]  # over a window
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Temperature = Annotated[float, Field(ge=0.01, le=100)]  # logits are divided by it: far below, they overflow
MAX_PARAMETERS = 10**11
