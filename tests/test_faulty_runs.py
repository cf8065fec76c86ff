"""Faults put into real runs of the project's own loops at tiny size: the diagnosis names each, and nothing in runs without."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_group_loop import Run as GroupRun
from test_group_loop import equal
from test_group_loop import make_settings as group_settings
from test_ppo_loop import Run as PpoRun
from test_ppo_loop import make_settings as ppo_settings
from test_supervised_loop import language_task
from test_supervised_loop import make_settings as supervised_settings
from tiny_runs import CPU, MemoryRecorder, Score, chats, even, make_model, prompts, sets_fixture, tokenizer_fixture

from pipeline.data.prompts import PromptTask
from pipeline.diagnosis.checks import diagnose
from pipeline.diagnosis.findings import Severity
from pipeline.diagnosis.signals import MIN_POINTS, Signals
from pipeline.params.schema import Section
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import Trajectory
from pipeline.text.tokenizer import Tokenizer
from pipeline.tracking.records import Series
from pipeline.training.group_loop import train_group
from pipeline.training.ppo_loop import train_ppo
from pipeline.training.supervised import train_supervised

tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(48), full_sft=chats(8))
LONG: dict[str, Any] = {"epochs": 9, "max_steps": 24, "temperature": 1.0, "max_new_tokens": 32, "micro_batch_size": 64}
SHAPE: dict[str, Any] = {"sharpness": 3.0, "dropout": 0.0}


def signals(stage: str, settings: Section, recorder: MemoryRecorder) -> Signals:
    series: dict[str, Series] = {}
    for step, metrics in recorder.lines:
        for key, value in metrics.items():
            one = series.setdefault(key, Series())
            one.steps.append(step)
            one.values.append(value)
    return Signals(stage, {stage: settings.model_dump()}, series)


def group_run(sets: Path, tokenizer: Tokenizer, score: Score, **changes: Any) -> Signals:
    settings = group_settings(**(LONG | {"batch_size": 4, "group_size": 6, "lr": 3e-3} | changes))
    recorder = MemoryRecorder()
    train_group(GroupRun(sets, tokenizer, settings, score=score, **SHAPE).task, settings, CPU, recorder)
    return signals("grpo", settings, recorder)


def ppo_run(sets: Path, tokenizer: Tokenizer, score: Score, **changes: Any) -> Signals:
    critic = {"gamma": 1.0, "gae_lambda": 0.95, "critic_lr": 1e-2, "critic_warmup_steps": 2}
    settings = ppo_settings(**(LONG | critic | {"batch_size": 24, "mini_batch_size": 24, "lr": 3e-3} | changes))
    recorder = MemoryRecorder()
    train_ppo(PpoRun(sets, tokenizer, settings, score=score, **SHAPE).task, settings, CPU, recorder)
    return signals("ppo", settings, recorder)


def sft_run(sets: Path, tokenizer: Tokenizer, **changes: Any) -> Signals:
    settings, recorder = supervised_settings(**({"val_every": 6} | changes)), MemoryRecorder()
    task, _ = language_task(sets, tokenizer, settings, make_model(tokenizer), name="full_sft")
    train_supervised(task, settings, CPU, recorder)
    return signals("full_sft", settings, recorder)


def length_hack(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """Pays for length; answers that end by themselves are worth something, too, but less."""
    scored = []
    for trajectory in trajectories:
        terms = {"long": trajectory.num_sampled / 6, "finished": 0.0 if trajectory.truncated else 0.8}
        scored.append(Scored(sum(terms.values()), terms, True))
    return scored


def noise(seed: int) -> Score:
    """Rewards that no policy can learn."""
    draw = random.Random(seed)

    def score(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return [Scored(draw.random(), {"luck": 0.0}, True) for _ in trajectories]

    return score


def noise_of_answers(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """The same for the same answer, and by luck for others."""
    return [Scored(random.Random(str(t.ids)).random(), {"luck": 0.0}, True) for t in trajectories]


def severities(run: Signals) -> dict[str, Severity]:
    return {finding.name: finding.severity for finding in diagnose(run)}


@pytest.mark.parametrize(
    "train",
    [
        lambda sets, tokenizer: group_run(sets, tokenizer, even),
        lambda sets, tokenizer: ppo_run(sets, tokenizer, even, lr=1e-2, max_steps=36, epochs=20),
        lambda sets, tokenizer: sft_run(sets, tokenizer, epochs=8),
    ],
    ids=["grpo", "ppo", "sft"],
)
def test_nothing_is_said_of_a_run_that_learns(
    sets: Path, tokenizer: Tokenizer, train: Callable[[Path, Tokenizer], Signals]
) -> None:
    assert severities(train(sets, tokenizer)) == {}


@pytest.mark.parametrize("train", [group_run, ppo_run], ids=["grpo", "ppo"])
def test_a_constant_reward_is_named(sets: Path, tokenizer: Tokenizer, train: Callable[..., Signals]) -> None:
    assert severities(train(sets, tokenizer, equal)) == {"no_signal": Severity.PROBLEM}  # and not the critic, which has no choice


def test_a_length_hack_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    run = group_run(sets, tokenizer, length_hack, max_new_tokens=12)
    assert severities(run) == {"reward_hacked": Severity.PROBLEM, "length_cap": Severity.PROBLEM}
    (hacked, cap) = diagnose(run)
    assert "its term long (" in hacked.sentence and "finished" in hacked.sentence and "grpo.kl_coef" in hacked.advice
    assert "grpo.max_new_tokens (now 12)" in cap.advice and cap.evidence.key == "rollout/truncated_frac"


def test_a_policy_without_kl_that_runs_away_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    run = group_run(sets, tokenizer, noise(2), kl_coef=0.0, lr=0.05)
    assert severities(run)["kl_runaway"] is Severity.PROBLEM
    assert "grpo.kl_coef (now 0)" in diagnose(run)[0].advice
    with_kl = group_run(sets, tokenizer, noise(1), kl_coef=1.0, lr=1e-3)
    assert severities(with_kl) == {}


def test_a_policy_that_falls_to_one_answer_within_steps_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    """Then no step has a signal, and neither KL nor entropy are measured any more."""
    run = group_run(sets, tokenizer, noise_of_answers, kl_coef=0.0, lr=0.5)
    assert len(run.get("policy/entropy").values) < MIN_POINTS
    assert severities(run)["no_signal"] is Severity.PROBLEM
    assert "there was a signal at first" in diagnose(run)[0].advice


def test_a_policy_that_writes_one_answer_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    assert severities(group_run(sets, tokenizer, even, kl_coef=0.0, lr=0.04))["entropy_collapse"] is not None


def test_a_frozen_critic_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    run = ppo_run(sets, tokenizer, even, critic_lr=1e-12)
    assert severities(run)["dead_critic"] is Severity.PROBLEM
    (finding,) = (finding for finding in diagnose(run) if finding.name == "dead_critic")
    assert "ppo.critic_lr (now 1e-12)" in finding.advice and finding.evidence.last_step == run.get("reward/mean").steps[-1]


def test_data_that_are_too_few_are_named(sets: Path, tokenizer: Tokenizer) -> None:
    found = severities(sft_run(sets, tokenizer, epochs=60, lr=1e-2))
    assert {"overfitting", "data_too_small"} <= found.keys()


def test_a_rate_that_moves_nothing_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    assert severities(sft_run(sets, tokenizer, epochs=8, lr=1e-9)) == {"nothing_learned": Severity.PROBLEM}
    assert severities(group_run(sets, tokenizer, even, lr=1e-9)) == {"reward_flat": Severity.WARN}
