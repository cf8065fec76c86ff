"""The loop of grpo and agent: sample a group per prompt, compare within the group, update (arXiv:2402.03300)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.maths.advantages import group_advantages
from pipeline.maths.metrics import combine
from pipeline.maths.policy import group_policy_loss
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Group
from pipeline.training.device import Device
from pipeline.training.rollouts import (
    Collected,
    MicroBatch,
    Prompts,
    Rollout,
    Scorer,
    collect,
    describe,
    group_metrics,
    micro_batches,
    rollout_metrics,
    sample_rows,
    sampled_logprobs,
    tool_metrics,
    without_dropout,
)
from pipeline.training.state import Recorder, TrainState, run_steps
from pipeline.training.updater import seed_for

WARN_AFTER_ZERO_SIGNAL = 5


@dataclass(slots=True)
class GroupTask:
    """Everything a group stage gives to the loop; `policy` is the module that `state` trains and `rollout` samples from."""

    state: TrainState
    policy: CausalLM
    reference: CausalLM
    prompts: Prompts
    rollout: Rollout
    score: Scorer
    decode: Callable[[Sequence[int]], str]
    warn: Callable[[str], None]


def total_steps(settings: Group, prompts: Prompts) -> int:
    """Rollouts of the whole run: all epochs, or `max_steps` where that is less."""
    steps = settings.epochs * prompts.batches_per_epoch
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def train_group(task: GroupTask, settings: Group, device: Device, recorder: Recorder) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps."""
    steps = total_steps(settings, task.prompts)
    window = max(1, steps // 10)

    def one_step(step: int) -> dict[str, float]:
        metrics, collected, advantages = group_step(task, settings, device, step)
        if step % settings.sample_every == 0 or step + 1 == steps:
            rows = sample_rows(collected, advantages, task.decode, 2 * settings.group_size)
            recorder.log_samples(step + 1, [{"step": step + 1, **row} for row in rows])
        task.state.average_tail(metrics, step=step, first=steps - window)
        return metrics

    run_steps(task.state, recorder, steps, one_step)
    return {
        **task.state.results,
        "train/steps": float(task.state.step),
        "train/tokens_seen": task.state.counters.get("tokens_seen", 0.0),
        "train/skipped_steps": float(sum(u.skipped for u in task.state.updaters.values())),
        "train/zero_signal_steps": task.state.counters.get("zero_signal_steps", 0.0),
    }


def group_step(task: GroupTask, settings: Group, device: Device, step: int) -> tuple[dict[str, float], Collected, Tensor]:
    """One collect-and-update round over `batch_size` prompts x `group_size` completions."""
    started = time.perf_counter()
    epoch, index = divmod(step, task.prompts.batches_per_epoch)
    prompts = task.prompts.batch(epoch, index)
    tasks = [prompt for prompt in prompts for _ in range(settings.group_size)]
    keys = [
        seed_for(settings.seed, "rollout", step, place, member)
        for place in range(len(prompts))
        for member in range(settings.group_size)
    ]
    collected = collect(tasks, keys, task.rollout, task.score)
    rewards = collected.rewards.view(-1, settings.group_size)
    good = torch.tensor([s.good for s in collected.scored]).view(-1, settings.group_size)
    advantages = group_advantages(collected.rewards, settings.group_size)
    metrics = rollout_metrics(collected) | group_metrics(rewards, good)
    if any(prompt.tools for prompt in prompts):
        metrics |= tool_metrics(collected)
    updated = time.perf_counter()
    metrics |= update_policy(task, settings, device, step, collected, advantages, prompts)
    metrics |= {
        "advantages/mean": float(advantages.mean()),
        "advantages/std": float(advantages.std(unbiased=False)),
        "advantages/abs_max": float(advantages.abs().max()),
        "train/tokens_seen": task.state.count("tokens_seen", sum(t.num_sampled for t in collected.trajectories)),
        "time/update_s": time.perf_counter() - updated,
        "time/step_s": time.perf_counter() - started,
        "memory/peak_bytes": float(device.peak_memory_bytes()),
    }
    return metrics, collected, advantages


def update_policy(
    task: GroupTask,
    settings: Group,
    device: Device,
    step: int,
    collected: Collected,
    advantages: Tensor,
    prompts: list[PromptTask],
) -> dict[str, float]:
    """`updates_per_rollout` optimizer steps on one rollout; a rollout without any signal leaves weights and moments untouched."""
    (updater,) = task.state.updaters.values()
    without_dropout(task.policy)
    trajectories = collected.trajectories
    batches = list(micro_batches(trajectories, range(len(trajectories)), settings.micro_batch_size, device))
    num_sequences = sum(len(batch.rows) for batch in batches)
    if not num_sequences or (settings.kl_coef == 0 and not bool(advantages.any())):
        zero_steps = task.state.count("zero_signal_steps", 1)
        in_a_row = task.state.count("zero_signal_in_a_row", 1)
        if in_a_row % WARN_AFTER_ZERO_SIGNAL == 0:
            task.warn(f"{in_a_row:.0f} steps in a row without any difference in reward inside a group: nothing is learned")
        return {"train/zero_signal_steps": zero_steps, "train/lr": updater.lr_at(step)}
    task.state.counters["zero_signal_in_a_row"] = 0.0
    with torch.no_grad():
        references = [sampled_logprobs(task.reference, batch, settings.temperature, device)[0] for batch in batches]
    metrics: dict[str, float] = {}
    for update in range(settings.updates_per_rollout):
        parts, loss = [], 0.0
        for batch, reference in zip(batches, references, strict=True):
            share, part = group_micro_loss(task.policy, batch, reference, advantages, settings, device, num_sequences)
            share.backward()
            loss += float(share.detach())
            parts.append(part)
        done = updater.update(step, context=f"prompt rows {[prompt.row for prompt in prompts]}")
        measured = {f"policy/{name}": value for name, value in combine(parts).items()}
        logprob_diff_max = measured.pop("policy/logprob_diff_max")
        ratio = measured.pop("policy/ratio")
        if update == 0:
            metrics |= {"policy/ratio_first_update": ratio, "rollout/logprob_diff_max": logprob_diff_max}
        metrics |= measured | {"policy/loss": loss, "train/loss": loss, "train/lr": done.lr, "train/grad_norm": done.grad_norm}
    metrics["train/skipped_steps"] = float(updater.skipped)
    return metrics


def group_micro_loss(
    policy: CausalLM,
    batch: MicroBatch,
    ref_logprobs: Tensor,
    advantages: Tensor,
    settings: Group,
    device: Device,
    num_sequences: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the step's loss, and its sums of metrics."""
    logprobs, entropy = sampled_logprobs(policy, batch, settings.temperature, device)
    loss, part = group_policy_loss(
        logprobs,
        batch.old_logprobs,
        ref_logprobs,
        advantages[batch.rows].to(logprobs.device),
        batch.loss_mask,
        loss=settings.loss,
        clip_eps_low=settings.clip_eps_low,
        clip_eps_high=settings.clip_eps_high,
        ratio_cap=settings.ratio_cap,
        kl_coef=settings.kl_coef,
        num_sequences=num_sequences,
    )
    if policy.config.use_moe:
        loss = loss + policy.router_aux_loss() * (len(batch.rows) / num_sequences)
    return loss, part | describe(logprobs, entropy, batch)
