"""The loop of ppo over tiny real models, a real engine and real prompts, with rewards that a script decides."""

import math
from collections.abc import Sequence
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
    SpyUpdater,
    assert_bits_equal,
    assert_near,
    even,
    make_model,
    moments,
    prompts,
    row_logprobs,
    sets_fixture,
    snapshot,
    tokenizer_fixture,
    tokens_once,
    twin_adamw,
    twin_step,
)
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.errors import NumericsError
from pipeline.model.heads import ValueModel
from pipeline.model.packing import pack
from pipeline.params.schema import Ppo
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import StopReason, Trajectory
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.device import Device
from pipeline.training.ppo_loop import (
    Experience,
    PpoTask,
    estimate,
    gather_rows,
    last_token_rewards,
    mini_batches,
    ppo_step,
    train_ppo,
)
from pipeline.training.rollouts import MicroBatch, collect, total_steps
from pipeline.training.state import TrainState

RUN_KEYS = ROLLOUT_KEYS | {f"value/{name}" for name in ("loss", "explained_variance", "clip_frac", "lr", "grad_norm")}
tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(24))  # 18 + 6 prompts


def make_settings(**changes: Any) -> Ppo:
    defaults = {
        "batch_size": 6,
        "critic_lr": 2e-3,
        "mini_batch_size": 6,
        "updates_per_rollout": 1,
        "clip_eps": 0.2,
        "kl_estimator": "k3",
        "kl_in_reward": False,
        "entropy_coef": 0.0,
        "bootstrap_truncated": False,
        "value_clip_eps": 0.2,
        "vf_coef": 0.5,
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "early_stop_kl": 1e6,
        "critic_warmup_steps": 0,
    }
    return Ppo(**(SAMPLING | defaults | changes))


