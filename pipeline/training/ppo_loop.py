"""The loop of ppo: one completion per prompt, a critic, GAE, several clipped passes with a KL stop (arXiv:1707.06347)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.maths.advantages import whiten
from pipeline.maths.metrics import combine
from pipeline.maths.policy import ppo_policy_loss
from pipeline.maths.value import explained_variance, gae, value_loss
from pipeline.model.heads import ValueModel
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Ppo
from pipeline.training.device import Device
from pipeline.training.rollouts import (
    Collected,
    MicroBatch,
    Prompts,
    Rollout,
    Scorer,
    collect,
    describe,
    micro_batches,
    rollout_metrics,
    sample_rows,
    sampled_logprobs,
    without_dropout,
)
from pipeline.training.state import Recorder, TrainState, run_steps
from pipeline.training.updater import seed_for


@dataclass(slots=True)
class PpoTask:
    """Everything the ppo stage gives to the loop; updaters are named `policy` and `critic`."""

    state: TrainState
    policy: CausalLM
    critic: ValueModel
    reference: CausalLM
    prompts: Prompts
    rollout: Rollout
    score: Scorer
    decode: Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Experience:
    """A rollout's micro-batch with what was computed before the first update; all [B, T]."""

    batch: MicroBatch
    ref_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


def total_steps(settings: Ppo, prompts: Prompts) -> int:
    """Rollouts of the whole run: all epochs, or `max_steps` where that is less."""
    steps = settings.epochs * prompts.batches_per_epoch
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def train_ppo(task: PpoTask, settings: Ppo, device: Device, recorder: Recorder) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps."""
    steps = total_steps(settings, task.prompts)
    window = max(1, steps // 10)

    def one_step(step: int) -> dict[str, float]:
        metrics, collected, advantages = ppo_step(task, settings, device, step)
        if step % settings.sample_every == 0 or step + 1 == steps:
            recorder.log_samples(
                step + 1, [{"step": step + 1, **row} for row in sample_rows(collected, advantages, task.decode, 16)]
            )
        task.state.average_tail(metrics, step=step, first=steps - window)
        return metrics

    run_steps(task.state, recorder, steps, one_step)
    return {
        **task.state.results,
        "train/steps": float(task.state.step),
        "train/tokens_seen": task.state.counters.get("tokens_seen", 0.0),
        "train/skipped_steps": float(sum(u.skipped for u in task.state.updaters.values())),
        "train/early_stops": task.state.counters.get("early_stops", 0.0),
    }


def ppo_step(task: PpoTask, settings: Ppo, device: Device, step: int) -> tuple[dict[str, float], Collected, Tensor]:
    """One rollout of `batch_size` prompts and up to `updates_per_rollout` passes over it.

    Returns:
        Metrics, the rollout, and per trajectory [rows] the mean advantage over its tokens (for the sample table).
    """
    started = time.perf_counter()
    epoch, index = divmod(step, task.prompts.batches_per_epoch)
    prompts = task.prompts.batch(epoch, index)
    keys = [seed_for(settings.seed, "rollout", step, place) for place in range(len(prompts))]
    collected = collect(prompts, keys, task.rollout, task.score)
    without_dropout(task.policy)
    task.critic.eval()
    experience = estimate(task, settings, device, collected)
    updated = time.perf_counter()
    metrics = rollout_metrics(collected) | advantage_metrics(experience)
    metrics |= update_both(task, settings, device, step, collected, experience)
    metrics |= {
        "train/tokens_seen": task.state.count("tokens_seen", sum(t.num_sampled for t in collected.trajectories)),
        "time/update_s": time.perf_counter() - updated,
        "time/step_s": time.perf_counter() - started,
        "memory/peak_bytes": float(device.peak_memory_bytes()),
    }
    row_advantages = torch.zeros(len(prompts))
    for part in experience:
        mean = part.advantages.sum(dim=1) / part.batch.loss_mask.sum(dim=1).clamp(min=1)
        row_advantages[part.batch.rows] = mean.cpu()
    return metrics, collected, row_advantages


@torch.no_grad()
def estimate(task: PpoTask, settings: Ppo, device: Device, collected: Collected) -> list[Experience]:
    """Old values, reference logprobs, GAE, and advantages whitened over the whole step.

    A completion cut at its length limit ends like any other, with a value of 0 after its last token: there is no later
    reward, and the term `unfinished` already says what being cut is worth.
    """
    trajectories = collected.trajectories
    experience = []
    for batch in micro_batches(trajectories, range(len(trajectories)), settings.micro_batch_size, device):
        reference, _ = sampled_logprobs(task.reference, batch, settings.temperature, device)
        with device.autocast():
            values = task.critic(batch.input_ids).float()
        rewards = last_token_rewards(collected.rewards[batch.rows].to(values.device), batch.loss_mask)
        advantages, returns = gae(rewards, values, batch.loss_mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
        experience.append(Experience(batch, reference, values, advantages, returns))
    if experience:
        flat = torch.cat([part.advantages[part.batch.loss_mask] for part in experience])
        white = whiten(flat[None], torch.ones_like(flat[None], dtype=torch.bool))[0]
        for part, values in zip(experience, white.split([int(p.batch.loss_mask.sum()) for p in experience]), strict=True):
            part.advantages = torch.zeros_like(part.advantages).masked_scatter(part.batch.loss_mask, values)
    return experience


def last_token_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """[B] rewards placed at each row's last sampled token, [B, T], 0 elsewhere."""
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = torch.where(loss_mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, rewards[:, None], 0.0)


