"""The loop of ppo: one completion per prompt, a critic, GAE, several clipped passes with a KL stop (arXiv:1707.06347)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.maths.advantages import all_equal, whiten
from pipeline.maths.metrics import combine, on_host
from pipeline.maths.policy import ppo_policy_loss
from pipeline.maths.value import explained_variance, gae, value_loss
from pipeline.model.heads import ValueModel
from pipeline.model.packing import Packing, pack
from pipeline.params.schema import Ppo
from pipeline.rollout.records import Trajectory
from pipeline.training.device import Device
from pipeline.training.objectives import without_dropout
from pipeline.training.rollouts import (
    Collected,
    MicroBatch,
    RolloutRecorder,
    RolloutTask,
    advantage_metrics,
    collect,
    count_zero_signal,
    micro_batches,
    micro_metrics,
    off_reference,
    rollout_metrics,
    router_balance,
    sampled_logprobs,
    sampling_metrics,
    train_rollouts,
    trained_rows,
    update_metrics,
)
from pipeline.training.updater import Update, seed_for

TABLE_ROWS = 16


@dataclass(slots=True)
class PpoTask(RolloutTask):
    """Everything the ppo stage gives to the loop; updaters are named `policy` and `critic`."""

    critic: ValueModel


@dataclass(slots=True)
class Experience:
    """A rollout's micro-batch with what was computed before the first update; all [B, L]."""

    batch: MicroBatch
    ref_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Signal:
    """What a step's rollout can teach the policy.

    Attributes:
        rewards: which completions are better, or with KL in the rewards which tokens.
        kl: how to get back to the reference.
    """

    rewards: bool
    kl: bool


def train_ppo(task: PpoTask, settings: Ppo, device: Device, recorder: RolloutRecorder) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps."""

    def take_step(step: int) -> tuple[dict[str, float], Collected, Tensor]:
        return ppo_step(task, settings, device, step)

    return train_rollouts(task, settings, device, recorder, take_step, table_rows=TABLE_ROWS, counters=["early_stops"])


def ppo_step(task: PpoTask, settings: Ppo, device: Device, step: int) -> tuple[dict[str, float], Collected, Tensor]:
    """One rollout of `batch_size` prompts and up to `updates_per_rollout` passes over it.

    Returns:
        Metrics, the rollout, and per trajectory [rows] the mean advantage over its tokens (for the sample table).
    """
    epoch, index = divmod(step, task.prompts.batches_per_epoch)
    prompts = task.prompts.batch(epoch, index)
    keys = [seed_for(settings.seed, "rollout", step, place) for place in range(len(prompts))]
    collected = collect(prompts, keys, task.rollout, task.score, device.ranks)
    task.sampled.update(zip(keys, collected.trajectories, strict=True))
    without_dropout(task.policy)
    without_dropout(task.critic)
    experience, signal = estimate(task, settings, device, collected)
    updated = time.perf_counter()
    metrics = rollout_metrics(collected) | experience_metrics(experience)
    metrics["train/zero_signal_steps"] = count_zero_signal(task, signal.rewards)
    metrics |= update_both(task, settings, device, step, collected, experience, signal)
    metrics |= {"time/update_s": time.perf_counter() - updated}
    row_advantages = torch.zeros(len(prompts))
    for part in experience:
        mean = part.advantages.sum(dim=1) / part.batch.loss_mask.sum(dim=1).clamp(min=1)
        row_advantages[part.batch.rows] = mean.cpu()
    return metrics, collected, row_advantages


@torch.no_grad()
def estimate(task: PpoTask, settings: Ppo, device: Device, collected: Collected) -> tuple[list[Experience], Signal]:
    """Old values, reference logprobs, GAE, and advantages whitened over the whole step; of all ranks.

    Where rewards have no signal, advantages are 0: whitening would blow the critic's noise up to unit variance.

    A completion ends with a value of 0 after its last token. With `bootstrap_truncated` one that was cut goes on with what the
    critic expects there: its future exists, only the sampling stopped. With `kl_in_reward` every token pays
    kl_coef * (logprob - ref_logprob) of the policy that sampled (arXiv:2203.02155, section 3.5), and the loss has no KL term.
    """
    trajectories = collected.trajectories
    experience = []
    rows = range(len(trajectories))
    for batch in micro_batches(trajectories, rows, settings.micro_batch_size, device):
        reference, _ = sampled_logprobs(task.reference, batch, settings.temperature, device)
        values = packed_values(task.critic, batch.packing, batch.before, device)
        rewards = last_token_rewards(collected.rewards[batch.rows].to(values.device), batch.loss_mask)
        if settings.kl_in_reward:
            rewards = rewards - settings.kl_coef * torch.where(batch.loss_mask, batch.old_logprobs - reference, 0.0)
        advantages, returns = gae(
            rewards,
            values,
            batch.loss_mask,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            bootstrap_values=values_after(task.critic, batch, trajectories, device) if settings.bootstrap_truncated else None,
        )
        experience.append(Experience(batch, reference, values, advantages, returns))
    signal = find_signal(task, settings, device, collected, experience)
    experience = device.ranks.gather(experience)
    if experience:
        advantages = sampled_tokens(experience, "advantages")
        whitened = whiten(advantages) if signal.rewards else torch.zeros_like(advantages)
        lengths = [int(part.batch.loss_mask.sum()) for part in experience]
        for part, advantages in zip(experience, whitened.split(lengths), strict=True):
            part.advantages = torch.zeros_like(part.advantages).masked_scatter(part.batch.loss_mask, advantages)
    return experience, signal


def find_signal(task: PpoTask, settings: Ppo, device: Device, collected: Collected, experience: Sequence[Experience]) -> Signal:
    """What there is to learn; for equal rewards the policy is compared with the reference once more.

    Where it still is the reference, KL is rounding, which whitening or AdamW would turn into a full step.

    Args:
        experience: this rank's.
    """
    differ = not bool(all_equal(collected.rewards))
    batches, references = [part.batch for part in experience], [part.ref_logprobs for part in experience]
    kl = settings.kl_coef > 0 and (differ or off_reference(task.policy, batches, references, settings.temperature, device))
    return Signal(differ or (kl and settings.kl_in_reward), kl)


def values_after(critic: ValueModel, batch: MicroBatch, trajectories: Sequence[Trajectory], device: Device) -> Tensor:
    """[B] what the critic expects after the last token of each truncated completion, 0 for those that ended by themselves."""
    after = torch.zeros(len(batch.rows), device=batch.labels.device)
    cut = [place for place, row in enumerate(batch.rows.tolist()) if trajectories[row].truncated]
    if not cut:
        return after
    # the batch's own packing lacks each row's last id, the one that is read here
    rows = [trajectories[int(batch.rows[place])] for place in cut]
    packing = pack([row.prompt_ids for row in rows], [row.ids for row in rows], after.device)
    places, lengths = torch.arange(len(rows)), torch.tensor([len(row.ids) for row in rows])
    after[cut] = packed_values(critic, packing, packing.states[places, lengths], device)
    return after


def packed_values(critic: ValueModel, packing: Packing, states: Tensor, device: Device) -> Tensor:
    """The critic's values at `states` of a packing, of their shape, fp32."""
    with device.autocast():
        hidden = critic.hidden(packing.input_ids, packing=packing)[0]
    return critic.scalar(hidden.index_select(0, states.flatten())).view_as(states)