class Run(SamplingRun):
    """A task with what tests look at: both updaters and the trajectories it sampled."""

    def __init__(self, sets: Path, tokenizer: Tokenizer, settings: Ppo, *, score: Score = even, **changes: Any) -> None:
        super().__init__(sets, tokenizer, settings, **changes)
        self.critic = ValueModel.from_causal_lm(self.policy, seed=4)
        with torch.no_grad():
            self.critic.score.weight *= 5.0  # values that matter from the start
        steps = total_steps(settings, self.prompts)
        self.updater = SpyUpdater(self.policy, settings, total_steps=steps)
        self.critic_updater = SpyUpdater(self.critic, settings, total_steps=steps, lr=settings.critic_lr)
        updaters = {"policy": self.updater, "critic": self.critic_updater}
        state = TrainState({"policy": self.policy, "critic": self.critic}, updaters)
        self.task = PpoTask(**self.task_fields(state, score), critic=self.critic)

    def everything(self) -> dict[str, Tensor]:
        """Copies of all weights and moments."""
        parts = {"policy": snapshot(self.policy), "critic": snapshot(self.critic)}
        parts |= {"policy moments": moments(self.updater), "critic moments": moments(self.critic_updater)}
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def row_values(critic: ValueModel, trajectory: Trajectory) -> Tensor:
    """Values [L] before each sampled id, by one forward over this row alone."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.ids])
    return critic(ids[:, :-1])[0, len(trajectory.prompt_ids) - 1 :]


def twin_gae(reward: float, values: list[float], gamma: float, gae_lambda: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of one row, its reward at its last token and nothing after it."""
    advantages = [0.0] * len(values)
    for t in reversed(range(len(values))):
        last = t == len(values) - 1
        delta = (reward if last else gamma * values[t + 1]) - values[t]
        advantages[t] = delta + (0.0 if last else gamma * gae_lambda * advantages[t + 1])
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_a_step_is_the_papers_formula(sets: Path, tokenizer: Tokenizer) -> None:
    """Two passes over one rollout against a row-by-row twin of GAE, whitening, both losses and AdamW; ragged, cut, T = 0.6."""
    settings = make_settings(
        updates_per_rollout=2,
        lr=0.002,
        critic_lr=0.004,
        warmup_steps=0,
        kl_coef=0.3,
        clip_eps=0.05,
        value_clip_eps=0.05,
        vf_coef=0.7,
        max_rows=64,
        cache_gib=1.0,
        micro_batch_size=4,
    )
    run = Run(sets, tokenizer, settings)
    metrics, collected, row_advantages = ppo_step(run.task, settings, CPU, 0)
    (trajectories,) = run.trajectories
    assert len({t.num_sampled for t in trajectories}) > 1 and {t.stop for t in trajectories} == {
        StopReason.EOS,
        StopReason.LENGTH,
    }

    twin = make_model(tokenizer, sharpness=6.0)
    critic = ValueModel.from_causal_lm(twin, seed=4)
    with torch.no_grad():
        critic.score.weight *= 5.0
        old_values = [row_values(critic, t) for t in trajectories]
        known = torch.cat([row_logprobs(run.reference, t, 0.6) for t in trajectories])
    estimates = [
        twin_gae(scored.total, values.tolist(), 0.9, 0.8) for scored, values in zip(collected.scored, old_values, strict=True)
    ]
    flat = torch.tensor([a for advantages, _ in estimates for a in advantages], dtype=torch.float64)
    white = ((flat - flat.mean()) / (flat.var(correction=0) + 1e-8).sqrt()).float()
    returns = torch.tensor([value for _, row in estimates for value in row])
    old_logprobs = torch.tensor([logprob for t in trajectories for logprob in t.logprobs])
    before = torch.cat(old_values)
    lengths = [t.num_sampled for t in trajectories]
    torch.testing.assert_close(row_advantages, torch.stack([part.mean() for part in white.split(lengths)]), atol=1e-5, rtol=0)
    explained = 1 - float((returns - before).var(correction=0) / returns.var(correction=0))
    assert metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-5)

    optimizers, losses = (twin_adamw(twin, settings), twin_adamw(critic, settings)), []
    log_ratios, far = [], []
    for update in range(2):
        logprobs = torch.cat([row_logprobs(twin, t, 0.6) for t in trajectories])
        ratio = (logprobs - old_logprobs).exp()
        difference = known - logprobs
        tokens = -torch.minimum(ratio * white, ratio.clamp(0.95, 1.05) * white) + 0.3 * (difference.exp() - difference - 1)
        values = torch.cat([row_values(critic, t) for t in trajectories])
        clipped = before + (values - before).clamp(-0.05, 0.05)
        squares = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        policy_loss, value_loss = tokens.mean(), 0.5 * squares.mean()
        (policy_loss + 0.7 * value_loss).backward()
        losses.append((float(policy_loss.detach()), float(value_loss.detach())))
        log_ratios.append((logprobs - old_logprobs).detach())
        far.append(float(((values - before).abs() > 0.05).float().mean()))
        assert_near(run.updater.gradients[update], {name: p.grad.clone() for name, p in twin.named_parameters()}, 1e-5)
        assert_near(run.critic_updater.gradients[update], {name: p.grad.clone() for name, p in critic.named_parameters()}, 1e-5)
        twin_step(twin, optimizers[0], 0.002, 1.0)
        twin_step(critic, optimizers[1], 0.004, 1.0)
    # means over both passes; the first one's ratios are 1
    policy_loss, value_loss = (sum(pair) / 2 for pair in zip(*losses, strict=True))
    assert abs(losses[0][0] - losses[1][0]) > 1e-3 and abs(losses[0][1] - losses[1][1]) > 1e-3
    assert metrics["policy/loss"] == pytest.approx(policy_loss, abs=1e-5)
    assert metrics["value/loss"] == pytest.approx(value_loss, abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(policy_loss + 0.7 * value_loss, abs=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx(0.5 * float(torch.cat(log_ratios).square().mean()), rel=1e-3)
    assert metrics["policy/ratio_max"] == pytest.approx(float(torch.cat(log_ratios).exp().max()), rel=1e-4)
    assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-5) and metrics["policy/clip_frac"] > 0
    assert far[0] != far[1] and metrics["value/clip_frac"] == pytest.approx(sum(far) / 2)


def test_the_first_update_is_on_policy_despite_temperature_and_dropout(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings()
    run = Run(sets, tokenizer, settings, dropout=0.1)
    run.policy.train()  # as someone may have left them
    run.critic.train()
    metrics, _, _ = ppo_step(run.task, settings, CPU, 0)
    assert settings.temperature == 0.6 and not run.policy.training and not run.critic.training
    assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/clip_frac"] == 0 and metrics["rollout/logprob_diff_max"] < 1e-4
    assert abs(metrics["policy/ref_kl"]) < 1e-6 and abs(metrics["policy/ref_kl_k1"]) < 1e-6
    assert metrics["value/clip_frac"] == 0 and metrics["policy/entropy"] > 0.1


def test_rewards_stand_at_the_last_sampled_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    placed = last_token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 0]]


