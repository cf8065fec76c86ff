"""The loop of grpo and agent: sample a group per prompt, compare within the group, update (arXiv:2402.03300)."""

import time
from collections.abc import Collection, Sequence
from itertools import compress, groupby

import torch
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.maths.advantages import all_equal, group_advantages
from pipeline.maths.metrics import on_host
from pipeline.maths.policy import StepSize, group_policy_loss
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Agent, Group
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import Trajectory
from pipeline.training.device import Device
from pipeline.training.objectives import without_dropout
from pipeline.training.rollouts import (
    Collected,
    MicroBatch,
    Prompts,
    RolloutRecorder,
    RolloutTask,
    advantage_metrics,
    collect,
    count_zero_signal,
    group_metrics,
    micro_batches,
    micro_metrics,
    off_reference,
    rollout_metrics,
    router_balance,
    sampled_logprobs,
    sampling_metrics,
    tool_metrics,
    train_rollouts,
    trained_rows,
    update_metrics,
)
from pipeline.training.updater import seed_for


def train_group(task: RolloutTask, settings: Group, device: Device, recorder: RolloutRecorder) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps."""

    def take_step(step: int) -> tuple[dict[str, float], Collected, Tensor]:
        return group_step(task, settings, device, step)

    table_rows = 2 * settings.group_size
    return train_rollouts(task, settings, device, recorder, take_step, table_rows=table_rows)


def group_step(task: RolloutTask, settings: Group, device: Device, step: int) -> tuple[dict[str, float], Collected, Tensor]:
    """One collect-and-update round over `batch_size` prompts x `group_size` completions."""
    collected, metrics = collect_groups(task, settings, device, step)
    divide_by_std = settings.loss != "dr_grpo" if settings.advantage_std is None else settings.advantage_std
    advantages = group_advantages(collected.rewards, settings.group_size, divide_by_std=divide_by_std)
    updated = time.perf_counter()
    metrics |= advantage_metrics(advantages) | update_policy(task, settings, device, step, collected, advantages)
    return metrics | {"time/update_s": time.perf_counter() - updated}, collected, advantages


def collect_groups(task: RolloutTask, settings: Group, device: Device, step: int) -> tuple[Collected, dict[str, float]]:
    """The groups that a step trains on, and what was sampled for them.

    With dynamic sampling (arXiv:2503.14476, section 3.2) groups without signal give their places to groups of other prompts, up
    to `max_rounds` times. No prompt is taken twice in a step: where a set has no others, fewer groups are trained. Where no
    group has a signal, the first ones are kept for what KL and entropy teach. `reward/*` and `rollout/*` describe the first
    sampling, whose prompts nobody chose, so that they mean the same with and without it; `rollout/resample_*` says what it cost.
    """
    epoch, index = divmod(step, task.prompts.batches_per_epoch)
    prompts = task.prompts.batch(epoch, index)
    first = sample_groups(task, settings, device, prompts, step, sampling_round=0)
    metrics = rollout_metrics(first) | group_metrics(first, settings.group_size)
    if any(prompt.tools for prompt in prompts):
        metrics |= tool_metrics(first)
    limit = settings.dynamic_sampling.max_rounds
    if not limit:
        return first, metrics
    kept, taken, rounds = with_signal(first, settings), {prompt.row for prompt in prompts}, 0
    while (missing := len(prompts) - len(kept.tasks) // settings.group_size) and rounds < limit:
        # epochs beyond the run's own: other prompts of the same set, drawn like all others
        others = other_prompts(task.prompts, epoch + (rounds + 1) * settings.epochs, index, taken, missing)
        if not others:
            break
        rounds += 1
        taken |= {prompt.row for prompt in others}
        kept = kept + with_signal(sample_groups(task, settings, device, others, step, sampling_round=rounds), settings)
    metrics |= {
        "rollout/resample_rounds": float(rounds),
        "rollout/resample_groups": float(len(taken) - len(prompts)),
        "time/rollout_s": kept.rollout_s,
        "time/scoring_s": kept.scoring_s,
    }
    return kept if kept.tasks else first, metrics


def other_prompts(prompts: Prompts, epoch: int, index: int, taken: Collection[int], count: int) -> list[PromptTask]:
    """Up to `count` prompts whose rows are not `taken`: an epoch's from batch `index` on, then those before it."""
    others: list[PromptTask] = []
    for offset in range(prompts.batches_per_epoch):
        batch = prompts.batch(epoch, (index + offset) % prompts.batches_per_epoch)
        others += [prompt for prompt in batch if prompt.row not in taken]
        if len(others) >= count:
            break
    return others[:count]


