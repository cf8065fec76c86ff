"""Policy losses against the reference figures, by hand, and where they could go wrong: masks, extremes, micro-batches."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import figures
from torch import Tensor

from pipeline.maths.metrics import combine
from pipeline.maths.policy import (
    REDUCTIONS,
    StepSize,
    group_policy_loss,
    k3,
    kl_penalty,
    policy_metrics,
    ppo_policy_loss,
    reduce_tokens,
)

GROUP: dict[str, Any] = {"clip_eps_low": 0.2, "clip_eps_high": 0.3, "ratio_cap": 1.25, "kl_coef": 0.1}
PPO: dict[str, Any] = {"clip_eps": 0.2, "kl_coef": 0.1}
LOSSES = list(REDUCTIONS)
RAGGED = StepSize(num_sequences=3, num_tokens=11, max_tokens=8)  # of `ragged`'s mask


def one(rows: int = 1, tokens: int = 1) -> StepSize:
    return StepSize(num_sequences=rows, num_tokens=tokens, max_tokens=tokens)


def prefix_mask(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def ragged(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """logprobs (leaf), old, ref, all [4, 6], and a mask with gaps, a full, a short and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 6, generator=generator) * 3
    tensors = [old + torch.randn(4, 6, generator=generator) * 0.4 for _ in range(2)]
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    return [tensors[0].requires_grad_(), old, tensors[1]], mask


@pytest.mark.parametrize("loss", ["grpo", "cispo"])
def test_group_losses_equal_the_reference_figures(loss: Any) -> None:
    data = figures("grpo")
    logprobs, old, ref = (torch.tensor(data[key], dtype=torch.float64) for key in ("logprobs", "old_logprobs", "ref_logprobs"))
    got, _ = group_policy_loss(
        logprobs,
        old,
        ref,
        torch.tensor(data["advantages"], dtype=torch.float64),
        prefix_mask(data["lengths"], logprobs.shape[1]),
        loss=loss,
        clip_eps_low=data["clip_eps"],
        clip_eps_high=data["clip_eps"],
        ratio_cap=data["clip_eps_high"],
        kl_coef=data["beta"],
        size=StepSize(num_sequences=len(logprobs), num_tokens=sum(data["lengths"]), max_tokens=6),
    )
    assert float(got) == pytest.approx(data[loss], abs=1e-12)


def test_ppo_loss_and_metrics_equal_the_reference_figures() -> None:
    data = figures("ppo")
    logprobs, old, ref, advantages = (
        torch.tensor(data[key], dtype=torch.float64) for key in ("logprobs", "old_logprobs", "ref_logprobs", "whitened")
    )
    mask = prefix_mask(data["lengths"], logprobs.shape[1])
    loss, metrics = ppo_policy_loss(
        logprobs, old, ref, advantages, mask, clip_eps=data["clip_eps"], kl_coef=0.0, num_tokens=int(mask.sum())
    )
    assert loss.item() == pytest.approx(data["policy_loss_without_kl"], abs=1e-12)
    means = combine([metrics])
    for name in ("approx_kl", "clip_frac", "ref_kl"):
        assert means[name] == pytest.approx(data[name], abs=1e-12), name


def test_group_reduction_is_a_mean_per_completion_then_a_mean_of_completions() -> None:
    # On the first update (ratio 1) without KL a token's grpo loss is -A. Completion 1: 2 tokens, loss 1 each; completion 2:
    # 6 tokens, loss 3 each: (1 + 3) / 2 = 2.0, where a token mean would give (2 * 1 + 6 * 3) / 8 = 2.5.
    logprobs = -torch.ones(2, 6)
    loss, _ = group_policy_loss(
        logprobs,
        logprobs,
        logprobs,
        torch.tensor([-1.0, -3.0]),
        prefix_mask([2, 6], 6),
        loss="grpo",
        size=StepSize(num_sequences=2, num_tokens=8, max_tokens=10),
        **GROUP | {"kl_coef": 0.0},
    )
    assert loss.item() == pytest.approx(2.0)


@pytest.mark.parametrize(("reduction", "expected"), [("sequence", 2.0), ("token", 2.5), ("constant", 20 / (2 * 10))])
def test_reductions_by_hand(reduction: Any, expected: float) -> None:
    # completions of 2 tokens with loss 1 and of 6 with loss 3, at most 10 tokens each: sum 20
    token_loss = torch.tensor([[1.0, 1.0, *[math.nan] * 4], [3.0] * 6])
    size = StepSize(num_sequences=2, num_tokens=8, max_tokens=10)
    assert reduce_tokens(token_loss, prefix_mask([2, 6], 6), reduction, size).item() == pytest.approx(expected)


