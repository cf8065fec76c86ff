"""The optimizer step and the resumable state: rates, decay, clipping, skipped steps, what is saved and what is averaged."""

import math
from typing import Any

import pytest
import torch
from tiny_runs import OPTIMIZER, Killed, MemoryRecorder, assert_bits_equal, moments, snapshot
from torch import nn

from pipeline.errors import NumericsError
from pipeline.params.schema import Optimizer
from pipeline.training.state import TrainState, run_steps, trainable_state
from pipeline.training.updater import Updater, seed_for


class Toy(nn.Module):
    """A module with every kind of parameter that weight decay has to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.Embedding(3, 2)
        self.proj = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def make_settings(**changes: Any) -> Optimizer:
    return Optimizer(**(OPTIMIZER | changes))


def set_gradients(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def test_rate_follows_warm_up_and_cosine() -> None:
    module = Toy()
    updater = Updater(module, make_settings(lr=2.0, warmup_steps=2, min_lr_frac=0.1), total_steps=6)
    # warm-up (s + 1) / 3; then 0.1 + 0.9 (1 + cos(pi p)) / 2 with p = 0, 1/3, 2/3, 1: cosines 1, 0.5, -0.5, -1
    expected = [2 / 3, 4 / 3, 2.0, 1.55, 0.65, 0.2]
    for step, rate in enumerate(expected):
        set_gradients(module, step)
        done = updater.update(step, context="")
        assert done.applied and done.lr == pytest.approx(rate, abs=1e-12)
        assert {group["lr"] for group in updater.adamw.param_groups} == {done.lr}
    assert updater.lr_at(0) == pytest.approx(2 / 3)


def test_a_critic_has_its_own_peak() -> None:
    updater = Updater(Toy(), make_settings(lr=2.0, warmup_steps=0), total_steps=4, lr=0.5)
    assert updater.lr_at(0) == 0.5 and updater.lr_at(3) == pytest.approx(0.05)


def test_weights_follow_adamw_with_clipped_gradients_and_decay_on_matrices_alone() -> None:
    """AdamW (arXiv:1711.05101, algorithm 2) written out in fp64, three steps, gradients both above and below the clip."""
    module, limit, decay, steps = Toy(), 1.5, 0.1, 3
    settings = make_settings(lr=0.05, betas=(0.8, 0.95), warmup_steps=1, min_lr_frac=0.1, weight_decay=decay, max_grad_norm=limit)
    updater = Updater(module, settings, total_steps=steps)
    twin = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in twin.items()}
    second = {name: torch.zeros_like(p) for name, p in twin.items()}
    norms = []
    for step, scale in enumerate([3.0, 0.1, 1.0]):
        set_gradients(module, step, scale)
        gradients = {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        norms.append(norm)
        rate = 0.05 * [0.5, 1.0, 0.1][step]
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, limit / norm)
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            if name == "proj.weight":
                twin[name] = twin[name] * (1 - rate * decay)
            corrected = first[name] / (1 - 0.8 ** (step + 1))
            twin[name] = twin[name] - rate * corrected / ((second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        assert updater.update(step, context="").grad_norm == pytest.approx(norm, rel=1e-6)
    assert norms[0] > limit > norms[1]
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.double(), twin[name], atol=1e-6, rtol=0)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_frozen_parameters_are_left_alone() -> None:
    module = Toy()
    before = snapshot(module.frozen)
    updater = Updater(module, make_settings(weight_decay=0.5), total_steps=2)
    set_gradients(module, 0)
    updater.update(0, context="")
    assert_bits_equal(snapshot(module.frozen), before)
    with pytest.raises(ValueError, match="trainable"):
        Updater(module.frozen, make_settings(), total_steps=2)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_step_without_finite_gradients_moves_nothing_and_is_counted(poison: float) -> None:
    module = Toy()
    updater = Updater(module, make_settings(), total_steps=9)
    set_gradients(module, 0)
    updater.update(0, context="")
    weights, remembered = snapshot(module), moments(updater)
    assert remembered  # AdamW has a memory to protect
    set_gradients(module, 1)
    module.norm.bias.grad[1] = poison
    done = updater.update(1, context="")
    assert not done.applied and not math.isfinite(done.grad_norm)
    assert (updater.skipped, updater.skipped_in_a_row) == (1, 1)
    assert_bits_equal(snapshot(module), weights)
    assert_bits_equal(moments(updater), remembered)
    assert all(parameter.grad is None for parameter in module.parameters())  # nothing leaks into the next step
    set_gradients(module, 2)
    assert updater.update(2, context="").applied
    assert (updater.skipped, updater.skipped_in_a_row) == (1, 0)


def test_five_bad_steps_in_a_row_end_the_run_and_name_the_rows() -> None:
    module = Toy()
    updater = Updater(module, make_settings(), total_steps=20)

    def bad(step: int) -> None:
        set_gradients(module, step)
        module.proj.weight.grad[0, 0] = math.nan
        updater.update(step, context="rows [11, 12]")

    for step in range(4):
        bad(step)
    set_gradients(module, 4)
    updater.update(4, context="")  # a good step starts the count again
    for step in range(5, 9):
        bad(step)
    with pytest.raises(NumericsError, match=r"5 steps in a row, last at step 10 \(rows \[11, 12\]\)") as caught:
        bad(9)
    assert caught.value.exit_code == 4 and updater.skipped == 9


def test_discarded_gradients_leave_no_trace() -> None:
    module = Toy()
    updater = Updater(module, make_settings(), total_steps=4)
    set_gradients(module, 0)
    updater.update(0, context="")
    weights, remembered = snapshot(module), moments(updater)
    set_gradients(module, 1)
    updater.discard()
    assert_bits_equal(snapshot(module), weights)
    assert_bits_equal(moments(updater), remembered)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_seeds_are_fixed_numbers() -> None:
    """Known answers: the same in every process, whatever the hash seed."""
    assert seed_for(42, "rollout", 0, 1) == 2978020386632707067
    assert seed_for("dropout", 7) == 6813151337086010439
    drawn = {seed_for(1, "dropout", step) for step in range(200)} | {seed_for(11, "dropout", step) for step in range(200)}
    assert len(drawn) == 400 and all(0 <= seed < 2**63 for seed in drawn)


def make_state(total_steps: int = 6) -> TrainState:
    module = Toy()
    return TrainState({"toy": module}, {"toy": Updater(module, make_settings(), total_steps=total_steps)})


def toy_step(state: TrainState, step: int) -> dict[str, float]:
    set_gradients(state.modules["toy"], 100 + step)
    if step == 1:
        state.modules["toy"].proj.bias.grad[0] = math.nan
    state.updaters["toy"].update(step, context="")
    state.results["last"] = float(step)
    return {"train/loss": float(step), "seen": state.count("seen", 2.0)}


def test_only_trainable_tensors_are_saved() -> None:
    assert set(trainable_state(Toy())) == {"embed_tokens.weight", "proj.weight", "proj.bias", "norm.weight", "norm.bias"}


def test_a_killed_run_goes_on_from_its_save_and_ends_alike() -> None:
    whole, straight = make_state(), MemoryRecorder()
    starts: list[str] = []
    run_steps(whole, straight, 6, lambda step: toy_step(whole, step), lambda: starts.append("whole"))

    broken, first = make_state(), MemoryRecorder(save_at=[3], kill_at=5)
    with pytest.raises(Killed):
        run_steps(broken, first, 6, lambda step: toy_step(broken, step), lambda: starts.append("broken"))
    again, second = make_state(), MemoryRecorder(first.saved)
    run_steps(again, second, 6, lambda step: toy_step(again, step), lambda: starts.append("again"))

    assert starts == ["whole", "broken"]  # a resumed run does not start
    assert [step for step, _ in second.lines] == [4, 5, 6] and second.lines == straight.lines[3:]
    assert_bits_equal(snapshot(again.modules["toy"]), snapshot(whole.modules["toy"]))
    assert_bits_equal(moments(again.updaters["toy"]), moments(whole.updaters["toy"]))
    assert (again.step, again.counters, again.results) == (6, {"seen": 12.0}, {"last": 5.0})
    assert (again.updaters["toy"].skipped, again.updaters["toy"].applied) == (1, 5)


def test_a_run_that_applied_no_step_fails() -> None:
    state = make_state(total_steps=3)

    def poisoned(step: int) -> dict[str, float]:
        set_gradients(state.modules["toy"], step)
        state.modules["toy"].proj.bias.grad[0] = math.inf
        state.updaters["toy"].update(step, context="")
        return {}

    with pytest.raises(NumericsError, match="none of 3 steps had finite gradients"):
        run_steps(state, MemoryRecorder(), 3, poisoned)


def test_the_tail_is_averaged_key_by_key() -> None:
    state = make_state()
    logged = [
        {"a": 100.0},
        {"a": 1.0, "time/step_s": 5.0, "train/tokens_per_s": 9.0, "memory/peak_bytes": 7.0},
        {"b": 4.0, "a": math.nan},  # neither a missing nor a meaningless value counts as 0
        {"a": 4.0, "b": 6.0},
    ]
    for step, metrics in enumerate(logged):
        state.average_tail(metrics, step=step, first=1)
    assert state.results == {"a": 2.5, "b": 5.0}
