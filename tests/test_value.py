"""Advantages, returns and the value loss: reference figures, hand arithmetic, ragged masks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import figures
from torch import Tensor

from pipeline.maths.advantages import all_equal, group_advantages, whiten
from pipeline.maths.metrics import combine
from pipeline.maths.value import explained_variance, gae, value_loss


def ppo_figures() -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    data = figures("ppo")
    names = ("old_values", "values", "advantages_masked", "returns_masked", "whitened")
    tensors = {name: torch.tensor(data[name], dtype=torch.float64) for name in names}
    mask = torch.arange(tensors["values"].shape[1]) < torch.tensor(data["lengths"])[:, None]
    return data, tensors, mask


def last_token_rewards(rewards: list[float], lengths: list[int], width: int) -> Tensor:
    out = torch.zeros(len(rewards), width, dtype=torch.float64)
    out[torch.arange(len(rewards)), torch.tensor(lengths) - 1] = torch.tensor(rewards, dtype=torch.float64)
    return out


def test_gae_whitening_and_value_loss_equal_the_reference_figures() -> None:
    data, tensors, mask = ppo_figures()
    rewards = last_token_rewards(data["rewards"], data["lengths"], mask.shape[1])
    advantages, returns = gae(rewards, tensors["old_values"], mask, gamma=data["gamma"], gae_lambda=data["gae_lambda"])
    torch.testing.assert_close(advantages, tensors["advantages_masked"], atol=1e-12, rtol=0)
    torch.testing.assert_close(returns, tensors["returns_masked"], atol=1e-12, rtol=0)
    torch.testing.assert_close(whiten(advantages[mask]), tensors["whitened"][mask], atol=1e-12, rtol=0)
    loss, _ = value_loss(
        tensors["values"],
        tensors["old_values"],
        returns,
        mask,
        value_clip_eps=data["cliprange_value"],
        num_tokens=int(mask.sum()),
    )
    assert loss.item() == pytest.approx(data["value_loss"], abs=1e-12)


def test_gae_by_hand_with_gamma_and_lambda() -> None:
    # gamma 0.9, lambda 0.5, values 1 2 3, reward 10 at the end: delta = .8, .7, 7; A_3 = 7, A_2 = .7 + .45 * 7 = 3.85,
    # A_1 = .8 + .45 * 3.85 = 2.5325
    advantages, returns = gae(
        torch.tensor([[0.0, 0.0, 10.0]]),
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.9,
        gae_lambda=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([[2.5325, 3.85, 7.0]]))
    torch.testing.assert_close(returns, torch.tensor([[3.5325, 5.85, 10.0]]))


def test_gae_steps_over_what_tools_wrote_and_ignores_what_stands_there() -> None:
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, generator=generator), torch.randn(2, 7, generator=generator)
    dense = [tensor[mask].view(2, 3) for tensor in (rewards, values)]
    expected = gae(dense[0], dense[1], torch.ones(2, 3, dtype=torch.bool), gamma=0.9, gae_lambda=0.7)
    spoiled = [torch.where(mask, tensor, math.nan) for tensor in (rewards, values)]
    for got, want in zip(gae(spoiled[0], spoiled[1], mask, gamma=0.9, gae_lambda=0.7), expected, strict=True):
        torch.testing.assert_close(got[mask].view(2, 3), want)
        assert (got[~mask] == 0).all()


def test_bootstrap_values_stand_behind_the_last_token_of_truncated_rows() -> None:
    # one token, value 1, reward 0: delta = gamma * bootstrap - 1
    rewards, values = torch.zeros(2, 2), torch.tensor([[1.0, 99.0], [1.0, 99.0]])
    mask = torch.tensor([[1, 0], [1, 0]], dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=1.0, bootstrap_values=torch.tensor([6.0, 0.0]))
    torch.testing.assert_close(advantages, torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[3.0, 0.0], [0.0, 0.0]]))


def test_lambda_one_gives_the_discounted_return_whatever_the_critic_says() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(3, 5, generator=generator), torch.randn(3, 5, generator=generator)
    _, returns = gae(rewards, values, torch.ones(3, 5, dtype=torch.bool), gamma=0.9, gae_lambda=1.0)
    for t in range(5):
        expected = sum(0.9 ** (k - t) * rewards[:, k] for k in range(t, 5))
        torch.testing.assert_close(returns[:, t], expected, atol=1e-5, rtol=0)


def test_empty_rows_and_masks() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    advantages, returns = gae(torch.ones(2, 3), torch.ones(2, 3), nothing, gamma=1.0, gae_lambda=0.9)
    assert (advantages == 0).all() and (returns == 0).all()
    assert whiten(torch.zeros(0)).shape == (0,)
    values = torch.ones(2, 3, requires_grad=True)
    loss, _ = value_loss(values, torch.ones(2, 3), torch.ones(2, 3), nothing, value_clip_eps=0.2, num_tokens=0)
    assert loss.item() == 0 and (torch.autograd.grad(loss, values)[0] == 0).all()
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize(
    ("value", "expected", "gradient"),
    [
        (1.1, 0.5 * 0.9**2, -0.9),  # inside the clip range around 1: both terms equal
        (1.3, 0.5 * 0.8**2, 0.0),  # better than the clipped 1.2, as the next
        (1.5, 0.5 * 0.8**2, 0.0),  # better than the clipped 1.2: the larger error counts, which has no gradient
        (0.5, 0.5 * 1.5**2, -1.5),  # away from the return: the unclipped error is the larger one
    ],
)
def test_value_loss_by_hand(value: float, expected: float, gradient: float) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, metrics = value_loss(values, one, 2 * one, one.bool(), value_clip_eps=0.2, num_tokens=1)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert float(torch.autograd.grad(loss, values)[0]) == pytest.approx(gradient, abs=1e-6)
    assert combine([metrics])["clip_frac"] == float(abs(value - 1) > 0.2)


def test_value_loss_masks_and_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(3, 4, generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    values.requires_grad_()
    whole, metrics = value_loss(values, old, returns, mask, value_clip_eps=0.2, num_tokens=4)
    naive = 0.5 * torch.maximum((values - returns) ** 2, (old + (values - old).clamp(-0.2, 0.2) - returns) ** 2)[mask].mean()
    torch.testing.assert_close(whole, naive)
    (grad,) = torch.autograd.grad(whole, values)
    spoiled = [torch.where(mask, tensor.detach(), math.nan) for tensor in (values, old, returns)]
    spoiled[0].requires_grad_()
    parts = [value_loss(*(t[b : b + 1] for t in (*spoiled, mask)), value_clip_eps=0.2, num_tokens=4) for b in range(3)]
    split = sum((loss for loss, _ in parts), torch.zeros(()))
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(torch.autograd.grad(split, spoiled[0])[0], grad)
    assert combine([part for _, part in parts]) == combine([metrics])


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 3.0, 5.0])  # variance 8/3
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((3,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)  # residuals 2, 6, 10: four times the variance
    # values 1, 4, 4: residuals 0, -1, 1 with variance 2/3, a quarter of 8/3
    assert explained_variance(torch.tensor([1.0, 4.0, 4.0]), returns) == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones(3)) == 0.0


def test_group_advantages_equal_the_reference_figures() -> None:
    data = figures("grpo")
    advantages = group_advantages(torch.tensor(data["rewards"], dtype=torch.float64), data["group_size"])
    torch.testing.assert_close(advantages, torch.tensor(data["advantages"], dtype=torch.float64), atol=1e-12, rtol=0)


def test_group_advantages_by_hand() -> None:
    # 3, 1, 2: mean 2, population variance 2/3; the second group has no signal
    rewards = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0, 5.0])
    assert group_advantages(rewards, 3, divide_by_std=False).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    advantages = group_advantages(rewards, 3)
    unit = 1 / (math.sqrt(2 / 3) + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([unit, -unit, 0.0, 0.0, 0.0, 0.0]))


@settings(deadline=None)
@given(reward=st.floats(-5, 5, width=32), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    assert (group_advantages(torch.full((2 * size,), reward), size) == 0).all()


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4))
@example([0.0, 0.0, 0.0, 2e-6])  # within the rounding of a reward model
def test_group_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    given_rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(given_rewards, 4)
    assert abs(float(advantages.sum())) < 1e-6
    if all_equal(given_rewards):
        assert (advantages == 0).all()
        return
    for a in range(4):
        for b in range(4):
            if rewards[a] > rewards[b] + 1e-6:
                assert advantages[a] > advantages[b]


def test_whitened_values_have_mean_zero_and_variance_one() -> None:
    values = torch.randn(150, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 + 7
    whitened = whiten(values)
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-9)
    assert float(whitened.var(correction=0)) == pytest.approx(1, abs=1e-6)
    assert torch.equal(whitened.argsort(), values.argsort())
    # 1, 3, 5: mean 3, population variance 8/3
    unit = 2 / math.sqrt(8 / 3)
    torch.testing.assert_close(whiten(torch.tensor([1.0, 3.0, 5.0])), torch.tensor([-unit, 0.0, unit]))
    assert (whiten(torch.full((4,), 2.5)) == 0).all()