def test_gspo_takes_the_geometric_mean_of_the_ratios() -> None:
    # ratios 2.0 and 0.5: s = 1 (their arithmetic mean is 1.25); -s A = -3, and d(-s A)/dlogp = -A s / 2 at both tokens
    old = torch.full((1, 3), -2.0)
    logprobs = (old + torch.tensor([[math.log(2.0), math.log(0.5), 7.0]])).requires_grad_()
    mask = prefix_mask([2], 3)
    loss, metrics = group_policy_loss(
        logprobs, old, old, torch.tensor([3.0]), mask, loss="gspo", size=one(1, 2), **GROUP | {"kl_coef": 0.0}
    )
    assert loss.item() == pytest.approx(-3.0, abs=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], torch.tensor([[-1.5, -1.5, 0.0]]))
    assert float(metrics["ratio_max"]) == pytest.approx(1.0) and float(metrics["clip_frac"]) == 0.0


def test_gspo_clips_all_tokens_of_a_completion_and_no_other() -> None:
    # ratios 2 and 2 at the two tokens in the loss: s = 2 is beyond 1.3
    old, mask = torch.full((1, 4), -2.0), torch.tensor([[True, False, True, False]])
    _, metrics = group_policy_loss(old + math.log(2.0), old, old, torch.ones(1), mask, loss="gspo", size=one(1, 2), **GROUP)
    assert combine([metrics])["clip_frac"] == 1.0 and combine([metrics])["ratio_max"] == pytest.approx(2.0)


def penalty(estimator: str, logprob: float, ref: float) -> float:
    d = ref - logprob
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]


def twin(
    loss: str, reduction: str, estimator: str, tensors: list[Tensor], mask: Tensor, advantages: Tensor, entropy: Tensor
) -> float:
    """Row by row and token by token, from the definitions."""
    total = 0.0
    for row in range(len(mask)):
        kept = [t for t in range(mask.shape[1]) if mask[row, t]]
        log_ratios = [float(tensors[0][row, t] - tensors[1][row, t]) for t in kept]
        advantage = float(advantages[row])
        for t, log_ratio in zip(kept, log_ratios, strict=True):
            ratio = math.exp(sum(log_ratios) / len(kept) if loss == "gspo" else log_ratio)
            if loss == "cispo":
                value = -min(ratio, GROUP["ratio_cap"]) * advantage * float(tensors[0][row, t])
            else:
                clipped = min(max(ratio, 1 - GROUP["clip_eps_low"]), 1 + GROUP["clip_eps_high"])
                value = -min(ratio * advantage, clipped * advantage)
            value += GROUP["kl_coef"] * penalty(estimator, float(tensors[0][row, t]), float(tensors[2][row, t]))
            value -= 0.3 * float(entropy[row, t].detach())
            total += value / {"sequence": 3 * len(kept), "token": 11, "constant": 3 * 8}[reduction]
    return total


def test_the_reductions_are_those_of_the_papers() -> None:
    assert REDUCTIONS == {"cispo": "sequence", "grpo": "sequence", "gspo": "sequence", "dapo": "token", "dr_grpo": "constant"}


