"""The loop of grpo and agent over a tiny real model, a real engine and real prompts, with rewards that a script decides."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    CPU,
    MOE,
    ROLLOUT_KEYS,
    SAMPLING,
    Killed,
    MemoryRecorder,
    RouterSpy,
    SamplingRun,
    Score,
    SpoilingRecorder,
    assert_bits_equal,
    assert_near,
    even,
    make_model,
    make_set,
    moments,
    one_module,
    prompts,
    row_logprobs,
    sets_fixture,
    snapshot,
    tokenizer_fixture,
    tokens_once,
    twin_adamw,
    twin_step,
    user,
)
from torch import Tensor
from turn_engines import TurnByTurn

from benchmarks.algorithms import GROUP_VARIANTS, UPDATES
from pipeline.data.prompts import PromptTask
from pipeline.errors import NumericsError
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Group, Rewards, Span
from pipeline.rewards.scoring import CompletionScorer, EpisodeScorer, Scored
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Completion, StopReason, Trajectory
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.registry import tool_schema
from pipeline.training.device import Device
from pipeline.training.group_loop import charged, group_step, train_group
from pipeline.training.policy_setup import open_prompts
from pipeline.training.rollouts import RolloutTask, total_steps

RUN_KEYS = ROLLOUT_KEYS | {f"rollout/{name}_frac" for name in ("zero_std", "all_good", "all_bad")} | {"rollout/trained_groups"}
tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(12))  # 9 + 3 prompts


def make_settings(**changes: Any) -> Group:
    defaults = {
        "batch_size": 3,
        "group_size": 4,
        "loss": "cispo",
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "ratio_cap": 5.0,
        "reduction": None,
        "advantage_std": None,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
        "old_logprobs": "sampled",
        "dynamic_sampling": {"max_rounds": 0},
        "overlong": {"buffer": 0, "penalty": 1.0, "train_truncated": True},
        "updates_per_rollout": 1,
    }
    return Group(**(SAMPLING | defaults | changes))


def equal(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    return [Scored(0.7, {"same": 0.7}, True) for _ in trajectories]


def almost_equal(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """As a reward model scores one answer in batches of different shape."""
    return [Scored(0.7 + 3e-7 * (row % 3 == 0), {"same": 0.7}, True) for row, _ in enumerate(trajectories)]


class Run(SamplingRun):
    """A task with what tests look at: its updater, the trajectories it sampled, its warnings."""

    def __init__(self, sets: Path, tokenizer: Tokenizer, settings: Group, *, score: Score = even, **changes: Any) -> None:
        super().__init__(sets, tokenizer, settings, **changes)
        state, self.updater = one_module(self.policy, settings, total_steps(settings, self.prompts), "policy")
        self.task = RolloutTask(**self.task_fields(state, score))

    def gradients(self, update: int = 0) -> dict[str, Tensor]:
        return self.updater.gradients[update]


def twin_loss(
    policy: CausalLM, reference: CausalLM, trajectories: Sequence[Trajectory], rewards: list[float], s: Group
) -> Tensor:
    """The group losses, one row and one formula at a time, from their papers."""
    losses, lengths = [], []
    for place, trajectory in enumerate(trajectories):
        group = rewards[place // s.group_size * s.group_size :][: s.group_size]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
        advantage = (rewards[place] - mean) / (1 if s.loss == "dr_grpo" else std + 1e-4)
        if not any(trajectory.sampled):
            continue
        mask = torch.tensor(trajectory.sampled)
        logprobs = row_logprobs(policy, trajectory, s.temperature)[mask]
        with torch.no_grad():
            known = row_logprobs(reference, trajectory, s.temperature)[mask]
        log_ratio = logprobs - torch.tensor(trajectory.logprobs)[mask]
        ratio = log_ratio.mean().exp().expand_as(logprobs) if s.loss == "gspo" else log_ratio.exp()
        if s.loss == "cispo":
            token = -ratio.detach().clamp(max=s.ratio_cap) * advantage * logprobs
        else:
            clipped = ratio.clamp(1 - s.clip_eps_low, 1 + s.clip_eps_high)
            token = -torch.minimum(ratio * advantage, clipped * advantage)
        difference = known - logprobs
        losses.append((token + s.kl_coef * (difference.exp() - difference - 1)).sum())
        lengths.append(len(logprobs))
    if s.loss == "dapo":
        return torch.stack(losses).sum() / sum(lengths)
    if s.loss == "dr_grpo":
        return torch.stack(losses).sum() / (len(losses) * s.max_new_tokens)
    return torch.stack([loss / length for loss, length in zip(losses, lengths, strict=True)]).mean()


@pytest.mark.parametrize("loss", ["cispo", "grpo", "dapo", "gspo", "dr_grpo"])
def test_a_step_is_the_papers_formula(sets: Path, tokenizer: Tokenizer, loss: str) -> None:
    """Two updates on one rollout against a row-by-row twin; the second sees ratios beyond the clips."""
    settings = make_settings(
        loss=loss,
        updates_per_rollout=2,
        lr=0.002,
        warmup_steps=0,
        clip_eps_low=0.05,
        clip_eps_high=0.1,
        ratio_cap=1.02,
        kl_coef=0.5,
    )
    run = Run(sets, tokenizer, settings)
    metrics, collected, advantages = group_step(run.task, settings, CPU, 0)
    (trajectories,) = run.trajectories
    rewards = [scored.total for scored in collected.scored]
    assert len(trajectories) == 12 and len({t.num_sampled for t in trajectories}) > 1
    assert advantages.shape == (12,) and float(advantages.view(3, 4).sum(dim=1).abs().max()) < 1e-5

    twin = make_model(tokenizer, sharpness=6.0)
    optimizer, losses, norms = twin_adamw(twin, settings), [], []
    for update in range(2):
        expected = twin_loss(twin, run.reference, trajectories, rewards, settings)
        expected.backward()
        losses.append(float(expected.detach()))
        gradients = {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}
        assert max(float(g.abs().max()) for g in gradients.values()) > 0.01
        assert_near(run.gradients(update), gradients, 5e-6)
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients.values())))
        with torch.no_grad():
            by_row = [row_logprobs(twin, t, 0.6) - torch.tensor(t.logprobs) for t in trajectories]
            log_ratio = torch.cat(by_row)
            clipped = torch.stack([row.mean() for row in by_row]) if loss == "gspo" else log_ratio  # what the loss clips
        twin_step(twin, optimizer, 0.002, settings.max_grad_norm)
    # means over both updates; the first one's ratios are 1
    assert abs(losses[0] - losses[1]) > 1e-3 and abs(norms[0] - norms[1]) > 1e-3
    assert metrics["policy/loss"] == metrics["train/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx(0.5 * float(log_ratio.square().mean()) / 2, rel=1e-3)
    assert metrics["policy/ratio_max"] == pytest.approx(float(clipped.exp().max()), rel=1e-4)
    assert metrics["policy/ratio_max"] > 1.1
    assert metrics["policy/clip_frac"] > 0  # the rollout's logprobs stay the old ones


def test_the_first_update_is_on_policy_despite_temperature_and_dropout(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(loss="grpo")
    run = Run(sets, tokenizer, settings, dropout=0.1)
    run.policy.train()  # as someone may have left it
    metrics, _, _ = group_step(run.task, settings, CPU, 0)
    assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/clip_frac"] == 0 and metrics["rollout/logprob_diff_max"] < 1e-4
    assert abs(metrics["policy/ref_kl"]) < 1e-6 and abs(metrics["policy/ref_kl_k1"]) < 1e-6
    assert metrics["policy/entropy"] > 0.1


@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
def test_in_bfloat16_the_distance_of_sampler_and_trainer_is_reported(sets: Path, tokenizer: Tokenizer, old_logprobs: str) -> None:
    """Two kernels round differently; with recomputed old logprobs the first ratio is 1 all the same."""
    settings = make_settings(old_logprobs=old_logprobs, updates_per_rollout=2, lr=0.01)
    bfloat16 = Device(torch.device("cpu"), torch.bfloat16, gradient_checkpointing=False)
    run = Run(sets, tokenizer, settings, autocast_dtype=torch.bfloat16, sharpness=2.0)
    metrics, _, _ = group_step(run.task, settings, bfloat16, 0)
    assert 1e-5 < metrics["rollout/logprob_diff_max"] <= 2e-2
    distance = abs(metrics["policy/ratio_first_update"] - 1)
    assert distance < 1e-7 if old_logprobs == "recomputed" else 0 < distance < 1e-2


def test_metrics_say_what_happened(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=2)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()
    summary = train_group(run.task, settings, CPU, recorder)
    assert [step for step, _ in recorder.lines] == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        metrics, trajectories = recorder.at(step), run.trajectories[step - 1]
        assert set(metrics) == RUN_KEYS and all(map(math.isfinite, metrics.values()))
        scored = even([], trajectories)
        totals = torch.tensor([s.total for s in scored], dtype=torch.float64)
        assert metrics["reward/mean"] == pytest.approx(float(totals.mean()), abs=1e-6)
        assert metrics["reward/std"] == pytest.approx(float(totals.std(correction=0)), abs=1e-6)
        assert (metrics["reward/min"], metrics["reward/max"]) == pytest.approx((float(totals.min()), float(totals.max())))
        assert metrics["reward/term/even"] == pytest.approx(sum(s.terms["even"] for s in scored) / 12)
        assert metrics["rollout/length_mean"] == pytest.approx(sum(t.num_sampled for t in trajectories) / 12)
        assert sum(metrics[f"stop/{reason.value}"] for reason in StopReason) == pytest.approx(1)
        assert metrics["rollout/truncated_frac"] == metrics["stop/length"]
        goods = [all(s.good for s in scored[group : group + 4]) for group in (0, 4, 8)]
        assert metrics["rollout/all_good_frac"] == pytest.approx(sum(goods) / 3)
        flat = [totals[group : group + 4].max() == totals[group : group + 4].min() for group in (0, 4, 8)]
        assert metrics["rollout/zero_std_frac"] == pytest.approx(sum(map(bool, flat)) / 3)
        tokens = sum(t.num_sampled for t in trajectories)
        assert metrics["train/tokens_per_s"] == pytest.approx(tokens / metrics["time/step_s"])
        figures = {"loss": metrics["train/loss"], "reward": metrics["reward/mean"], "tokens_per_s": metrics["train/tokens_per_s"]}
        assert recorder.shown[step - 1] == (step, figures)
    assert recorder.at(6)["train/tokens_seen"] == sum(t.num_sampled for part in run.trajectories for t in part)
    assert summary["train/tokens_seen"] == recorder.at(6)["train/tokens_seen"] and summary["train/steps"] == 6
    assert summary["reward/mean"] == pytest.approx(recorder.at(6)["reward/mean"])  # a tenth of 6 steps is the last one
    assert not any(name.startswith(("time/", "memory/")) or name.endswith("_per_s") for name in summary)

    assert [step for step, _ in recorder.samples] == [1, 3, 5, 6]  # every second step and the last
    step, rows = recorder.samples[-1]
    assert len(rows) == 2 * settings.group_size and "step" not in rows[0]  # the recorder adds it
    for row, trajectory in zip(rows, run.trajectories[-1], strict=False):
        assert row["prompt"] == tokenizer.decode_all(trajectory.prompt_ids) and row["stop"] == trajectory.stop.value
        assert row["completion"] == tokenizer.decode_all(trajectory.ids)
        assert row["reward"] == pytest.approx(row["term/even"] + row["term/short"])
    advantages = torch.tensor([row["advantage"] for row in rows]).view(2, 4)
    assert float(advantages.sum(dim=1).abs().max()) < 1e-5 and float(advantages.abs().max()) > 0.5


def test_equal_rewards_without_kl_move_nothing(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=4, kl_coef=0.0)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()
    group_step(run.task, settings, CPU, 0)  # AdamW has a memory before the rewards run dry
    run.task.score = equal
    run.task.state.step = 1
    weights, remembered = snapshot(run.policy), moments(run.updater)
    summary = train_group(run.task, settings, CPU, recorder)
    assert_bits_equal(snapshot(run.policy), weights)
    assert_bits_equal(moments(run.updater), remembered)
    assert run.task.state.step == 12 and summary["train/steps"] == 12 and summary["train/zero_signal_steps"] == 11
    assert recorder.at(12)["rollout/zero_std_frac"] == 1 and recorder.at(12)["reward/mean"] == pytest.approx(0.7)
    assert recorder.at(12)["train/lr"] == pytest.approx(1e-4)  # the schedule went on: the floor, a tenth of 1e-3
    assert [warning.split()[0] for warning in run.warnings] == ["5", "10"]
    assert all(parameter.grad is None for parameter in run.policy.parameters())

    run.task.score, run.task.state.step = even, 11
    train_group(run.task, settings, CPU, MemoryRecorder())
    assert run.task.state.counters["zero_signal_in_a_row"] == 0 and run.task.state.counters["zero_signal_steps"] == 11


def test_rewards_that_differ_by_rounding_are_equal(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(kl_coef=0.0)
    run = Run(sets, tokenizer, settings, score=almost_equal)
    weights = snapshot(run.policy)
    metrics, collected, advantages = group_step(run.task, settings, CPU, 0)
    assert collected.rewards.unique().numel() == 2 and not advantages.any()
    assert_bits_equal(snapshot(run.policy), weights)
    assert metrics["rollout/zero_std_frac"] == 1 and metrics["train/zero_signal_steps"] == 1
    assert metrics["rollout/trained_groups"] == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_policy_that_is_the_reference_has_no_kl_to_learn_from(
    sets: Path, tokenizer: Tokenizer, estimator: str, dtype: Any
) -> None:
    """Whatever the sampler's logprobs differ by: rounding must not become a step of AdamW's."""
    settings = make_settings(kl_coef=0.5, kl_estimator=estimator)
    run = Run(sets, tokenizer, settings, score=equal, autocast_dtype=dtype, sharpness=2.0)
    weights = snapshot(run.policy)
    metrics, _, _ = group_step(run.task, settings, Device(torch.device("cpu"), dtype, gradient_checkpointing=False), 0)
    assert_bits_equal(snapshot(run.policy), weights)
    assert not run.updater.gradients and metrics["rollout/trained_groups"] == 0


def test_equal_rewards_with_kl_pull_towards_the_reference(sets: Path, tokenizer: Tokenizer) -> None:
    """Steps without any signal are counted and warned of with a KL term too, but its pull goes on."""
    settings = make_settings(epochs=4, kl_coef=1.0, lr=2e-3)
    run, recorder = Run(sets, tokenizer, settings, score=equal), MemoryRecorder()
    with torch.no_grad():
        for number, parameter in enumerate(run.policy.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    summary = train_group(run.task, settings, CPU, recorder)
    start, end = (sum(recorder.at(step)["policy/ref_kl"] for step in steps) / 3 for steps in ((1, 2, 3), (10, 11, 12)))
    assert 0 < end < 0.8 * start
    assert len(run.updater.gradients) == 12 and recorder.at(12)["policy/loss"] > 0
    assert [recorder.at(step)["train/zero_signal_steps"] for step in range(1, 13)] == list(range(1, 13))
    assert summary["train/zero_signal_steps"] == 12
    assert [warning.split()[0] for warning in run.warnings] == ["5", "10"]


def test_steps_with_a_signal_start_the_row_anew(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=4)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()

    def score(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return (even if len(run.trajectories) == 5 else equal)(tasks, trajectories)

    run.task.score = score
    summary = train_group(run.task, settings, CPU, recorder)
    assert [recorder.at(step)["train/zero_signal_steps"] for step in (4, 5, 6, 12)] == [4, 4, 5, 11]
    assert [warning.split()[0] for warning in run.warnings] == ["5"] and summary["train/zero_signal_steps"] == 11


def test_a_rewarded_token_becomes_more_probable_and_the_reference_stays(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=5, kl_coef=0.0, lr=5e-3, group_size=8)
    run = Run(sets, tokenizer, settings)
    opened = [prompt for index in range(3) for prompt in run.task.prompts.batch(0, index)]

    def first_probabilities() -> Tensor:
        with torch.no_grad():
            rows = [run.policy(torch.tensor([prompt.prompt_ids]))[0, -1] for prompt in opened]
        return (torch.stack(rows) / settings.temperature).softmax(dim=-1).mean(dim=0)

    before, reference = first_probabilities(), snapshot(run.reference)
    wanted = int(before.topk(3).indices[2])  # probable enough to be sampled, not yet the favourite

    def score(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        hits = [float(trajectory.ids[0] == wanted) for trajectory in trajectories]
        return [Scored(hit, {"hit": hit}, hit > 0) for hit in hits]

    run.task.score = score
    train_group(run.task, settings, CPU, MemoryRecorder())
    after = first_probabilities()
    assert before[wanted] < 0.5 and after[wanted] > before[wanted] + 0.2
    assert_bits_equal(snapshot(run.reference), reference)


@pytest.mark.parametrize("changes", [{}, {"use_moe": True, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}])
def test_the_cut_into_micro_batches_changes_nothing(sets: Path, tokenizer: Tokenizer, changes: dict[str, Any]) -> None:
    gradients, losses = [], []
    for size in (1, 5, 64):
        settings = make_settings(micro_batch_size=size)
        run = Run(sets, tokenizer, settings, **changes)
        metrics, _, _ = group_step(run.task, settings, CPU, 0)
        gradients.append(run.gradients())
        losses.append({name: value for name, value in metrics.items() if name.startswith("policy/")})
    for other in (1, 2):
        assert_near(gradients[other], gradients[0])
        assert losses[other] == pytest.approx(losses[0], abs=1e-5)


def test_routers_are_balanced_in_reinforcement_too(sets: Path, tokenizer: Tokenizer) -> None:
    gates, losses = [], []
    for coef in (0.0, 5.0):
        settings = make_settings()  # micro-batches of 5, 5 and 2 rows
        run = Run(sets, tokenizer, settings, **(MOE | {"router_aux_loss_coef": coef}))
        spy = RouterSpy(run.policy)
        metrics, _, _ = group_step(run.task, settings, CPU, 0)
        assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-4)  # taking statistics is no dropout
        gates.append(run.gradients()["model.layers.0.mlp.gate.weight"])
        losses.append(metrics["policy/loss"])
        (trajectories,) = run.trajectories
        rows = [trajectories[start : start + 5] for start in (0, 5, 10)]
        parts = [tokens_once(part) for part in rows]  # no padding, and a prompt counts once in each
        aux = coef * sum(spy.aux_loss(place, part) * len(rows[place]) / 12 for place, part in enumerate(parts))
        assert metrics["moe/aux_loss"] == pytest.approx(aux, rel=1e-5, abs=1e-9)
        load_max = max(spy.load_max(place, part) for place, part in enumerate(parts))
        assert metrics["moe/expert_load_max"] == pytest.approx(load_max, abs=1e-6)
        assert metrics["train/loss"] == pytest.approx(metrics["policy/loss"] + metrics["moe/aux_loss"], abs=1e-5)
    assert float((gates[0] - gates[1]).abs().max()) > 1e-3
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)  # the policy's loss alone


def test_prompts_that_leave_no_room_count_as_bad_luck(sets: Path, tokenizer: Tokenizer) -> None:
    """Trajectories without a token: in the group's baseline, not in the loss."""
    settings = make_settings(micro_batch_size=4, thinking_ratio=0.0)
    lengths = sorted(len(prompt.prompt_ids) for prompt in Run(sets, tokenizer, settings).task.prompts.batch(0, 0))
    assert lengths[0] < lengths[-1]
    run = Run(sets, tokenizer, settings, max_total_len=lengths[-1])
    metrics, collected, _ = group_step(run.task, settings, CPU, 0)
    (trajectories,) = run.trajectories
    empty = [trajectory for trajectory in trajectories if not trajectory.num_sampled]
    assert 0 < len(empty) < 12 and metrics["stop/context"] == pytest.approx(len(empty) / 12)
    twin = make_model(tokenizer, sharpness=6.0)
    rewards = [scored.total for scored in collected.scored]
    twin_loss(twin, run.reference, trajectories, rewards, settings).backward()
    assert_near(run.gradients(), {name: p.grad for name, p in twin.named_parameters()}, 2e-6)

    nothing = Run(sets, tokenizer, settings, max_total_len=lengths[0])
    weights, recorder = snapshot(nothing.policy), MemoryRecorder()
    train_group(nothing.task, settings, CPU, recorder)
    assert {t.num_sampled for part in nothing.trajectories for t in part} == {0}
    assert_bits_equal(snapshot(nothing.policy), weights)
    assert all(map(math.isfinite, recorder.at(1).values())) and recorder.at(1)["train/zero_signal_steps"] == 1
    assert recorder.at(1)["rollout/distinct_3gram"] == 1.0


