"""The learning-rate schedule against torch's schedulers and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.maths.schedules import warmup_cosine


@pytest.mark.parametrize(("total", "warmup", "floor"), [(50, 7, 0.1), (20, 0, 0.0), (9, 2, 0.5)])
def test_equals_torch_linear_then_cosine(total: int, warmup: int, floor: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - 1 - warmup, eta_min=floor)
    scheduler: torch.optim.lr_scheduler.LRScheduler = cosine
    if warmup:
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[warmup])
    for step in range(total):
        expected = optimizer.param_groups[0]["lr"]
        assert warmup_cosine(step, total_steps=total, warmup_steps=warmup, min_lr_frac=floor) == pytest.approx(expected, abs=1e-9)
        optimizer.step()
        scheduler.step()


def test_by_hand() -> None:
    # warm-up over 3 steps: 1/4, 2/4, 3/4; then the cosine from 1 (step 3) over 4 intervals to 0.1 (step 7)
    got = [warmup_cosine(step, total_steps=8, warmup_steps=3, min_lr_frac=0.1) for step in range(8)]
    half = 0.1 + 0.9 * 0.5
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0, quarter, half, 2 * half - quarter, 0.1])


def test_stays_at_the_floor_after_the_end() -> None:
    for step in (9, 10, 15, 1000):
        assert warmup_cosine(step, total_steps=10, warmup_steps=2, min_lr_frac=0.1) == pytest.approx(0.1)


@settings(deadline=None)
@given(total=st.integers(1, 60), warmup=st.integers(0, 70), floor=st.floats(0, 1))
def test_rises_then_falls_within_bounds(total: int, warmup: int, floor: float) -> None:
    rates = [warmup_cosine(step, total_steps=total, warmup_steps=warmup, min_lr_frac=floor) for step in range(total)]
    assert all(0 <= rate <= 1 for rate in rates) and rates[0] > 0
    rising, falling = rates[: warmup + 1], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= floor - 1e-12 for rate in falling)