def spoiled_entropy(mask: Tensor, seed: int = 1) -> Tensor:
    """[4, 6] float64 leaf, not a number outside the mask."""
    entropy = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, entropy, math.nan).requires_grad_()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reduction", [None, "sequence", "token", "constant"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_its_definition(loss: Any, reduction: Any, estimator: Any) -> None:
    tensors, mask = ragged()
    tensors = [tensor.detach().double() for tensor in tensors]
    advantages, entropy = torch.tensor([1.0, -2.0, 0.5, 9.0], dtype=torch.float64), spoiled_entropy(mask)
    changes: dict[str, Any] = {"reduction": reduction, "kl_estimator": estimator, "entropy": entropy, "entropy_coef": 0.3}
    got, _ = group_policy_loss(*tensors, advantages, mask, loss=loss, size=RAGGED, **changes, **GROUP)
    expected = twin(loss, reduction or REDUCTIONS[loss], estimator, tensors, mask, advantages, entropy)
    assert got.item() == pytest.approx(expected, abs=1e-10)
    assert torch.isfinite(torch.autograd.grad(got, entropy)[0]).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_ppos_loss_is_its_definition(estimator: Any) -> None:
    tensors, mask = ragged()
    tensors = [tensor.detach().double() for tensor in tensors]
    advantages, entropy = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6), spoiled_entropy(mask)
    changes: dict[str, Any] = {"kl_estimator": estimator, "entropy": entropy, "entropy_coef": 0.3, "num_tokens": 13}
    got, _ = ppo_policy_loss(*tensors, advantages, mask, **changes, **PPO)
    expected = 0.0
    for row, t in mask.nonzero().tolist():
        logprob, old, ref, advantage = (float(tensor[row, t]) for tensor in (*tensors, advantages))
        ratio = math.exp(logprob - old)
        value = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        expected += (value + PPO["kl_coef"] * penalty(estimator, logprob, ref) - 0.3 * float(entropy[row, t].detach())) / 13
    assert got.item() == pytest.approx(expected, abs=1e-10)
    assert torch.isfinite(torch.autograd.grad(got, entropy)[0]).all()


def test_the_range_may_be_wider_above_than_below() -> None:
    """DAPO's clip-higher: at ratio 1.25 with A > 0 the gradient lives under 0.28 and is gone under 0.2."""
    old = torch.full((1, 1), -2.0)
    for high, alive in ((0.28, True), (0.2, False)):
        logprobs = (old + math.log(1.25)).requires_grad_()
        loss, _ = group_policy_loss(
            logprobs,
            old,
            old,
            torch.tensor([1.0]),
            torch.ones(1, 1, dtype=torch.bool),
            loss="dapo",
            size=one(),
            **GROUP | {"clip_eps_high": high, "kl_coef": 0.0},
        )
        assert bool(torch.autograd.grad(loss, logprobs)[0] != 0) == alive


def test_kl_estimators_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # differences 0.5 and -1
    expected = {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) + 0.5 - 1, math.exp(1) - 1 - 1],
    }
    for name, values in expected.items():
        estimator: Any = name
        torch.testing.assert_close(kl_penalty(logprobs, ref, estimator), torch.tensor(values))


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient"),
    [
        (2.0, 1.2, -2.4, -2.4),  # inside [0.8, 1.3]: -r A, gradient -r A
        (2.0, 1.4, -2.6, 0.0),  # above with A > 0: clipped at 1.3
        (2.0, 0.5, -1.0, -1.0),  # below with A > 0: the minimum keeps the pessimistic unclipped value
        (-2.0, 0.5, 1.6, 0.0),  # below with A < 0: clipped at 0.8
        (-2.0, 1.4, 2.8, 2.8),  # above with A < 0: unclipped
    ],
)
def test_grpo_clips_by_hand(advantage: float, ratio: float, value: float, gradient: float) -> None:
    old = torch.full((1, 1), -2.0)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, _ = group_policy_loss(
        logprobs,
        old,
        logprobs.detach(),
        torch.tensor([advantage]),
        torch.ones(1, 1, dtype=torch.bool),
        loss="grpo",
        size=one(),
        **GROUP,
    )
    assert loss.item() == pytest.approx(value, abs=1e-5)
    assert float(torch.autograd.grad(loss, logprobs)[0]) == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.0, 1.0), (1.2, 1.2), (1.27, 1.25), (4.0, 1.25)])
def test_cispo_caps_the_weight_but_keeps_every_gradient(ratio: float, weight: float) -> None:
    old = torch.full((1, 1), -2.0)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, metrics = group_policy_loss(
        logprobs,
        old,
        logprobs.detach(),
        torch.tensor([-3.0]),
        torch.ones(1, 1, dtype=torch.bool),
        loss="cispo",
        size=one(),
        **GROUP,
    )
    assert loss.item() == pytest.approx(3 * weight * logprobs.item(), abs=1e-4)
    assert float(torch.autograd.grad(loss, logprobs)[0]) == pytest.approx(3 * weight, abs=1e-5)
    assert float(metrics["clip_frac"]) == float(ratio > 1.25)