def sample_groups(
    task: RolloutTask, settings: Group, device: Device, prompts: Sequence[PromptTask], step: int, *, sampling_round: int
) -> Collected:
    """`group_size` scored completions per prompt, adjacent."""
    places = range(sampling_round * settings.batch_size, sampling_round * settings.batch_size + len(prompts))
    members = range(settings.group_size)
    keys = [seed_for(settings.seed, "rollout", step, place, member) for place in places for member in members]
    repeated = [prompt for prompt in prompts for _ in members]
    collected = collect(repeated, keys, task.rollout, task.score, device.ranks)
    task.sampled.update(zip(keys, collected.trajectories, strict=True))
    if settings.overlong.buffer:
        collected.scored = [
            charged(prompt, scored, longest_turn(trajectory), settings)
            for prompt, scored, trajectory in zip(repeated, collected.scored, collected.trajectories, strict=True)
        ]
    return collected


def rows_in_loss(trajectories: Sequence[Trajectory], settings: Group) -> list[int]:
    """Rows with a token in the loss."""
    allowed = [row for row, t in enumerate(trajectories) if settings.overlong.train_truncated or not t.truncated]
    return trained_rows(trajectories, allowed)


def with_signal(collected: Collected, settings: Group) -> Collected:
    """The groups whose rewards differ and of which something is in the loss; times are those of all."""
    in_loss = torch.zeros(len(collected.tasks), dtype=torch.bool)
    in_loss[rows_in_loss(collected.trajectories, settings)] = True
    groups = ~all_equal(collected.rewards.view(-1, settings.group_size)) & in_loss.view(-1, settings.group_size).any(dim=1)
    chosen = groups.repeat_interleave(settings.group_size).tolist()
    return Collected(
        list(compress(collected.tasks, chosen)),
        list(compress(collected.trajectories, chosen)),
        list(compress(collected.scored, chosen)),
        collected.rollout_s,
        collected.scoring_s,
    )


def charged(prompt: PromptTask, scored: Scored, length: int, settings: Group) -> Scored:
    """With the soft penalty for coming close to the length limit as a term of its own (arXiv:2503.14476 eq. 13).

    A task is solved whatever it cost; without expected answers good means that the whole reward is positive.
    """
    overlong = settings.overlong
    over = max(0, length - (settings.max_new_tokens - overlong.buffer)) / overlong.buffer
    penalty = -overlong.penalty * min(over, 1.0)
    total = scored.total + penalty
    return Scored(total, {**scored.terms, "overlong": penalty}, scored.good and (bool(prompt.gt) or total > 0))


def longest_turn(trajectory: Trajectory) -> int:
    """Ids of the longest sampled turn."""
    return max((sum(1 for _ in run) for sampled, run in groupby(trajectory.sampled) if sampled), default=0)


