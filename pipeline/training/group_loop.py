"""The loop of grpo and agent: sample a group per prompt, compare within the group, update (arXiv:2402.03300)."""

import time

import torch
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.maths.advantages import group_advantages
from pipeline.maths.policy import group_policy_loss
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Group
from pipeline.training.device import Device
from pipeline.training.rollouts import (
    Collected,
    MicroBatch,
    RolloutTask,
    advantage_metrics,
    collect,
    count_zero_signal,
    group_metrics,
    micro_batches,
    micro_metrics,
    rollout_metrics,
    router_balance,
    sampled_logprobs,
    sampling_metrics,
    tool_metrics,
    train_rollouts,
    update_metrics,
    without_dropout,
)
from pipeline.training.state import Recorder
from pipeline.training.updater import seed_for


def train_group(task: RolloutTask, settings: Group, device: Device, recorder: Recorder) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps."""

    def take_step(step: int) -> tuple[dict[str, float], Collected, Tensor]:
        return group_step(task, settings, device, step)

    table_rows = 2 * settings.group_size
    return train_rollouts(task, settings, device, recorder, take_step, table_rows=table_rows)


def group_step(task: RolloutTask, settings: Group, device: Device, step: int) -> tuple[dict[str, float], Collected, Tensor]:
    """One collect-and-update round over `batch_size` prompts x `group_size` completions."""
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
    metrics = rollout_metrics(collected) | group_metrics(rewards, good) | advantage_metrics(advantages)
    if any(prompt.tools for prompt in prompts):
        metrics |= tool_metrics(collected)
    updated = time.perf_counter()
    metrics |= update_policy(task, settings, device, step, collected, advantages, prompts)
    return metrics | {"time/update_s": time.perf_counter() - updated}, collected, advantages


def update_policy(
    task: RolloutTask,
    settings: Group,
    device: Device,
    step: int,
    collected: Collected,
    advantages: Tensor,
    prompts: list[PromptTask],
) -> dict[str, float]:
    """`updates_per_rollout` optimizer steps on one rollout.

    Without any difference in reward only the KL term is left to learn from; without that too, weights and moments stay
    untouched.
    """
    (updater,) = task.state.updaters.values()
    without_dropout(task.policy)
    trajectories = collected.trajectories
    rows = range(len(trajectories))
    batches = list(micro_batches(trajectories, rows, settings.micro_batch_size, task.pad_id, device))
    signal = any(bool(advantages[batch.rows].any()) for batch in batches)
    metrics = {"train/zero_signal_steps": count_zero_signal(task, signal), "train/lr": updater.lr_at(step)}
    if not batches or (settings.kl_coef == 0 and not signal):
        return metrics
    with torch.no_grad():
        references = [sampled_logprobs(task.reference, batch, settings.temperature, device)[0] for batch in batches]
    num_sequences = sum(len(batch.rows) for batch in batches)
    num_tokens = sum(t.num_sampled for t in trajectories)
    updates, grad_norms = [], []
    for _ in range(settings.updates_per_rollout):
        updates.append(
            [
                accumulate_gradients(
                    task.policy,
                    batch,
                    reference,
                    advantages,
                    settings,
                    device,
                    num_sequences=num_sequences,
                    num_tokens=num_tokens,
                )
                for batch, reference in zip(batches, references, strict=True)
            ]
        )
        done = updater.update(step, context=f"prompt rows {[prompt.row for prompt in prompts]}")
        grad_norms.append(done.grad_norm)
    metrics |= update_metrics(updates[0], [part for parts in updates for part in parts])
    return metrics | {"train/grad_norm": sum(grad_norms) / len(grad_norms)}


def accumulate_gradients(
    policy: CausalLM,
    batch: MicroBatch,
    ref_logprobs: Tensor,
    advantages: Tensor,
    settings: Group,
    device: Device,
    *,
    num_sequences: int,
    num_tokens: int,
) -> dict[str, float]:
    """Adds the gradients of a micro-batch's share of the update's loss; its metrics as `combine` takes them."""
    logprobs, entropy = sampled_logprobs(policy, batch, settings.temperature, device)
    policy_loss, counted = group_policy_loss(
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
    aux, shares = router_balance(len(batch.rows) / num_sequences, policy)
    loss = policy_loss + aux
    loss.backward()
    shares |= {"policy/loss": float(policy_loss.detach()), "train/loss": float(loss.detach())}
    return micro_metrics(num_tokens, shares, policy=counted | sampling_metrics(logprobs, entropy, batch))