NOTHING_PACKED = pack([[0]], [[]], torch.device("cpu"))


def test_rows_are_found_again_in_other_micro_batches() -> None:
    def part(rows: list[int], values: list[list[float]]) -> Experience:
        width = len(values[0])
        empty = torch.zeros(len(rows), width)
        batch = MicroBatch(torch.tensor(rows), NOTHING_PACKED, empty.long(), empty, empty.bool())
        return Experience(batch, empty, empty, torch.tensor(values), empty)

    parts = [part([4, 1], [[1.0, 2.0], [3.0, 4.0]]), part([0, 7], [[5.0, 6.0, 7.0], [8.0, 9.0, 10.0]])]
    located = {4: (parts[0], 0), 1: (parts[0], 1), 0: (parts[1], 0), 7: (parts[1], 1)}
    wide = MicroBatch(torch.tensor([7, 4]), NOTHING_PACKED, *(torch.zeros(2, 4),) * 3)
    assert gather_rows(wide, located, "advantages").tolist() == [[8, 9, 10, 0], [1, 2, 0, 0]]
    narrow = MicroBatch(torch.tensor([1, 0]), NOTHING_PACKED, *(torch.zeros(2, 2),) * 3)
    assert gather_rows(narrow, located, "advantages").tolist() == [[3, 4], [5, 6]]