@pytest.mark.parametrize("loss", ["grpo", "cispo", "gspo"])
def test_first_update_is_the_policy_gradient_and_all_estimators_are_zero(loss: Any) -> None:
    (logprobs, _, _), mask = ragged()
    advantages = torch.tensor([1.0, -2.0, 0.5, 9.0])
    value, metrics = group_policy_loss(
        logprobs, logprobs.detach(), logprobs.detach(), advantages, mask, loss=loss, size=RAGGED, **GROUP
    )
    (grad,) = torch.autograd.grad(value, logprobs)
    expected = torch.where(mask, -advantages[:, None] / mask.sum(-1, keepdim=True).clamp(min=1) / 3, 0.0)
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=0)
    means = combine([metrics])
    assert means.pop("ratio_max") == 1.0
    assert all(value == 0 for value in means.values()), means


def losses(
    name: str, tensors: list[Tensor], mask: Tensor, rows: slice | list[int] = slice(None)
) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, old, ref = (tensor[rows] for tensor in tensors)
    if name == "ppo":
        advantages = torch.linspace(-2, 2, 24).view(4, 6)[rows]
        return ppo_policy_loss(logprobs, old, ref, advantages, mask[rows], num_tokens=11, **PPO)
    loss: Any = name
    advantages = torch.tensor([1.0, -2.0, 0.5, 9.0])[rows]
    return group_policy_loss(logprobs, old, ref, advantages, mask[rows], loss=loss, size=RAGGED, **GROUP)


@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
def test_masked_positions_have_no_influence(name: str) -> None:
    tensors, mask = ragged()
    clean, clean_metrics = losses(name, tensors, mask)
    (clean_grad,) = torch.autograd.grad(clean, tensors[0])
    for bad in (math.nan, math.inf, -math.inf, 1e30):
        spoiled = [torch.where(mask, tensor.detach(), bad) for tensor in tensors]
        spoiled[0].requires_grad_()
        loss, metrics = losses(name, spoiled, mask)
        torch.testing.assert_close(loss, clean)
        torch.testing.assert_close(torch.autograd.grad(loss, spoiled[0])[0], clean_grad)
        assert combine([metrics]) == combine([clean_metrics])


@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
def test_micro_batches_add_up(name: str) -> None:
    tensors, mask = ragged()
    whole, whole_metrics = losses(name, tensors, mask)
    parts = [losses(name, tensors, mask, rows) for rows in ([1], [0, 3], [2])]
    split = sum((loss for loss, _ in parts), torch.zeros(()))
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, tensors[0])[0] for loss in (split, whole)), atol=1e-7, rtol=1e-5)
    assert combine([metrics for _, metrics in parts]) == pytest.approx(combine([whole_metrics]), rel=1e-5)


@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
def test_nothing_in_the_mask_is_zero_with_zero_gradient(name: str) -> None:
    tensors, mask = ragged()
    loss, metrics = losses(name, tensors, torch.zeros_like(mask))
    assert loss.item() == 0 and all(value == 0 for value in combine([metrics]).values())
    assert (torch.autograd.grad(loss, tensors[0])[0] == 0).all()


@pytest.mark.parametrize("name", [*LOSSES, "ppo"])
def test_extreme_logprobs_stay_finite(name: str) -> None:
    tensors, mask = ragged()
    for shift in (-1000.0, 1000.0):
        logprobs = (tensors[0].detach() + shift).requires_grad_()
        loss, metrics = losses(name, [logprobs, *tensors[1:]], mask)
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()
        assert all(math.isfinite(value) for value in combine([metrics]).values())


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo", "ppo"])
def test_a_ratio_beyond_e_20_goes_on_along_its_tangent(name: str) -> None:
    """At log-ratio 25 and A = -1 the loss is e^20 (1 + 5), and its gradient e^20 pulls the token back."""
    logprobs, old = torch.full((1, 1), -0.5, requires_grad=True), torch.full((1, 1), -25.5)
    mask, settings = torch.ones(1, 1, dtype=torch.bool), {"kl_coef": 0.0}
    if name == "ppo":
        loss, metrics = ppo_policy_loss(logprobs, old, old, -torch.ones(1, 1), mask, num_tokens=1, **PPO | settings)
    else:
        chosen: Any = name
        loss, metrics = group_policy_loss(logprobs, old, old, -torch.ones(1), mask, loss=chosen, size=one(), **GROUP | settings)
    assert loss.item() == pytest.approx(6 * math.exp(20), rel=1e-6) == float(metrics["ratio_max"])
    assert float(torch.autograd.grad(loss, logprobs)[0]) == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_without_a_coefficient_the_reference_has_no_influence(name: str, estimator: Any) -> None:
    """Even one that finds a token impossible: 0 times infinity would be no number."""
    found = []
    for known in (-math.inf, -1.0):
        logprobs = torch.full((1, 1), -1.0, requires_grad=True)
        old, ref, mask = torch.full((1, 1), -1.0), torch.full((1, 1), known), torch.ones(1, 1, dtype=torch.bool)
        changes: dict[str, Any] = {"kl_coef": 0.0, "kl_estimator": estimator}
        if name == "ppo":
            loss, metrics = ppo_policy_loss(logprobs, old, ref, torch.ones(1, 1), mask, num_tokens=1, **PPO | changes)
        else:
            loss, metrics = group_policy_loss(logprobs, old, ref, torch.ones(1), mask, loss="grpo", size=one(), **GROUP | changes)
        assert float(metrics["ref_kl"]) == (math.inf if math.isinf(known) else 0)
        found.append((loss.item(), torch.autograd.grad(loss, logprobs)[0].item()))
    assert found[0] == found[1] == (-1.0, -1.0)