def update_policy(
    task: RolloutTask, settings: Group, device: Device, step: int, collected: Collected, advantages: Tensor
) -> dict[str, float]:
    """`updates_per_rollout` optimizer steps on one rollout.

    Without any difference in reward only KL and entropy are left to learn from; without those too, weights and moments stay
    untouched, and `rollout/trained_groups` is 0. A policy that is still the reference has no KL to learn from.
    """
    (updater,) = task.state.updaters.values()
    without_dropout(task.policy)
    trajectories = collected.trajectories
    rows = rows_in_loss(trajectories, settings)
    batches = list(micro_batches(trajectories, rows, settings.micro_batch_size, device))
    signal = bool(advantages[rows].any())
    metrics = {"train/zero_signal_steps": count_zero_signal(task, signal), "train/lr": updater.lr_at(step)}
    metrics["rollout/trained_groups"] = 0.0
    if not rows or not (signal or settings.kl_coef or settings.entropy_coef):
        return metrics
    with torch.no_grad():
        references = [sampled_logprobs(task.reference, batch, settings.temperature, device)[0] for batch in batches]
    # what rounding leaves of a KL of 0, AdamW would turn into a full step
    if not (signal or settings.entropy_coef or off_reference(task.policy, batches, references, settings.temperature, device)):
        return metrics
    metrics["rollout/trained_groups"] = float(len({row // settings.group_size for row in rows}))
    if settings.old_logprobs == "recomputed":
        metrics |= recompute_old_logprobs(task.policy, batches, settings, device)
    size = step_size(settings, [trajectories[row] for row in rows])
    updates, grad_norms = [], []
    for _ in range(settings.updates_per_rollout):
        parts = [
            accumulate_gradients(task.policy, batch, reference, advantages, settings, device, size)
            for batch, reference in zip(batches, references, strict=True)
        ]
        updates.append(device.ranks.gather(on_host(parts)))
        device.ranks.sum_gradients(updater.parameters)
        done = updater.update(step, context=f"prompt rows {sorted({prompt.row for prompt in collected.tasks})}")
        grad_norms.append(done.grad_norm)
    measured = update_metrics(updates[0], [part for parts in updates for part in parts])
    return measured | metrics | {"train/grad_norm": sum(grad_norms) / len(grad_norms)}


def step_size(settings: Group, trajectories: Sequence[Trajectory]) -> StepSize:
    """What the loss of a step is divided by."""
    turns = settings.max_turns if isinstance(settings, Agent) else 1
    return StepSize(
        num_sequences=len(trajectories),
        num_tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        max_tokens=settings.max_new_tokens * turns,
    )


@torch.no_grad()
def recompute_old_logprobs(policy: CausalLM, batches: Sequence[MicroBatch], settings: Group, device: Device) -> dict[str, float]:
    """Replaces the sampler's logprobs by the trainer's own before the first update: in bf16 the two kernels differ.

    Returns:
        The largest difference, `rollout/logprob_diff_max`.
    """
    largest = 0.0
    for batch in batches:
        logprobs, _ = sampled_logprobs(policy, batch, settings.temperature, device)
        difference = torch.where(batch.loss_mask, logprobs - batch.old_logprobs, 0.0).abs().max()
        largest, batch.old_logprobs = max(largest, float(difference)), logprobs
    return {"rollout/logprob_diff_max": max(device.ranks.gather([largest]))}


def accumulate_gradients(
    policy: CausalLM,
    batch: MicroBatch,
    ref_logprobs: Tensor,
    advantages: Tensor,
    settings: Group,
    device: Device,
    size: StepSize,
) -> dict[str, Tensor | float]:
    """Adds the gradients of a micro-batch's share of the update's loss; its metrics as `combine` takes them."""
    logprobs, entropy = sampled_logprobs(policy, batch, settings.temperature, device, entropy_grad=settings.entropy_coef > 0)
    policy_loss, counted = group_policy_loss(
        logprobs,
        batch.old_logprobs,
        ref_logprobs,
        advantages[batch.rows].to(logprobs.device),
        batch.loss_mask,
        loss=settings.loss,
        reduction=settings.reduction,
        clip_eps_low=settings.clip_eps_low,
        clip_eps_high=settings.clip_eps_high,
        ratio_cap=settings.ratio_cap,
        kl_coef=settings.kl_coef,
        kl_estimator=settings.kl_estimator,
        entropy=entropy,
        entropy_coef=settings.entropy_coef,
        size=size,
    )
    aux, shares = router_balance(len(batch.rows) / size.num_sequences, policy)
    loss = policy_loss + aux
    loss.backward()
    shares |= {"policy/loss": policy_loss, "train/loss": loss}
    return micro_metrics(size.num_tokens, shares, policy=counted | sampling_metrics(logprobs, entropy, batch))
