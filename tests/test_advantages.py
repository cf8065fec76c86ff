"""When rewards are equal, what groups then learn (nothing), and whitening; the figures are in tests/test_value.py."""

import math

import pytest
import torch

from pipeline.maths.advantages import all_equal, group_advantages, whiten


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ([0.7, 0.7, 0.7], True),
        ([0.7, 0.7 + 3e-7, 0.7], True),  # a reward model's rounding
        ([0.7, 0.7 + 3e-5, 0.7], False),
        ([-300.0, -300.001], True),  # relative beyond 1
        ([-300.0, -300.01], False),
        ([0.0, 3e-7], True),
        ([2.0], True),
        ([math.nan, math.nan], False),
        ([math.inf, 1.0], False),
    ],
)
def test_equal_means_equal_up_to_rounding(values: list[float], equal: bool) -> None:
    assert all_equal(torch.tensor(values)).item() is equal
    assert all_equal(torch.tensor([values, [1.0] * len(values)])).tolist() == [equal, True]


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_that_differs_by_rounding_has_advantages_of_zero(divide_by_std: bool) -> None:
    rewards = torch.tensor([0.7, 0.7, 0.7 + 3e-7, 0.7, 1.0, 0.0, 0.0, 1.0])
    advantages = group_advantages(rewards, 4, divide_by_std=divide_by_std)
    assert advantages[:4].tolist() == [0.0] * 4 and advantages[4:].tolist() == pytest.approx(
        [scale * (0.5 / (0.5 + 1e-4) if divide_by_std else 0.5) for scale in (1, -1, -1, 1)]
    )


@pytest.mark.parametrize(("value", "count"), [(0.7, 7), (1000.1, 1000), (0.1, 3), (-5.0, 1)])
def test_equal_values_are_whitened_to_exactly_zero(value: float, count: int) -> None:
    values = torch.full((count,), value)
    assert not whiten(values).any()
    values[0] += 3e-7
    assert not whiten(values).any()


def test_whitening_gives_mean_0_and_variance_1() -> None:
    assert whiten(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1, 1], abs=1e-6)
    assert whiten(torch.zeros(0)).shape == (0,)
