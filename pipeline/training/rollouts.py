"""What grpo, agent and ppo share: the loop, scored rollouts, forward passes over them, and the metrics that describe them."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.errors import NumericsError
from pipeline.maths.advantages import ROUNDING, all_equal
from pipeline.maths.logprobs import token_logprobs
from pipeline.maths.metrics import Sums, combine
from pipeline.model.packing import Packing, pack
from pipeline.model.transformer import Backbone, CausalLM
from pipeline.params.schema import Sampling
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import StopReason, Trajectory, completion_tensors
from pipeline.training.device import Device
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.state import Recorder, TrainState, run_steps

# Metrics of a step's first update alone, before anything moved: they say whether sampler and trainer agree.
FIRST_UPDATE = {"policy/ratio": "policy/ratio_first_update", "policy/logprob_diff_max": "rollout/logprob_diff_max"}

Rollout = Callable[[Sequence[PromptTask], Sequence[int]], list[Trajectory]]
Scorer = Callable[[Sequence[PromptTask], Sequence[Trajectory]], list[Scored]]


class Prompts(Protocol):
    """Prompt batches as a pure function of (epoch, index); `pipeline.data.prompts` has them."""

    batches_per_epoch: int

    def batch(self, epoch: int, index: int) -> list[PromptTask]: ...


class RolloutRecorder(Recorder, Protocol):
    """A `Recorder` that keeps what was sampled, too."""

    def keep_rollouts(self, step: int, rollouts: Mapping[int, Trajectory]) -> None: ...


WARN_AFTER_ZERO_SIGNAL = 5


@dataclass(slots=True)
class RolloutTask:
    """What every stage that samples gives to its loop; `policy` is the module that `state` trains and `rollout` samples from.

    `sampled` holds every trajectory of the step by its key, those of groups included that dynamic sampling gives up.
    """

    state: TrainState
    policy: CausalLM
    reference: CausalLM
    prompts: Prompts
    rollout: Rollout
    score: Scorer
    decode: Callable[[Sequence[int]], str]
    warn: Callable[[str], None]
    sampled: dict[int, Trajectory] = field(default_factory=dict, kw_only=True)


@dataclass(slots=True)
class Collected:
    """Rollouts of one step, in prompt order, completions of a prompt adjacent."""

    tasks: list[PromptTask]
    trajectories: list[Trajectory]
    scored: list[Scored]
    rollout_s: float
    scoring_s: float

    @property
    def rewards(self) -> Tensor:
        """[rows] float32."""
        return torch.tensor([s.total for s in self.scored])

    def __add__(self, other: "Collected") -> "Collected":
        return Collected(
            self.tasks + other.tasks,
            self.trajectories + other.trajectories,
            self.scored + other.scored,
            self.rollout_s + other.rollout_s,
            self.scoring_s + other.scoring_s,
        )


Step = Callable[[int], tuple[dict[str, float], Collected, Tensor]]
"""One collect-and-update round for a 0-based step: metrics, the rollout, and per trajectory [rows] its advantage."""


def total_steps(settings: Sampling, prompts: Prompts) -> int:
    """Rollouts of the whole run: all epochs, or `max_steps` where that is less."""
    steps = settings.epochs * prompts.batches_per_epoch
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def train_rollouts(
    task: RolloutTask,
    settings: Sampling,
    device: Device,
    recorder: RolloutRecorder,
    take_step: Step,
    *,
    table_rows: int,
    counters: Sequence[str] = (),
) -> dict[str, float]:
    """Trains to the end; the summary holds means over the last tenth of the steps, and the run's totals.

    Args:
        table_rows: trajectories in each table of samples.
        counters: what `take_step` counts in the state and the summary should hold.

    Raises:
        NumericsError: the end weights, or what the policy says of a prompt, are not finite; and as `run_steps`.
    """
    state, steps = task.state, total_steps(settings, task.prompts)
    window = max(1, steps // 10)

    def one_step(step: int) -> dict[str, float]:
        task.sampled.clear()
        started = time.perf_counter()
        metrics, collected, advantages = take_step(step)
        elapsed = time.perf_counter() - started
        recorder.keep_rollouts(step + 1, task.sampled)
        tokens = sum(t.num_sampled for t in collected.trajectories)
        metrics |= {
            "train/tokens_seen": state.count("tokens_seen", tokens),
            "train/tokens_per_s": tokens / elapsed,
            "train/skipped_steps": state.skipped_steps,
            "time/step_s": elapsed,
            "memory/peak_bytes": float(device.peak_memory_bytes()),
        }
        if step % settings.sample_every == 0 or step + 1 == steps:
            recorder.log_samples(step + 1, sample_rows(collected, advantages, task.decode, table_rows))
        state.average_tail(metrics, step=step, first=steps - window)
        return metrics

    run_steps(state, recorder, steps, one_step)
    refuse_overflow(task, device)
    return state.summary("tokens_seen", "zero_signal_steps", *counters)


@torch.no_grad()
def refuse_overflow(task: RolloutTask, device: Device) -> None:
    """Raises a `NumericsError` where the policy has finite weights, but too large ones to give a prompt finite logits."""
    (prompt, *_), policy = task.prompts.batch(0, 0), task.policy
    with device.autocast():
        hidden = policy.hidden(device.upload(torch.tensor([prompt.prompt_ids])))
        finite = bool(torch.isfinite(policy.lm_head(hidden[:, -1])).all())
    if not finite:
        raise NumericsError(f"after {task.state.step} steps the policy's logits are not finite; lower the learning rate")


def count_zero_signal(task: RolloutTask, signal: bool) -> float:
    """Counts the steps whose rewards had nothing to compare, and warns of every few in a row; the total so far."""
    counters = task.state.counters
    in_a_row = counters["zero_signal_in_a_row"] = 0.0 if signal else counters.get("zero_signal_in_a_row", 0.0) + 1
    if not signal and in_a_row % WARN_AFTER_ZERO_SIGNAL == 0:
        task.warn(f"{in_a_row:.0f} steps in a row whose completions all earned the same: rewards teach nothing")
    return task.state.count("zero_signal_steps", float(not signal))


def collect(tasks: list[PromptTask], keys: Sequence[int], rollout: Rollout, score: Scorer, ranks: Ranks = ALONE) -> Collected:
    """Samples one trajectory per (task, key) and scores it; ranks share the work, and each gets all of it."""
    started = time.perf_counter()
    own_tasks = list(ranks.mine(tasks))
    own = rollout(own_tasks, list(ranks.mine(keys))) if own_tasks else []
    trajectories = ranks.gather(own)
    sampled = time.perf_counter()
    scored = ranks.gather(score(own_tasks, own) if own_tasks else [])
    return Collected(tasks, trajectories, scored, sampled - started, time.perf_counter() - sampled)


@dataclass(slots=True)
class MicroBatch:
    """Rows of a step, packed, and their ids behind the prompts; `rows` index the step's trajectories."""

    rows: Tensor  # [B]
    packing: Packing  # of all ids but each row's last
    labels: Tensor  # [B, L], -100 where the policy did not write the token
    old_logprobs: Tensor  # [B, L]
    loss_mask: Tensor  # [B, L], True = the policy wrote the token

    @property
    def before(self) -> Tensor:
        """[B, L] which token of the packing stands before each label."""
        return self.packing.states[:, : self.labels.shape[1]]