def sampled_tokens(experience: Sequence[Experience], name: str) -> Tensor:
    """A field of all micro-batches at the sampled tokens, [N]."""
    return torch.cat([getattr(part, name)[part.batch.loss_mask] for part in experience])


def last_token_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """[B] rewards placed at each row's last sampled token, [B, L], 0 elsewhere."""
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = torch.where(loss_mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, rewards[:, None], 0.0)


def experience_metrics(experience: Sequence[Experience]) -> dict[str, float]:
    """Moments of the whitened advantages and the critic's explained variance over the step."""
    if not experience:
        return {}
    explained = explained_variance(sampled_tokens(experience, "old_values"), sampled_tokens(experience, "returns"))
    return advantage_metrics(sampled_tokens(experience, "advantages")) | {"value/explained_variance": explained}


def update_both(
    task: PpoTask,
    settings: Ppo,
    device: Device,
    step: int,
    collected: Collected,
    experience: Sequence[Experience],
    signal: Signal,
) -> dict[str, float]:
    """Passes over random mini-batches; a mini-batch beyond `early_stop_kl` ends the step, leaving everything as it is.

    The first `critic_warmup_steps` steps, and steps without any signal, move the critic alone.

    Metrics are means over the mini-batches that were applied, each weighing by its tokens (gradient norms: all alike). The KL
    of a mini-batch that ended the step stands apart, as `policy/approx_kl_at_stop`.
    """
    located = {int(row): (part, place) for part in experience for place, row in enumerate(part.batch.rows)}
    # advantages of an untrained critic are noise, and without any difference in reward there is nothing to learn from
    with_policy = step >= settings.critic_warmup_steps and (signal.rewards or signal.kl or settings.entropy_coef > 0)
    stopped: dict[str, float] = {}
    first: list[dict[str, float]] = []
    applied: list[dict[str, float]] = []
    updates: dict[str, list[Update]] = {"train": [], "value": []}
    rows = trained_rows(collected.trajectories, range(len(collected.trajectories)))
    for chosen in mini_batches(rows, settings, step):
        parts = device.ranks.gather(on_host(accumulate_gradients(task, settings, device, collected, chosen, located)))
        first = first or parts
        approx_kl = combine(parts)["policy/approx_kl"]
        if approx_kl > settings.early_stop_kl:
            for updater in task.state.updaters.values():
                updater.discard()
            stopped = {"policy/approx_kl_at_stop": approx_kl, "train/early_stops": task.state.count("early_stops", 1)}
            break
        applied += parts
        for group, update in apply_gradients(task, device, step, chosen, with_policy=with_policy).items():
            updates[group].append(update)
    metrics = update_metrics(first, applied) | stopped
    for group, done in updates.items():
        if done:
            grad_norm = sum(update.grad_norm for update in done) / len(done)
            metrics |= {f"{group}/lr": done[-1].lr, f"{group}/grad_norm": grad_norm}
    return metrics