def test_advantages_are_whitened_over_the_whole_step(sets: Path, tokenizer: Tokenizer) -> None:
    """Not per micro-batch: those of a single row have means of their own."""
    settings = make_settings(micro_batch_size=1)
    run = Run(sets, tokenizer, settings)
    opened = run.task.prompts.batch(0, 0)
    collected = collect(opened, list(range(6)), run.task.rollout, even)
    experience, _ = estimate(run.task, settings, CPU, collected)
    assert len(experience) == 6
    flat = torch.cat([part.advantages[part.batch.loss_mask] for part in experience]).double()
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6) and float(flat.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert max(abs(float(part.advantages[part.batch.loss_mask].mean())) for part in experience) > 0.1
    assert all(not part.advantages[~part.batch.loss_mask].any() for part in experience)


def test_the_cut_into_micro_batches_changes_nothing(sets: Path, tokenizer: Tokenizer) -> None:
    runs, logged = [], []
    for size in (1, 4, 64):
        settings = make_settings(micro_batch_size=size, mini_batch_size=4, updates_per_rollout=2)
        run = Run(sets, tokenizer, settings)
        metrics, _, _ = ppo_step(run.task, settings, CPU, 0)
        runs.append(run)
        logged.append({name: value for name, value in metrics.items() if name.startswith(("policy/", "value/", "advantages/"))})
    for run, metrics in zip(runs[1:], logged[1:], strict=True):
        for mine, other in ((run.updater, runs[0].updater), (run.critic_updater, runs[0].critic_updater)):
            assert len(mine.gradients) == 4  # two mini-batches a pass
            assert_near(mine.gradients[0], other.gradients[0])
        assert metrics == pytest.approx(logged[0], abs=1e-4)


def test_mini_batches_use_every_row_once_a_pass(sets: Path, tokenizer: Tokenizer) -> None:
    """With rates too small to move anything, the gradients of a pass, weighted by their tokens, are that of the whole batch."""
    small, whole = (
        make_settings(mini_batch_size=size, updates_per_rollout=2, lr=1e-12, critic_lr=1e-12, kl_coef=0.0) for size in (4, 6)
    )
    cut, uncut = Run(sets, tokenizer, small), Run(sets, tokenizer, whole)
    metrics, _, _ = ppo_step(cut.task, small, CPU, 0)
    expected, _, _ = ppo_step(uncut.task, whole, CPU, 0)
    # so are the logged means: mini-batches weigh by their tokens, in gradient norms alike
    kept = [name for name in expected if name.startswith(("policy/", "value/", "train/loss")) and "grad_norm" not in name]
    assert len(kept) > 10 and {n: metrics[n] for n in kept} == pytest.approx({n: expected[n] for n in kept}, abs=1e-5)
    for key, updater in (("train/grad_norm", cut.updater), ("value/grad_norm", cut.critic_updater)):
        norms = [math.sqrt(sum(float(g.square().sum()) for g in gradients.values())) for gradients in updater.gradients]
        assert max(norms) - min(norms) > 1e-3 and metrics[key] == pytest.approx(sum(norms) / 4, rel=1e-5)
    lengths = [t.num_sampled for t in cut.trajectories[0]]
    passes, name = [], "model.embed_tokens.weight"
    for first, second in ((0, 1), (2, 3)):
        total = sum(lengths)
        left, right, both = (
            cut.updater.gradients[first][name],
            cut.updater.gradients[second][name],
            uncut.updater.gradients[0][name],
        )
        # left * share + right * (1 - share) = both has one solution for the share of tokens in the first mini-batch
        share = float(((both - right) * (left - right)).sum() / (left - right).square().sum())
        torch.testing.assert_close(left * share + right * (1 - share), both, atol=1e-5, rtol=0)
        assert share * total == pytest.approx(round(share * total), abs=1e-2)
        passes.append(left)
    assert not torch.allclose(passes[0], passes[1], atol=1e-4)  # another order in the second pass


def test_both_models_routers_are_balanced(sets: Path, tokenizer: Tokenizer) -> None:
    """Two mini-batches of two micro-batches each, of ragged rows: the balance losses of policy and critic by hand."""
    settings = make_settings(mini_batch_size=4, micro_batch_size=2, lr=1e-12, critic_lr=1e-12)
    logged, gates = [], []
    for coef in (0.0, 5.0):
        run = Run(sets, tokenizer, settings, **(MOE | {"router_aux_loss_coef": coef}))
        spies = RouterSpy(run.policy), RouterSpy(run.critic)
        metrics, _, _ = ppo_step(run.task, settings, CPU, 0)
        (collected,) = run.trajectories
        aux, loads = 0.0, []
        forward = [0, 3]  # the critic's first three forwards gave the old values
        for chosen in mini_batches(range(6), settings, 0):
            num_tokens = sum(collected[row].num_sampled for row in chosen)
            for start in range(0, len(chosen), 2):
                part = chosen[start : start + 2]
                visible = tokens_once([collected[row] for row in part])
                for which, spy in enumerate(spies):
                    aux += coef * spy.aux_loss(forward[which], visible) * len(part) / len(chosen) * num_tokens
                    loads.append(spy.load_max(forward[which], visible))
                    forward[which] += 1
        assert [len(spy.forwards) for spy in spies] == forward == [3, 6]
        assert metrics["moe/aux_loss"] == pytest.approx(aux / sum(t.num_sampled for t in collected), rel=1e-5, abs=1e-9)
        assert metrics["moe/expert_load_max"] == pytest.approx(max(loads), abs=1e-6)
        total = metrics["policy/loss"] + settings.vf_coef * metrics["value/loss"] + metrics["moe/aux_loss"]
        assert metrics["train/loss"] == pytest.approx(total, abs=1e-5)
        logged.append({name: metrics[name] for name in ("policy/loss", "value/loss")})
        gates.append([u.gradients[0]["model.layers.0.mlp.gate.weight"] for u in (run.updater, run.critic_updater)])
    assert logged[0] == pytest.approx(logged[1], abs=1e-6)  # both without the balance loss
    assert all(float((gates[0][which] - gates[1][which]).abs().max()) > 1e-3 for which in (0, 1))


def test_an_early_stop_leaves_everything_as_it_is(sets: Path, tokenizer: Tokenizer) -> None:
    """The second pass sees a KL beyond the threshold: the step ends as if it had never been asked for."""
    single, stopping = (make_settings(updates_per_rollout=n, early_stop_kl=1e-8, epochs=2, lr=0.01) for n in (1, 5))
    one, stopped = Run(sets, tokenizer, single), Run(sets, tokenizer, stopping)
    for step in range(3):
        ppo_step(one.task, single, CPU, step)
        metrics, _, _ = ppo_step(stopped.task, stopping, CPU, step)
        assert metrics["policy/approx_kl_at_stop"] > 1e-8 > metrics["policy/approx_kl"]  # of what was applied
        assert metrics["train/early_stops"] == step + 1
        assert metrics["train/lr"] == pytest.approx(stopped.updater.lr_at(step))
        assert_bits_equal(stopped.everything(), one.everything())
        assert len(stopped.updater.gradients) == len(stopped.critic_updater.gradients) == step + 1
        assert all(p.grad is None for p in [*stopped.policy.parameters(), *stopped.critic.parameters()])

    parts = make_settings(updates_per_rollout=5, early_stop_kl=1e-8, mini_batch_size=2, lr=0.01)
    stopped = Run(sets, tokenizer, parts)
    ppo_step(stopped.task, parts, CPU, 0)
    assert len(stopped.updater.gradients) == 1  # not even the rest of the pass


def test_a_stop_before_anything_was_applied(sets: Path, tokenizer: Tokenizer) -> None:
    """A sampler that disagrees with the trainer: the step says so, and leaves everything as it is."""
    settings = make_settings(early_stop_kl=0.01)
    run = Run(sets, tokenizer, settings)
    sample = run.task.rollout

    def other(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        trajectories = sample(tasks, keys)
        for trajectory in trajectories:
            trajectory.logprobs = [logprob - 0.5 for logprob in trajectory.logprobs]
        return trajectories

    run.task.rollout = other
    before = run.everything()
    metrics, _, _ = ppo_step(run.task, settings, CPU, 0)
    assert_bits_equal(run.everything(), before)
    assert metrics["policy/approx_kl_at_stop"] == pytest.approx(0.125, abs=1e-4) and "policy/approx_kl" not in metrics
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["policy/ratio_first_update"] == pytest.approx(math.exp(0.5), abs=1e-3)


def test_critic_warm_up_moves_the_critic_alone(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(critic_warmup_steps=2, epochs=1, updates_per_rollout=2)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder(save_at=[1, 2, 3])
    weights, critic = snapshot(run.policy), snapshot(run.critic)
    for step in range(2):
        metrics, _, _ = ppo_step(run.task, settings, CPU, step)
        assert_bits_equal(snapshot(run.policy), weights)
        assert moments(run.updater) == {} and "train/lr" not in metrics and metrics["value/lr"] > 0
        after = snapshot(run.critic)
        assert any(not torch.equal(after[name], critic[name]) for name in after)
        critic = after
        assert all(p.grad is None for p in run.policy.parameters())
        assert metrics["policy/approx_kl"] < 1e-10
    run.task.state.step = 2
    train_ppo(run.task, settings, CPU, recorder)
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in snapshot(run.policy).items())
    assert recorder.at(3)["train/lr"] == pytest.approx(run.updater.lr_at(2))


def test_metrics_say_what_happened(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=2, batch_size=7, mini_batch_size=7)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()
    reference = snapshot(run.reference)
    summary = train_ppo(run.task, settings, CPU, recorder)
    assert [step for step, _ in recorder.lines] == [1, 2, 3, 4, 5, 6] and len(run.trajectories[2]) == 4  # 18 prompts: 7, 7, 4
    for step in range(1, 7):
        metrics = recorder.at(step)
        assert set(metrics) == RUN_KEYS and all(map(math.isfinite, metrics.values()))
        rewards = [s.total for s in even([], run.trajectories[step - 1])]
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics["advantages/mean"] == pytest.approx(0, abs=1e-5) and metrics["advantages/std"] == pytest.approx(
            1, abs=1e-4
        )
        assert metrics["policy/ratio_first_update"] == pytest.approx(1, abs=1e-4)
        assert metrics["rollout/logprob_diff_max"] < 1e-4
        tokens = sum(t.num_sampled for t in run.trajectories[step - 1])
        assert metrics["train/tokens_per_s"] == pytest.approx(tokens / metrics["time/step_s"])
        figures = {"loss": metrics["train/loss"], "reward": metrics["reward/mean"], "tokens_per_s": metrics["train/tokens_per_s"]}
        assert recorder.shown[step - 1] == (step, figures)
    assert abs(recorder.at(1)["policy/ref_kl"]) < 1e-6 < recorder.at(6)["policy/ref_kl"]
    assert_bits_equal(snapshot(run.reference), reference)
    assert summary["train/tokens_seen"] == sum(t.num_sampled for part in run.trajectories for t in part)
    assert summary["train/early_stops"] == 0 and summary["train/steps"] == 6
    assert [step for step, _ in recorder.samples] == [1, 3, 5, 6]
    assert [row["completion"] for row in recorder.samples[-1][1]] == [tokenizer.decode_all(t.ids) for t in run.trajectories[-1]]


def test_rewarded_tokens_become_more_probable(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=8, kl_coef=0.0, lr=5e-3, updates_per_rollout=2, max_new_tokens=2, gamma=1.0)
    run = Run(sets, tokenizer, settings)
    opened = [prompt for index in range(3) for prompt in run.task.prompts.batch(0, index)]

    def even_first() -> float:
        """Probability of an even first id, mean over the prompts."""
        with torch.no_grad():
            rows = [run.policy(torch.tensor([prompt.prompt_ids]))[0, -1] for prompt in opened]
        return float((torch.stack(rows) / settings.temperature).softmax(dim=-1)[:, ::2].sum(dim=1).mean())

    def score(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        hits = [float(trajectory.ids[0] % 2 == 0) for trajectory in trajectories]
        return [Scored(hit, {"hit": hit}, hit > 0) for hit in hits]

    before, run.task.score = even_first(), score
    train_ppo(run.task, settings, CPU, MemoryRecorder())
    assert before < 0.7 and even_first() > before + 0.2


def test_the_critic_learns_what_the_prompt_decides(sets: Path, tokenizer: Tokenizer) -> None:
    def by_prompt(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        rewards = [1.0 if task.open_thinking else -1.0 for task in tasks]
        return [Scored(reward, {"prompt": reward}, reward > 0) for reward in rewards]

    settings = make_settings(epochs=6, critic_warmup_steps=99, critic_lr=3e-3, updates_per_rollout=3, gamma=1.0, gae_lambda=0.95)
    run, recorder = Run(sets, tokenizer, settings, score=by_prompt), MemoryRecorder()
    train_ppo(run.task, settings, CPU, recorder)
    explained = [recorder.at(step)["value/explained_variance"] for step in range(1, 19)]
    assert sum(explained[:2]) / 2 < 0.3 and sum(explained[-6:]) / 6 > 0.7


def test_rollouts_without_a_token_do_no_harm(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(thinking_ratio=0.0, micro_batch_size=2)
    lengths = sorted(len(prompt.prompt_ids) for prompt in Run(sets, tokenizer, settings).task.prompts.batch(0, 0))
    some = Run(sets, tokenizer, settings, max_total_len=lengths[-1])
    metrics, _, row_advantages = ppo_step(some.task, settings, CPU, 0)
    empty = [not t.num_sampled for t in some.trajectories[0]]
    assert 0 < sum(empty) < 6 and not row_advantages[torch.tensor(empty)].any()
    assert all(map(math.isfinite, metrics.values())) and len(some.updater.gradients) == 1

    none = Run(sets, tokenizer, settings, max_total_len=1)
    before, recorder = none.everything(), MemoryRecorder()
    train_ppo(none.task, settings, CPU, recorder)
    assert_bits_equal(none.everything(), before)
    assert all(map(math.isfinite, recorder.at(3).values())) and recorder.at(3)["stop/context"] == 1


def test_rewards_that_are_no_numbers_are_skipped_then_refused(sets: Path, tokenizer: Tokenizer) -> None:
    def broken(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return [Scored(math.nan, {}, False) for _ in trajectories]

    settings = make_settings(epochs=2)
    run = Run(sets, tokenizer, settings, score=broken)
    before = run.everything()
    with pytest.raises(NumericsError, match=r"last at step 5 \(rows \["):
        train_ppo(run.task, settings, CPU, MemoryRecorder())
    assert_bits_equal(run.everything(), before)


@pytest.mark.parametrize("what", ["weights", "logits"])
def test_a_policy_that_overflows_in_the_end_is_refused(sets: Path, tokenizer: Tokenizer, what: str) -> None:
    settings = make_settings(epochs=1)
    run = Run(sets, tokenizer, settings)
    last = total_steps(settings, run.prompts)
    recorder = SpoilingRecorder(run.policy, last, math.nan if what == "weights" else 3e38)
    with pytest.raises(NumericsError, match=rf"after {last} steps the policy.*(tensors|logits) are not finite"):
        train_ppo(run.task, settings, CPU, recorder)


def test_a_killed_run_ends_with_the_same_bits(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(
        epochs=2, updates_per_rollout=2, mini_batch_size=4, critic_warmup_steps=1, early_stop_kl=0.5, lr=0.01
    )
    whole, straight = Run(sets, tokenizer, settings), MemoryRecorder()
    expected = train_ppo(whole.task, settings, CPU, straight)
    broken, first = Run(sets, tokenizer, settings), MemoryRecorder(save_at=[2], kill_at=4)
    with pytest.raises(Killed):
        train_ppo(broken.task, settings, CPU, first)
    torch.manual_seed(999)  # no generator's state may matter
    again, second = Run(sets, tokenizer, settings), MemoryRecorder(first.saved)
    assert train_ppo(again.task, settings, CPU, second) == expected
    assert [step for step, _ in second.lines] == [3, 4, 5, 6]
    assert_bits_equal(again.everything(), whole.everything())
    assert second.samples == straight.samples[-3:]


def test_equal_rewards_move_the_critic_alone_and_are_said(sets: Path, tokenizer: Tokenizer) -> None:
    """Whitening would turn what an untrained critic guesses into advantages of unit variance."""
    settings = make_settings(epochs=2, kl_coef=0.0)
    run, recorder = Run(sets, tokenizer, settings), MemoryRecorder()
    ppo_step(run.task, settings, CPU, 0)  # AdamW has a memory before the rewards run dry
    run.task.score = lambda _, trajectories: [Scored(0.7, {}, True)] * len(trajectories)
    run.task.state.step = 1
    before = run.everything()
    summary = train_ppo(run.task, settings, CPU, recorder)
    after = run.everything()
    of_policy = [{k: v for k, v in side.items() if k.startswith(("policy/", "policy moments/"))} for side in (before, after)]
    assert any(name.startswith("policy moments/") for name in of_policy[0])
    assert_bits_equal(*of_policy)
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("critic/"))
    assert len(run.updater.gradients) == 1 < len(run.critic_updater.gradients)
    assert recorder.at(2)["advantages/abs_max"] == 0.0 and recorder.at(2)["reward/std"] == 0.0
    assert run.task.state.step == 6 and summary["train/steps"] == 6
    assert [warning.split()[0] for warning in run.warnings] == ["5"] and summary["train/zero_signal_steps"] == 5


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_a_policy_that_is_the_reference_has_no_kl_to_learn_from(
    sets: Path, tokenizer: Tokenizer, kl_in_reward: bool, dtype: Any
) -> None:
    """Rewards equal up to rounding: neither whitening nor AdamW may turn what rounding leaves of a KL into a step."""
    settings = make_settings(kl_coef=0.5, kl_in_reward=kl_in_reward, mini_batch_size=2)
    run = Run(sets, tokenizer, settings, autocast_dtype=dtype, sharpness=2.0)
    run.task.score = lambda _, trajectories: [Scored(0.7 + 3e-7 * (row % 2), {}, True) for row, _ in enumerate(trajectories)]
    device = Device(torch.device("cpu"), dtype, gradient_checkpointing=False)
    before = snapshot(run.policy)
    metrics, _, row_advantages = ppo_step(run.task, settings, device, 0)
    assert_bits_equal(snapshot(run.policy), before)
    assert metrics["advantages/abs_max"] == 0 and not row_advantages.any() and metrics["train/zero_signal_steps"] == 1
    assert not run.updater.gradients and run.critic_updater.gradients

    with torch.no_grad():
        run.policy.model.norm.weight += 0.1
    metrics, _, row_advantages = ppo_step(run.task, settings, device, 0)
    assert bool(row_advantages.any()) == kl_in_reward and metrics["train/zero_signal_steps"] == 2 - kl_in_reward
    assert len(run.updater.gradients) == 3


def test_kl_may_be_paid_in_the_reward(sets: Path, tokenizer: Tokenizer) -> None:
    """Returns with gamma = lambda = 1 and a critic of zeros are what is still to come: reward minus the KL of later tokens."""
    settings = make_settings(kl_in_reward=True, kl_coef=0.3, gamma=1.0, gae_lambda=1.0)
    run = Run(sets, tokenizer, settings)
    with torch.no_grad():
        run.critic.score.weight.zero_()
        for parameter in run.reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    prompts = run.prompts.batch(0, 0)
    collected = collect(prompts, list(range(len(prompts))), run.task.rollout, run.task.score)
    for part in estimate(run.task, settings, CPU, collected)[0]:
        for place, row in enumerate(part.batch.rows.tolist()):
            trajectory = collected.trajectories[row]
            known = row_logprobs(run.reference, trajectory, settings.temperature).detach()
            penalties = [0.3 * (old - float(ref)) for old, ref in zip(trajectory.logprobs, known, strict=True)]
            expected = [collected.scored[row].total - sum(penalties[t:]) for t in range(len(penalties))]
            assert part.returns[place][part.batch.loss_mask[place]].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_cut_completion_may_go_on_with_the_critics_value(sets: Path, tokenizer: Tokenizer) -> None:
    plain, bootstrapped = (make_settings(bootstrap_truncated=value, gae_lambda=1.0, gamma=0.9) for value in (False, True))
    run = Run(sets, tokenizer, plain)
    run.critic.eval()
    prompts = run.prompts.batch(0, 0)
    collected = collect(prompts, list(range(len(prompts))), run.task.rollout, run.task.score)
    returns = {}
    for settings in (plain, bootstrapped):
        for part in estimate(run.task, settings, CPU, collected)[0]:
            for place, row in enumerate(part.batch.rows.tolist()):
                returns[settings.bootstrap_truncated, row] = part.returns[place][part.batch.loss_mask[place]]
    cut = [t.truncated for t in collected.trajectories]
    assert any(cut) and not all(cut)
    for row, trajectory in enumerate(collected.trajectories):
        with torch.no_grad():
            after = float(run.critic(torch.tensor([trajectory.prompt_ids + trajectory.ids]))[0, -1]) if cut[row] else 0.0
        steps = torch.arange(len(trajectory.ids), 0, -1)
        # the value after the last token, discounted once per token on the way
        torch.testing.assert_close(returns[True, row], returns[False, row] + 0.9**steps * after, atol=1e-5, rtol=1e-5)
