"""What grpo, agent and ppo share: collecting scored rollouts, forward passes over them, and the metrics that describe them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.data.prompts import PromptTask
from pipeline.maths.logprobs import token_logprobs
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.transformer import CausalLM
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import StopReason, Trajectory, pad_trajectories
from pipeline.training.device import Device
from pipeline.training.objectives import real_positions

Rollout = Callable[[Sequence[PromptTask], Sequence[int]], list[Trajectory]]
Scorer = Callable[[Sequence[PromptTask], Sequence[Trajectory]], list[Scored]]


class Prompts(Protocol):
    """Prompt batches as a pure function of (epoch, index); `pipeline.data.prompts` has them."""

    batches_per_epoch: int

    def batch(self, epoch: int, index: int) -> list[PromptTask]: ...


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


def collect(tasks: list[PromptTask], keys: Sequence[int], rollout: Rollout, score: Scorer) -> Collected:
    """Samples one trajectory per (task, key) and scores it."""
    started = time.perf_counter()
    trajectories = rollout(tasks, keys)
    sampled = time.perf_counter()
    scored = score(tasks, trajectories)
    return Collected(tasks, trajectories, scored, sampled - started, time.perf_counter() - sampled)


@dataclass(slots=True)
class MicroBatch:
    """Right-padded rows of a step, aligned to labels; `rows` index the step's trajectories."""

    rows: Tensor  # [B]
    input_ids: Tensor  # [B, T]
    labels: Tensor  # [B, T], -100 where the policy did not write the token
    old_logprobs: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T], True = the policy wrote the token


def micro_batches(trajectories: Sequence[Trajectory], rows: Sequence[int], size: int, device: Device) -> Iterator[MicroBatch]:
    """Cuts `rows` into micro-batches of similar length, at most `size` rows each; rows without a sampled token are left out."""
    kept = [row for row in rows if trajectories[row].num_sampled]
    kept.sort(key=lambda row: len(trajectories[row].prompt_ids) + len(trajectories[row].ids))
    for start in range(0, len(kept), size):
        part = kept[start : start + size]
        tensors = pad_trajectories([trajectories[row] for row in part], pad_id=0)
        yield MicroBatch(torch.tensor(part), *(tensor.to(device.device) for tensor in tensors))


def without_dropout(policy: CausalLM) -> None:
    """Evaluation mode, so that the policy that is updated is the one that sampled; routers alone go on taking statistics."""
    policy.eval()
    for module in policy.modules():
        if isinstance(module, MixtureOfExperts):
            module.train()


def sampled_logprobs(model: CausalLM, batch: MicroBatch, temperature: float, device: Device) -> tuple[Tensor, Tensor]:
    """Logprobs [B, T] of the sampled tokens under the distribution at `temperature`, and its entropy [B, T] (no gradient)."""
    with device.autocast():
        hidden = model.hidden(batch.input_ids, visible=real_positions(batch.labels))
    return token_logprobs(hidden, model.lm_head.weight, batch.labels, temperature=temperature)


@torch.no_grad()
def describe(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """Sums over the micro-batch's sampled tokens that no loss needs: entropy, ratio, and the largest |logprob - old|."""
    log_ratio = torch.where(batch.loss_mask, logprobs - batch.old_logprobs, 0.0)
    return {
        "entropy": torch.where(batch.loss_mask, entropy, 0.0).sum(),
        "ratio": torch.where(batch.loss_mask, log_ratio.exp(), 0.0).sum(),
        "logprob_diff_max": log_ratio.abs().max(),
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
        "rollout/truncated_frac": sum(t.stop in (StopReason.LENGTH, StopReason.CONTEXT) for t in trajectories) / len(lengths),
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


def group_metrics(rewards: Tensor, good: Tensor) -> dict[str, float]:
    """Shares of groups without signal, all solved, none solved; rewards and good are [P, G]."""
    spread = rewards.amax(dim=1) - rewards.amin(dim=1)
    return {
        "rollout/zero_std_frac": float((spread == 0).float().mean()),
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