def advantage_metrics(experience: Sequence[Experience]) -> dict[str, float]:
    """Moments of the whitened advantages and the critic's explained variance over the step."""
    if not experience:
        return {}
    masks = [part.batch.loss_mask for part in experience]
    advantages, values, returns = (
        torch.cat([getattr(part, name)[mask] for part, mask in zip(experience, masks, strict=True)])[None]
        for name in ("advantages", "old_values", "returns")
    )
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/std": float(advantages.std(unbiased=False)),
        "advantages/abs_max": float(advantages.abs().max()),
        "value/explained_variance": explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)),
    }


def update_both(
    task: PpoTask, settings: Ppo, device: Device, step: int, collected: Collected, experience: Sequence[Experience]
) -> dict[str, float]:
    """Passes over random mini-batches; a mini-batch beyond `early_stop_kl` ends the step, leaving everything as it is.

    During the first `critic_warmup_steps` steps only the critic moves: advantages of an untrained critic are noise.
    """
    rows = [int(row) for part in experience for row in part.batch.rows]
    located = {int(row): (part, place) for part in experience for place, row in enumerate(part.batch.rows)}
    metrics: dict[str, float] = {}
    updates = 0
    for epoch in range(settings.updates_per_rollout):
        generator = torch.Generator().manual_seed(seed_for(settings.seed, "minibatch", step, epoch))
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order), settings.mini_batch_size):
            chosen = [rows[place] for place in order[start : start + settings.mini_batch_size]]
            measured = update_mini_batch(task, settings, device, step, collected, chosen, located)
            if measured["policy/approx_kl"] > settings.early_stop_kl:
                for updater in task.state.updaters.values():
                    updater.discard()
                stops = task.state.count("early_stops", 1)
                return metrics | {"policy/approx_kl": measured["policy/approx_kl"], "train/early_stops": stops}
            for name, updater in task.state.updaters.items():
                if name == "policy" and step < settings.critic_warmup_steps:
                    updater.discard()
                    continue
                done = updater.update(step, context=f"rows {chosen[:8]} of the rollout")
                measured |= {f"{'train' if name == 'policy' else 'value'}/lr": done.lr}
                measured |= {f"{'train' if name == 'policy' else 'value'}/grad_norm": done.grad_norm}
            first = {name: measured.pop(name) for name in ("policy/ratio_first_update", "rollout/logprob_diff_max")}
            if not updates:
                metrics |= first
            metrics |= measured
            updates += 1
    metrics["train/skipped_steps"] = float(sum(u.skipped for u in task.state.updaters.values()))
    return metrics


def update_mini_batch(
    task: PpoTask,
    settings: Ppo,
    device: Device,
    step: int,
    collected: Collected,
    chosen: Sequence[int],
    located: dict[int, tuple[Experience, int]],
) -> dict[str, float]:
    """Accumulates the gradients of one mini-batch, normalised over its tokens; returns its metrics, moves nothing."""
    num_tokens = sum(collected.trajectories[row].num_sampled for row in chosen)
    policy_parts, value_parts = [], []
    losses = {"policy": 0.0, "value": 0.0}
    for batch in micro_batches(collected.trajectories, chosen, settings.micro_batch_size, device):
        known = [gather_rows(batch, located, name) for name in ("ref_logprobs", "advantages", "old_values", "returns")]
        reference, advantages, old_values, returns = known
        logprobs, entropy = sampled_logprobs(task.policy, batch, settings.temperature, device)
        policy_loss, part = ppo_policy_loss(
            logprobs,
            batch.old_logprobs,
            reference,
            advantages,
            batch.loss_mask,
            clip_eps=settings.clip_eps,
            kl_coef=settings.kl_coef,
            num_tokens=num_tokens,
        )
        with device.autocast():
            values = task.critic(batch.input_ids).float()
        critic_loss, value_part = value_loss(
            values, old_values, returns, batch.loss_mask, value_clip_eps=settings.value_clip_eps, num_tokens=num_tokens
        )
        loss = policy_loss + settings.vf_coef * critic_loss
        if task.policy.config.use_moe:
            loss = loss + task.policy.router_aux_loss() * (len(batch.rows) / len(chosen))
        loss.backward()
        losses["policy"] += float(policy_loss.detach())
        losses["value"] += float(critic_loss.detach())
        policy_parts.append(part | describe(logprobs, entropy, batch))
        value_parts.append(value_part)
    measured = {f"policy/{name}": value for name, value in combine(policy_parts).items()}
    measured |= {f"value/{name}": value for name, value in combine(value_parts).items()}
    total = losses["policy"] + settings.vf_coef * losses["value"]
    measured["policy/ratio_first_update"] = measured.pop("policy/ratio")
    measured["rollout/logprob_diff_max"] = measured.pop("policy/logprob_diff_max")
    return measured | {"policy/loss": losses["policy"], "value/loss": losses["value"], "train/loss": total}


def gather_rows(batch: MicroBatch, located: dict[int, tuple[Experience, int]], name: str) -> Tensor:
    """The rows of an `Experience` field that `batch` holds, cut or zero-padded to its length, [B, T]."""
    width = batch.labels.shape[1]
    gathered = batch.old_logprobs.new_zeros(len(batch.rows), width)
    for place, row in enumerate(batch.rows.tolist()):
        part, source = located[row]
        values = getattr(part, name)[source][:width]
        gathered[place, : len(values)] = values
    return gathered