def test_estimators_by_hand() -> None:
    # current minus old = ln 2 and -ln 4; reference minus current = ln 3 and 0
    two, three = math.log(2), math.log(3)
    logprobs = torch.tensor([[-1.0, -2.0]])
    old = logprobs - torch.tensor([[two, -2 * two]])
    ref = logprobs + torch.tensor([[three, 0.0]])
    mask, ratio = torch.ones(1, 2, dtype=torch.bool), (logprobs - old).exp()
    means = combine([policy_metrics(logprobs, old, ref, mask, ratio, ratio_bounds=(0.2, 1.5))])
    assert means == pytest.approx(
        {
            "approx_kl": 0.5 * (two**2 + (2 * two) ** 2) / 2,
            "approx_kl_k1": (-two + 2 * two) / 2,
            "approx_kl_k3": ((2 - two - 1) + (0.25 + 2 * two - 1)) / 2,
            "ref_kl": (3 - three - 1) / 2,
            "ref_kl_k1": -three / 2,
            "clip_frac": 0.5,  # 2.0 lies above 1.5, 0.25 inside
            "ratio_max": 2.0,
        },
        abs=1e-6,
    )


def test_estimators_approach_the_true_divergences() -> None:
    """Over all outcomes, weighted by the sampling policy, k1 and k3 are exactly KL(p || q)."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    divergence = float((p * (p / q).log()).sum())
    log_ratio = (q / p).log()
    assert float((p * k3(log_ratio)).sum()) == pytest.approx(divergence, abs=1e-12)
    assert float((p * -log_ratio).sum()) == pytest.approx(divergence, abs=1e-12)


@settings(deadline=None)
@given(st.floats(-1000, 1000))
def test_k3_is_non_negative_finite_and_pulls_back(d: float) -> None:
    log_ratio = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    value = k3(log_ratio)
    (slope,) = torch.autograd.grad(value, log_ratio)
    assert math.isfinite(value.item()) and value.item() >= 0
    assert abs(float(slope)) <= math.exp(5) - 1 + 1e-9
    if abs(d) > 1e-6:
        assert value.item() > 0 and slope.item() * d > 0
    if d <= 5:
        assert value.item() == pytest.approx(math.exp(d) - d - 1, abs=1e-12)


@pytest.mark.parametrize(
    ("d", "value", "slope"),
    [
        (4.9, math.exp(4.9) - 5.9, math.exp(4.9) - 1),
        (6.0, 2 * math.exp(5) - 7, math.exp(5) - 1),  # the tangent at 5: e^5 + e^5 (6 - 5), minus 6 and 1
        (-3.0, math.exp(-3) + 2, math.exp(-3) - 1),
    ],
)
def test_k3_follows_its_tangent_beyond_5(d: float, value: float, slope: float) -> None:
    log_ratio = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    got = k3(log_ratio)
    assert got.item() == pytest.approx(value, abs=1e-12)
    assert float(torch.autograd.grad(got, log_ratio)[0]) == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize("d", [1e-8, -1e-8, 1e-5, -1e-5, 1e-4, 1e-3, -1e-3])
def test_k3_of_a_tiny_difference_is_half_its_square_in_fp32(d: float) -> None:
    value = k3(torch.tensor(d)).item()
    assert value >= 0
    if abs(d) >= 1e-4:  # exp(d) - d - 1 in fp32 is off by up to 1e-7 here, twenty times the value at 1e-4
        assert value == pytest.approx(d * d / 2, abs=1e-11, rel=0.02)