def test_rewards_that_are_no_numbers_are_skipped_then_refused(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=3)

    def broken(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return [Scored(math.nan, {}, False) for _ in trajectories]

    run, recorder = Run(sets, tokenizer, settings, score=broken), MemoryRecorder()
    weights = snapshot(run.policy)
    with pytest.raises(NumericsError, match=r"last at step 5 \(prompt rows \["):
        train_group(run.task, settings, CPU, recorder)
    assert_bits_equal(snapshot(run.policy), weights)
    assert recorder.at(4)["train/skipped_steps"] == 4


def test_algorithms_differ_off_policy_and_there_alone(sets: Path, tokenizer: Tokenizer) -> None:
    """What `benchmarks/algorithms.py` compares: with one update per rollout grpo and gspo are one algorithm."""

    def trained(name: str, updates: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        settings = make_settings(**GROUP_VARIANTS[name], updates_per_rollout=updates, lr=0.02, max_steps=2)
        run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()
        train_group(run.task, settings, CPU, recorder)
        return snapshot(run.policy), recorder.at(2)

    on, off = ({name: trained(name, updates) for name in ("cispo", "grpo", "gspo", "dapo")} for updates in UPDATES)
    for _, measured in on.values():
        assert measured["policy/approx_kl"] < 1e-9 and measured["policy/clip_frac"] == 0
        assert measured["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert_near(on["grpo"][0], on["gspo"][0], 1e-4)
    for _, measured in off.values():
        assert measured["policy/approx_kl"] > 1e-3 and measured["policy/ratio_max"] > 1.1
    assert all(off[name][1]["policy/clip_frac"] > 0 for name in ("grpo", "gspo", "dapo"))
    for one, other in combinations(off, 2):
        assert off[one][1]["policy/approx_kl"] != pytest.approx(off[other][1]["policy/approx_kl"], rel=1e-3)
        assert max(float((off[one][0][key] - off[other][0][key]).abs().max()) for key in off[one][0]) > 1e-3


@pytest.mark.parametrize("what", ["weights", "logits"])
def test_a_policy_that_overflows_in_the_end_is_refused(sets: Path, tokenizer: Tokenizer, what: str) -> None:
    settings = make_settings(epochs=1)
    run = Run(sets, tokenizer, settings)
    last = total_steps(settings, run.prompts)
    recorder = SpoilingRecorder(run.policy, last, math.nan if what == "weights" else 3e38)
    with pytest.raises(NumericsError, match=rf"after {last} steps the policy.*(tensors|logits) are not finite"):
        train_group(run.task, settings, CPU, recorder)


@pytest.mark.parametrize("loss", ["cispo", "grpo"])
def test_a_killed_run_ends_with_the_same_bits(sets: Path, tokenizer: Tokenizer, loss: str) -> None:
    settings = make_settings(epochs=2, loss=loss, updates_per_rollout=2, lr=0.01)
    whole, straight = Run(sets, tokenizer, settings), MemoryRecorder()
    expected = train_group(whole.task, settings, CPU, straight)
    broken, first = Run(sets, tokenizer, settings), MemoryRecorder(save_at=[2], kill_at=4)
    with pytest.raises(Killed):
        train_group(broken.task, settings, CPU, first)
    torch.manual_seed(999)  # no generator's state may matter
    again, second = Run(sets, tokenizer, settings), MemoryRecorder(first.saved)
    assert train_group(again.task, settings, CPU, second) == expected
    assert [step for step, _ in second.lines] == [3, 4, 5, 6]
    assert [t.ids for t in again.trajectories[-1]] == [t.ids for t in whole.trajectories[-1]]
    assert_bits_equal(snapshot(again.policy), snapshot(whole.policy))
    assert_bits_equal(moments(again.updater), moments(whole.updater))
    assert second.samples == straight.samples[-3:]


class Fixed:
    """A reward model with the same score for everything."""

    def __init__(self, score: float) -> None:
        self.value = score

    def score(self, items: Sequence[Any]) -> list[float]:
        return [self.value] * len(items)


REWARDS = Rewards(
    preset="default",
    length=Span(min_chars=2, max_chars=80, weight=0.5, penalty=0.25),
    thinking=Span(min_chars=2, max_chars=30, weight=1.0, penalty=0.5),
    think_close=0.125,
    repetition=1.0,
    model=1.0,
    model_clip=3.0,
    answer=2.5,
    tool_call=0.5,
    unfinished=0.75,
    agent_clip=3.0,
)


def test_a_prompt_without_a_turn_is_scored(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings()
    run = Run(sets, tokenizer, settings, max_total_len=1, score=CompletionScorer(REWARDS, Fixed(0.5)))
    thought = set()
    for step in range(3):
        _, collected, _ = group_step(run.task, settings, CPU, step)
        for task, scored in zip(collected.tasks, collected.scored, strict=True):
            thinking = -0.625 if task.open_thinking else 0.0
            expected = {
                "length": -0.25,
                "thinking": thinking,
                "repetition": 0.0,
                "model": 0.5,
                "answer": 0.0,
                "unfinished": -0.75,
            }
            assert scored.terms == pytest.approx(expected) and not scored.good
            thought.add(task.open_thinking)
    assert thought == {False, True}


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_what_breaks_the_reward_model_earns_the_worst(sets: Path, tokenizer: Tokenizer, score: float) -> None:
    settings = make_settings()
    run = Run(sets, tokenizer, settings, score=CompletionScorer(REWARDS, Fixed(score)))
    _, collected, _ = group_step(run.task, settings, CPU, 0)
    assert {scored.terms["model"] for scored in collected.scored} == {-3.0}


class ScriptedEngine(TurnByTurn):
    """Writes a call, then an answer that its key decides, with the logprobs that the model gives them."""

    def __init__(self, model: CausalLM, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    def turn(self, prompts: Any, *, keys: Any, temperature: float, **_: Any) -> list[Completion]:
        return [self.complete(list(prompt), key, temperature) for prompt, key in zip(prompts, keys, strict=True)]

    @torch.no_grad()
    def complete(self, prompt: list[int], key: int, temperature: float) -> Completion:
        training = self.model.training
        self.model.eval()
        control, text = self.tokenizer.control_id, self.tokenizer.encode_text
        if control("<tool_response>") in prompt:
            ids = text("42" if key % 2 else "stone")
        else:
            call = text('\n{"name": "calculate_math", "arguments": {"expression": "6*7"}}\n')
            ids = [control("<tool_call>"), *call, control("</tool_call>")]
        ids = [*ids, self.tokenizer.eos_id]
        logits = self.model(torch.tensor([prompt + ids[:-1]]))[0, len(prompt) - 1 :]
        self.model.train(training)
        logprobs = torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        return Completion(ids, logprobs.tolist(), StopReason.EOS)


class AgentRun:
    """A task over prompts with a tool, whose policy was left in training mode with dropout, and the trajectories it leaves."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: Group) -> None:
        system = {"role": "system", "content": "", "tools": [tool_schema("calculate_math", "en")]}
        asked = [[system, user(f"6*7? {n}"), {"role": "assistant", "content": ""}] for n in range(4)]
        make_set(folder, "agent", [{"conversations": turns, "gt": ["42"]} for turns in asked], tokenizer)
        shape = {"sharpness": 4.0, "max_position_embeddings": 2048, "dropout": 0.1}
        self.policy, self.reference, self.twin = (make_model(tokenizer, **shape) for _ in range(3))
        self.policy.train()
        self.trajectories: list[Trajectory] = []
        opened = open_prompts(folder / "prepared" / "agent", settings, tokenizer, 0.0, print)
        state, self.updater = one_module(self.policy, settings, 4, "policy")
        engine, encoder = ScriptedEngine(self.policy, tokenizer), ChatEncoder(tokenizer)

        def rollout(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
            limits = {"max_turns": 3, "max_new_tokens": 80, "max_total_len": 2048, "temperature": settings.temperature}
            self.trajectories = run_episodes(engine, encoder, tokenizer, tasks, keys=keys, **limits)
            return self.trajectories

        score = EpisodeScorer(REWARDS, Fixed(0.0))
        self.task = RolloutTask(state, self.policy, self.reference, opened, rollout, score, tokenizer.decode_all, print)


def agent_settings(**changes: Any) -> Group:
    return make_settings(max_prompt_len=1500, batch_size=3, thinking_ratio=0.0, max_new_tokens=80, **changes)


def test_agent_trains_on_what_the_policy_wrote_and_not_on_what_tools_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = agent_settings()
    run = AgentRun(tmp_path, tokenizer, settings)
    metrics, collected, _ = group_step(run.task, settings, CPU, 0)
    kept = run.trajectories
    assert len(kept) == 12 and all(False in t.sampled and t.sampled[-1] and len(t.turns) == 2 for t in kept)
    solved = [t.final_answer == "42" for t in kept]
    assert 0 < sum(solved) < 12 and [scored.good for scored in collected.scored] == solved
    assert metrics["tool/success"] == pytest.approx(sum(solved) / 12)
    assert metrics["tool/calls_mean"] == 1 and metrics["tool/error_frac"] == 0
    assert {f"reward/term/{name}" for name in ("answer", "tool_call", "unfinished", "thinking", "repetition")} <= set(metrics)
    # on policy at temperature 0.6, whatever mode the policy was left in
    assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["rollout/logprob_diff_max"] < 1e-4
    assert abs(metrics["policy/ref_kl"]) < 1e-6

    totals = [scored.total for scored in collected.scored]
    twin_loss(run.twin, run.reference, kept, totals, settings).backward()
    assert_near(run.updater.gradients[0], {name: p.grad for name, p in run.twin.named_parameters()}, 2e-6)


def test_agent_with_equal_rewards_and_without_kl_moves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = agent_settings(kl_coef=0.0, epochs=4)
    run = AgentRun(tmp_path, tokenizer, settings)
    group_step(run.task, settings, CPU, 0)  # AdamW has a memory before the rewards run dry
    run.task.score, run.task.state.step = equal, 1
    weights, remembered = snapshot(run.policy), moments(run.updater)
    assert remembered
    _, _, advantages = group_step(run.task, settings, CPU, 1)
    assert not advantages.any()
    summary = train_group(run.task, settings, CPU, MemoryRecorder())
    assert_bits_equal(snapshot(run.policy), weights)
    assert_bits_equal(moments(run.updater), remembered)
    assert len(run.updater.gradients) == 1
    assert summary["train/steps"] == run.task.state.step == 4 and summary["train/zero_signal_steps"] == 4


def sometimes(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """Rewards that differ only within the groups of every third prompt of the set."""
    return [
        Scored(float(place % 2) if task.row % 3 == 0 else 0.7, {}, True)
        for place, (task, _) in enumerate(zip(tasks, trajectories, strict=True))
    ]


def test_groups_without_signal_give_their_places_away(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(dynamic_sampling={"max_rounds": 8}, kl_coef=0.0)
    run = Run(sets, tokenizer, settings, score=sometimes)
    metrics, collected, advantages = group_step(run.task, settings, CPU, 0)
    assert sorted(task.row for task in collected.tasks[::4]) == [0, 3, 6]
    assert bool((advantages != 0).all())
    assert len(collected.tasks) == 3 * 4 == len(advantages) and metrics["rollout/trained_groups"] == 3
    first = run.trajectories[0]
    assert (
        metrics["rollout/resample_rounds"] >= 1 and metrics["rollout/resample_groups"] == sum(map(len, run.trajectories[1:])) / 4
    )
    # what describes the rollout is about the prompts that nobody chose
    assert metrics["rollout/zero_std_frac"] > 0
    assert metrics["rollout/length_mean"] == pytest.approx(sum(t.num_sampled for t in first) / len(first))
    # every completion has random numbers of its own, and the same step asks for the same again
    again = Run(sets, tokenizer, settings, score=sometimes)
    _, same, _ = group_step(again.task, settings, CPU, 0)
    assert [t.ids for t in same.trajectories] == [t.ids for t in collected.trajectories]


def test_dynamic_sampling_ends_at_its_cap(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(dynamic_sampling={"max_rounds": 2}, kl_coef=0.0)
    run = Run(sets, tokenizer, settings, score=equal)
    before = snapshot(run.policy)
    metrics, collected, _ = group_step(run.task, settings, CPU, 0)
    assert len(run.trajectories) == 3 and metrics["rollout/resample_rounds"] == 2 and metrics["rollout/trained_groups"] == 0
    assert [t.ids for t in collected.trajectories] == [t.ids for t in run.trajectories[0]]  # shown, not trained
    assert metrics["train/zero_signal_steps"] == 1
    assert_bits_equal(snapshot(run.policy), before)


@pytest.mark.parametrize("batch_size", [3, 4, 6, 9])
def test_no_step_takes_a_prompt_twice(sets: Path, tokenizer: Tokenizer, batch_size: int) -> None:
    """Of 9 prompts 3 have a signal: once all were asked there are no others, and fewer groups are trained."""
    settings = make_settings(batch_size=batch_size, dynamic_sampling={"max_rounds": 8}, kl_coef=0.0)
    for step in range(Run(sets, tokenizer, settings).task.prompts.batches_per_epoch):
        run = Run(sets, tokenizer, settings, score=sometimes)
        asked, sample = [], run.task.rollout

        def spy(tasks: Any, keys: Any, sample: Any = sample, asked: list[int] = asked) -> list[Trajectory]:
            asked += [task.row for task in tasks[::4]]
            return sample(tasks, keys)

        run.task.rollout = spy
        first = len(run.task.prompts.batch(0, step))
        metrics, collected, _ = group_step(run.task, settings, CPU, step)
        assert len(asked) == len(set(asked)) == first + metrics["rollout/resample_groups"]
        rows = [task.row for task in collected.tasks[::4]]
        assert metrics["rollout/trained_groups"] == len(rows) == len(set(rows)) == min(3, first)
        assert len(rows) == first or len(asked) == 9


def test_a_group_with_nothing_in_the_loss_has_no_signal(sets: Path, tokenizer: Tokenizer) -> None:
    masked = {"buffer": 0, "penalty": 0.0, "train_truncated": False}
    settings = make_settings(overlong=masked, dynamic_sampling={"max_rounds": 8}, max_new_tokens=1, kl_coef=0.5)

    def score(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        for task, trajectory in zip(tasks, trajectories, strict=True):
            trajectory.stop = StopReason.EOS if task.row % 3 == 0 else StopReason.LENGTH
        return [Scored(float(place % 2), {}, True) for place, _ in enumerate(trajectories)]

    run = Run(sets, tokenizer, settings, score=score)
    metrics, collected, _ = group_step(run.task, settings, CPU, 0)
    assert {task.row for task in collected.tasks} == {0, 3, 6} and metrics["rollout/trained_groups"] == 3


def test_the_first_groups_are_trained_where_kl_alone_teaches(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(dynamic_sampling={"max_rounds": 1}, kl_coef=0.5)
    run = Run(sets, tokenizer, settings, score=equal)
    with torch.no_grad():
        run.policy.model.norm.weight += 0.1
    metrics, collected, _ = group_step(run.task, settings, CPU, 0)
    assert [t.ids for t in collected.trajectories] == [t.ids for t in run.trajectories[0]]
    assert len(run.updater.gradients) == 1 and metrics["rollout/trained_groups"] == 3


def test_a_resampling_run_is_resumed_exactly(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=2, dynamic_sampling={"max_rounds": 2}, lr=0.01)
    whole, straight = Run(sets, tokenizer, settings, score=sometimes), MemoryRecorder()
    expected = train_group(whole.task, settings, CPU, straight)
    broken, first = Run(sets, tokenizer, settings, score=sometimes), MemoryRecorder(save_at=[2], kill_at=4)
    with pytest.raises(Killed):
        train_group(broken.task, settings, CPU, first)
    again = Run(sets, tokenizer, settings, score=sometimes)
    assert train_group(again.task, settings, CPU, MemoryRecorder(first.saved)) == expected
    assert_bits_equal(snapshot(again.policy), snapshot(whole.policy))


def test_the_length_penalty_grows_towards_the_limit(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(overlong={"buffer": 2, "penalty": 0.6, "train_truncated": True})
    plain, shaped = Run(sets, tokenizer, make_settings(), score=equal), Run(sets, tokenizer, settings, score=equal)
    _, without, _ = group_step(plain.task, make_settings(), CPU, 0)
    metrics, collected, _ = group_step(shaped.task, settings, CPU, 0)
    lengths = [t.num_sampled for t in collected.trajectories]
    assert [t.ids for t in without.trajectories] == [t.ids for t in collected.trajectories]
    limit = settings.max_new_tokens
    # 0 up to limit - 2, then half and all of 0.6
    expected = [0.7 - 0.6 * max(0, length - (limit - 2)) / 2 for length in lengths]
    assert [scored.total for scored in collected.scored] == pytest.approx(expected)
    assert max(lengths) == limit and min(lengths) < limit - 2
    penalties = [total - 0.7 for total in expected]
    assert metrics["reward/term/overlong"] == pytest.approx(sum(penalties) / len(penalties), abs=1e-6)


def test_the_length_penalty_can_turn_good_into_bad_but_unsolves_nothing(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(overlong={"buffer": 2, "penalty": 0.6, "train_truncated": True})
    prompt = Run(sets, tokenizer, settings).task.prompts.batch(0, 0)[0]
    asked = replace(prompt, gt=["42"])
    for total, length, good in ((0.5, 6, False), (0.5, 4, True), (0.7, 6, True)):
        assert charged(prompt, Scored(total, {}, True), length, settings).good is good
        assert charged(asked, Scored(total, {}, True), length, settings).good
        assert not charged(asked, Scored(total, {}, False), length, settings).good


def test_cut_completions_can_be_left_out_of_the_loss(sets: Path, tokenizer: Tokenizer) -> None:
    masked = {"buffer": 0, "penalty": 0.0, "train_truncated": False}
    settings = make_settings(overlong=masked, batch_size=6, lr=0.002, warmup_steps=0)
    run = Run(sets, tokenizer, settings)
    twin, reference = copy.deepcopy(run.policy), run.reference
    _, collected, _ = group_step(run.task, settings, CPU, 0)
    cut = [t.stop is StopReason.LENGTH for t in collected.trajectories]
    assert any(cut) and not all(cut)
    rewards = [scored.total for scored in collected.scored]
    hidden = [
        replace(t, sampled=[False] * len(t.sampled)) if gone else t for t, gone in zip(collected.trajectories, cut, strict=True)
    ]
    twin_loss(twin, reference, hidden, rewards, settings).backward()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert_near(run.gradients(), expected, 2e-6)


def test_old_logprobs_may_be_the_trainers_own(sets: Path, tokenizer: Tokenizer) -> None:
    """A sampler that records wrong logprobs: recomputing makes the first ratio 1 again and reports the difference."""
    results = {}
    for choice in ("sampled", "recomputed"):
        settings = make_settings(old_logprobs=choice)
        run = Run(sets, tokenizer, settings)
        honest = run.task.rollout

        def shifted(tasks: Any, keys: Any, honest: Any = honest) -> list[Trajectory]:
            return [replace(t, logprobs=[value - 0.5 for value in t.logprobs]) for t in honest(tasks, keys)]

        run.task.rollout = shifted
        results[choice], _, _ = group_step(run.task, settings, CPU, 0)
    assert results["sampled"]["policy/ratio_first_update"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert results["recomputed"]["policy/ratio_first_update"] == pytest.approx(1, abs=1e-5)
    assert all(metrics["rollout/logprob_diff_max"] == pytest.approx(0.5, abs=1e-4) for metrics in results.values())


def test_an_entropy_bonus_raises_entropy(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(entropy_coef=1.0, kl_coef=0.0, lr=0.01, warmup_steps=0, epochs=4)
    run, recorder = Run(sets, tokenizer, settings, score=equal), MemoryRecorder()
    train_group(run.task, settings, CPU, recorder)
    steps = run.task.state.step
    assert recorder.at(steps)["policy/entropy"] > recorder.at(1)["policy/entropy"] + 0.05