def mini_batches(rows: Sequence[int], settings: Ppo, step: int) -> Iterator[list[int]]:
    """The rows of each mini-batch of a step: every pass takes all rows once, in an order of its own."""
    for epoch in range(settings.updates_per_rollout):
        generator = torch.Generator().manual_seed(seed_for(settings.seed, "minibatch", step, epoch))
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order), settings.mini_batch_size):
            yield [rows[place] for place in order[start : start + settings.mini_batch_size]]


def apply_gradients(task: PpoTask, device: Device, step: int, chosen: Sequence[int], *, with_policy: bool) -> dict[str, Update]:
    """One optimizer step of the critic and, `with_policy`, of the policy, by metric group."""
    policy, critic = task.state.updaters["policy"], task.state.updaters["critic"]
    context = f"rows {chosen[:8]} of the rollout"
    device.ranks.sum_gradients(critic.parameters)
    if not with_policy:
        policy.discard()
        return {"value": critic.update(step, context=context)}
    device.ranks.sum_gradients(policy.parameters)
    return {"train": policy.update(step, context=context), "value": critic.update(step, context=context)}


def accumulate_gradients(
    task: PpoTask,
    settings: Ppo,
    device: Device,
    collected: Collected,
    chosen: Sequence[int],
    located: dict[int, tuple[Experience, int]],
) -> list[dict[str, Tensor | float]]:
    """Adds the gradients of this rank's share of a mini-batch, normalised over all its tokens; metrics by micro-batch, as
    `combine` takes them.
    """
    num_tokens = sum(collected.trajectories[row].num_sampled for row in chosen)
    parts = []
    for batch in micro_batches(collected.trajectories, chosen, settings.micro_batch_size, device):
        known = [gather_rows(batch, located, name) for name in ("ref_logprobs", "advantages", "old_values", "returns")]
        reference, advantages, old_values, returns = known
        logprobs, entropy = sampled_logprobs(
            task.policy, batch, settings.temperature, device, entropy_grad=settings.entropy_coef > 0
        )
        policy_loss, counted = ppo_policy_loss(
            logprobs,
            batch.old_logprobs,
            reference,
            advantages,
            batch.loss_mask,
            clip_eps=settings.clip_eps,
            kl_coef=0.0 if settings.kl_in_reward else settings.kl_coef,
            kl_estimator=settings.kl_estimator,
            entropy=entropy,
            entropy_coef=settings.entropy_coef,
            num_tokens=num_tokens,
        )
        values = packed_values(task.critic, batch.packing, batch.before, device)
        critic_loss, value_counted = value_loss(
            values, old_values, returns, batch.loss_mask, value_clip_eps=settings.value_clip_eps, num_tokens=num_tokens
        )
        aux, shares = router_balance(len(batch.rows) / len(chosen), task.policy, task.critic)
        loss = policy_loss + settings.vf_coef * critic_loss + aux
        loss.backward()
        shares |= {"policy/loss": policy_loss, "value/loss": critic_loss, "train/loss": loss}
        counted |= sampling_metrics(logprobs, entropy, batch)
        parts.append(micro_metrics(num_tokens, shares, policy=counted, value=value_counted))
    return parts


def gather_rows(batch: MicroBatch, located: dict[int, tuple[Experience, int]], name: str) -> Tensor:
    """The rows of an `Experience` field that `batch` holds, cut or zero-padded to its length, [B, L]."""
    width = batch.labels.shape[1]
    gathered = batch.old_logprobs.new_zeros(len(batch.rows), width)
    for place, row in enumerate(batch.rows.tolist()):
        part, source = located[row]
        values = getattr(part, name)[source][:width]
        gathered[place, : len(values)] = values
    return gathered