def trained_rows(trajectories: Sequence[Trajectory], rows: Iterable[int]) -> list[int]:
    """Those of `rows` with a sampled token."""
    return [row for row in rows if trajectories[row].num_sampled]


def micro_batches(trajectories: Sequence[Trajectory], rows: Sequence[int], size: int, device: Device) -> Iterator[MicroBatch]:
    """Cuts this rank's share of the `trained_rows` into micro-batches of at most `size` rows; rows of one prompt together."""
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row in trained_rows(trajectories, rows):
        groups[tuple(trajectories[row].prompt_ids)].append(row)
    kept = [row for group in device.ranks.mine(groups.values()) for row in group]
    for start in range(0, len(kept), size):
        part = kept[start : start + size]
        chosen = [trajectories[row] for row in part]
        packing = pack([row.prompt_ids for row in chosen], [row.ids[:-1] for row in chosen], device.device)
        yield MicroBatch(torch.tensor(part), packing, *(tensor.to(device.device) for tensor in completion_tensors(chosen)))


def sampled_logprobs(
    model: CausalLM, batch: MicroBatch, temperature: float, device: Device, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs [B, L] of the sampled tokens under the distribution at `temperature`, and its entropy [B, L]; 0 elsewhere."""
    wanted = batch.loss_mask
    with device.autocast():
        hidden = model.hidden(batch.packing.input_ids, packing=batch.packing)[0]
    logprobs, entropy = token_logprobs(
        hidden.index_select(0, batch.before[wanted]),
        model.lm_head.weight,
        batch.labels[wanted],
        temperature=temperature,
        entropy_grad=entropy_grad,
    )
    empty = logprobs.new_zeros(wanted.shape)
    return empty.masked_scatter(wanted, logprobs), empty.masked_scatter(wanted, entropy)


@torch.no_grad()
def off_reference(
    policy: CausalLM, batches: Sequence[MicroBatch], references: Sequence[Tensor], temperature: float, device: Device
) -> bool:
    """Whether the policy has left the reference by more than rounding at any sampled token of the step, of all ranks.

    It asks the policy anew: the sampler's logprobs differ from the trainer's by rounding, in bf16 by a lot. Equal weights in
    equal batches give equal logprobs in every precision.

    Args:
        references: [B, L] per batch.
    """
    off = False
    for batch, reference in zip(batches, references, strict=True):
        logprobs, _ = sampled_logprobs(policy, batch, temperature, device)
        off |= not bool(((logprobs - reference)[batch.loss_mask].abs() <= ROUNDING).all())
    return any(device.ranks.gather([off]))


def router_balance(share: float, *models: Backbone) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The balance losses of the models' last forwards times `share` of the optimizer step, and `moe/*`; (0, {}) when dense."""
    aux = torch.stack([model.router_aux_loss() for model in models]).sum() * share
    if not any(model.config.use_moe for model in models):
        return aux, {}
    load_max = torch.stack([model.expert_load_max() for model in models]).max()
    return aux, {"moe/aux_loss": aux, "moe/expert_load_max": load_max}


@torch.no_grad()
def sampling_metrics(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """Sums over the micro-batch's sampled tokens that no loss needs: entropy, ratio, and the largest |logprob - old|."""
    log_ratio = torch.where(batch.loss_mask, logprobs - batch.old_logprobs, 0.0)
    return {
        "entropy": torch.where(batch.loss_mask, entropy, 0.0).sum(),
        "ratio": torch.where(batch.loss_mask, log_ratio.exp(), 0.0).sum(),
        "logprob_diff_max": log_ratio.abs().max(),
    }


def micro_metrics(num_tokens: int, shares: Sums, **counted: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
    """Metrics of one micro-batch as `combine` takes them, so that mini-batches weigh by their tokens.

    Args:
        num_tokens: sampled tokens of the whole mini-batch.
        shares: by key, the micro-batch's shares of the mini-batch's losses; keys ending in `_max` are maxima.
        counted: by metric group, sums over the micro-batch's tokens beside their count.
    """
    sums = {key: value if key.endswith("_max") else _double(value) * num_tokens for key, value in shares.items()}
    for group, values in counted.items():
        sums |= {name if name == "count" else f"{group}/{name}": value for name, value in values.items()}
    return sums


def _double(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else value


def update_metrics(first: Sequence[Mapping[str, float]], applied: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over everything `applied` in a step; what compares sampler and trainer is of the `first` mini-batch."""
    at_first = combine(first)
    means = {key: value for key, value in combine(applied).items() if key not in FIRST_UPDATE}
    return means | {new: at_first[key] for key, new in FIRST_UPDATE.items() if key in at_first}


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Moments of the advantages [N] that a step trains on."""
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/std": float(advantages.std(unbiased=False)),
        "advantages/abs_max": float(advantages.abs().max()),
    }


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """Keys `reward/*`, `rollout/*`, `tool/*`, `stop/*`: what was sampled and what it earned."""
    trajectories, rewards = collected.trajectories, collected.rewards
    lengths = [t.num_sampled for t in trajectories]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "rollout/length_mean": sum(lengths) / len(lengths),
        "rollout/truncated_frac": sum(t.truncated for t in trajectories) / len(lengths),
        "rollout/distinct_3gram": distinct_ngrams(trajectories, 3),
        "rollout/tokens_per_s": sum(lengths) / max(collected.rollout_s, 1e-9),
        "time/rollout_s": collected.rollout_s,
        "time/scoring_s": collected.scoring_s,
    }
    terms: Counter[str] = Counter()
    for scored in collected.scored:
        terms.update(scored.terms)
    metrics |= {f"reward/term/{name}": value / len(lengths) for name, value in terms.items()}
    stops = Counter(t.stop for t in trajectories)
    metrics |= {f"stop/{reason.value}": stops[reason] / len(lengths) for reason in StopReason}
    return metrics


def tool_metrics(collected: Collected) -> dict[str, float]:
    """Keys `tool/*` of multi-turn episodes: calls per trajectory, share of failed calls, share of solved tasks."""
    results = [result for t in collected.trajectories for turn in t.tool_results for result in turn]
    return {
        "tool/calls_mean": len(results) / len(collected.trajectories),
        "tool/error_frac": sum(r.is_error for r in results) / max(len(results), 1),
        "tool/success": sum(s.good for s in collected.scored) / len(collected.scored),
    }


def distinct_ngrams(trajectories: Sequence[Trajectory], n: int) -> float:
    """Distinct over all n-grams of sampled ids, pooled over trajectories; 1.0 where there is none."""
    grams: Counter[tuple[int, ...]] = Counter()
    for trajectory in trajectories:
        ids = [token for token, sampled in zip(trajectory.ids, trajectory.sampled, strict=True) if sampled]
        grams.update(zip(*(ids[offset:] for offset in range(n)), strict=False))
    return len(grams) / max(sum(grams.values()), 1) if grams else 1.0


def group_metrics(collected: Collected, group_size: int) -> dict[str, float]:
    """Shares of groups without signal, all solved, none solved."""
    rewards = collected.rewards.view(-1, group_size)
    good = torch.tensor([scored.good for scored in collected.scored]).view(-1, group_size)
    return {
        "rollout/zero_std_frac": float(all_equal(rewards).float().mean()),
        "rollout/all_good_frac": float(good.all(dim=1).float().mean()),
        "rollout/all_bad_frac": float((~good.any(dim=1)).float().mean()),
    }


def sample_rows(
    collected: Collected, advantages: Tensor, decode: Callable[[Sequence[int]], str], rows: int
) -> list[dict[str, Any]]:
    """The first `rows` trajectories as table rows: text as it was sampled, reward, every term, advantage [rows], stop reason."""
    return [
        {
            "prompt": decode(trajectory.prompt_ids),
            "completion": decode(trajectory.ids),
            "reward": scored.total,
            **{f"term/{name}": value for name, value in scored.terms.items()},
            "advantage": float(advantage),
            "stop": trajectory.stop.value,
        }
        for trajectory, scored, advantage in list(zip(collected.trajectories, collected.scored, advantages, strict=True))[:rows]
    ]
