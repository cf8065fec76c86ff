"""DPO and Bradley-Terry losses by hand, against the reference figures and across micro-batches."""

import math
from typing import Any

import pytest
import torch
from reference import figures

from pipeline.maths.metrics import combine
from pipeline.maths.preference import bradley_terry_loss, chance_accuracies, dpo_loss


def test_dpo_worked_value() -> None:
    # policy (-2, -3), reference (-2.5, -2.8): (0.5) - (-0.2) = 0.7; -log sigmoid(0.15 * 0.7) = 0.642
    loss, metrics = dpo_loss(torch.tensor([-2.0, -3.0]), torch.tensor([-2.5, -2.8]), beta=0.15, num_pairs=1)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.105)), abs=1e-6)
    assert loss.item() == pytest.approx(0.642, abs=5e-4)
    expected = {
        "accuracy": 1.0,
        "margin": 0.105,
        "chosen_reward": 0.075,
        "rejected_reward": -0.03,
        "chosen_logprob": -2.0,
        "rejected_logprob": -3.0,
    }
    assert combine([metrics]) == pytest.approx(expected, abs=1e-6)


def test_chance_is_what_length_and_equal_scores_earn() -> None:
    # chosen 3, 5, 2, 4 against rejected 4, 5, 7, 1: shorter, equal, shorter, longer
    chance = combine([{"count": 4.0, **chance_accuracies(torch.tensor([3, 5, 2, 4, 4, 5, 7, 1]))}])
    assert chance == {"accuracy_by_length": 2.5 / 4, "accuracy_by_constant": 0.5}
    logprobs = torch.tensor([-3.0, -5, -2, -4, -4, -5, -7, -1])  # a model that gives every token the same probability
    _, metrics = dpo_loss(logprobs, torch.zeros(8), beta=1.0, num_pairs=4)
    assert combine([metrics])["accuracy"] == chance["accuracy_by_length"]


def test_dpo_starts_at_ln_2_with_a_gradient() -> None:
    logprobs = torch.tensor([-5.0, -7.0, -6.0, -2.0], requires_grad=True)
    loss, metrics = dpo_loss(logprobs, logprobs.detach(), beta=0.15, num_pairs=2)
    assert loss.item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, torch.tensor([-1.0, -1.0, 1.0, 1.0]) * 0.15 / 2 / 2)  # sigmoid(0) = 1/2, two pairs
    assert combine([metrics])["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("loss", "smoothing", "value", "slope"),
    [
        # h = 0.7, beta 0.15: beta h = 0.105; slope is the derivative by the chosen logprob
        ("sigmoid", 0.0, math.log(1 + math.exp(-0.105)), -0.15 / (1 + math.exp(0.105))),
        (
            "sigmoid",
            0.1,
            0.9 * math.log(1 + math.exp(-0.105)) + 0.1 * math.log(1 + math.exp(0.105)),
            -0.9 * 0.15 / (1 + math.exp(0.105)) + 0.1 * 0.15 / (1 + math.exp(-0.105)),
        ),
        ("ipo", 0.0, (0.7 - 1 / 0.3) ** 2, 2 * (0.7 - 1 / 0.3)),
        ("hinge", 0.0, 1 - 0.105, -0.15),
    ],
)
def test_the_family_by_hand(loss: Any, smoothing: float, value: float, slope: float) -> None:
    logprobs = torch.tensor([-2.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.5, -2.8], dtype=torch.float64)
    got, _ = dpo_loss(logprobs, reference, beta=0.15, loss=loss, label_smoothing=smoothing, num_pairs=1)
    assert got.item() == pytest.approx(value, abs=1e-12)
    (grad,) = torch.autograd.grad(got, logprobs)
    assert grad.tolist() == pytest.approx([slope, -slope], abs=1e-12)


def test_hinge_lets_go_once_the_margin_is_there() -> None:
    # beta h = 0.15 * 10 = 1.5, beyond 1; the second pair's is 0.15 * 2 = 0.3
    logprobs = torch.tensor([-2.0, -2.0, -12.0, -4.0], requires_grad=True)
    loss, _ = dpo_loss(logprobs, torch.zeros(4), beta=0.15, loss="hinge", num_pairs=2)
    assert loss.item() == pytest.approx((0 + 0.7) / 2)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], torch.tensor([0.0, -0.075, 0.0, 0.075]))


@pytest.mark.parametrize(("loss", "start"), [("sigmoid", math.log(2)), ("ipo", 1 / (4 * 0.15**2)), ("hinge", 1.0)])
def test_where_the_family_starts(loss: Any, start: float) -> None:
    logprobs = torch.tensor([-5.0, -7.0, -6.0, -2.0], requires_grad=True)
    value, _ = dpo_loss(logprobs, logprobs.detach(), beta=0.15, loss=loss, num_pairs=2)
    assert value.item() == pytest.approx(start, rel=1e-6)
    assert (torch.autograd.grad(value, logprobs)[0] != 0).all()


def test_dpo_equals_the_reference_figures() -> None:
    dpo = figures("dpo")
    mask = torch.tensor(dpo["loss_mask"], dtype=torch.float64)
    logprobs, reference = ((torch.tensor(dpo[key], dtype=torch.float64) * mask).sum(-1) for key in ("logprobs", "ref_logprobs"))
    loss, metrics = dpo_loss(logprobs, reference, beta=dpo["beta"], num_pairs=2)
    assert loss.item() == pytest.approx(dpo["loss"], abs=1e-12)
    assert float(metrics["margin"]) == pytest.approx(dpo["beta"] * sum(dpo["logits"]), abs=1e-12)


def test_bradley_terry_by_hand() -> None:
    # margins 2, -1, 0
    loss, metrics = bradley_terry_loss(torch.tensor([3.0, 0.0, 1.0, 1.0, 1.0, 1.0]), num_pairs=3)
    expected = sum(math.log(1 + math.exp(-margin)) for margin in (2, -1, 0)) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert combine([metrics]) == pytest.approx({"accuracy": 0.5, "margin": 1 / 3})
    part, _ = bradley_terry_loss(torch.tensor([3.0, 0.0, 1.0, 1.0, 1.0, 1.0]), num_pairs=6)  # of a step with six pairs
    assert part.item() == pytest.approx(expected / 2, abs=1e-6)


def test_extreme_margins_stay_finite() -> None:
    scores = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = bradley_terry_loss(scores, num_pairs=1)
    assert loss.item() == pytest.approx(1000.0)
    (grad,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(grad, torch.tensor([-1.0, 1.0]))


def test_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(10, generator=generator, requires_grad=True)
    reference = torch.randn(10, generator=generator)
    whole, whole_metrics = dpo_loss(logprobs, reference, beta=0.3, num_pairs=5)
    rows = [[0, 1, 2, 5, 6, 7], [3, 8], [4, 9]]  # chosen then rejected rows of pairs {0,1,2}, {3}, {4}
    parts = [dpo_loss(logprobs[part], reference[part], beta=0.3, num_pairs=5) for part in rows]
    split = sum((loss for loss, _ in parts), torch.zeros(()))
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logprobs)[0] for loss in (split, whole)))
    assert combine([metrics for _, metrics in parts]) == pytest.approx(combine([whole_metrics]), rel=1e-5)


def test_combine_of_nothing() -> None:
    assert combine([]) == {}
    assert combine([{"count": torch.tensor(0.0), "a": torch.tensor(0.0), "b_max": torch.tensor(0.0)}]) == {"a": 0.0, "b_max": 0.0}
