"""Steps of the stages that sample, on the policy that full_sft left: seconds, the share of each phase, and grpo beside `trl`."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import with_trl
from benchmarks.measure import interleaved
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting, needs
from pipeline.data.prompts import PromptTask
from pipeline.params import load_params
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import Trajectory
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.group_loop import group_step
from pipeline.training.policy_setup import Environment, open_group_task, open_prompts
from pipeline.training.ppo_loop import ppo_step
from stages import agent, grpo, ppo

PHASES = ("rollout", "scoring", "update")
PROMPTS, SFT = "data/prepared/rlaif", "checkpoints/full_sft.pth"


def length_reward(ids: Sequence[int]) -> float:
    """A reward that costs nothing and differs within a group."""
    return -float(len(ids))


def score_lengths(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """`length_reward` as our loops ask for it."""
    return [Scored(length_reward(row.ids), {"length": length_reward(row.ids)}, True) for row in trajectories]


def grpo_against_trl(setting: Setting) -> Report:
    """Whole steps: sampling, scoring, reference, update."""
    params = load_params()
    tokenizer = load_tokenizer(needs("data/tokenizer", "tokenizer"))
    settings = params.grpo.model_copy(update={"loss": "grpo"})
    prompts = open_prompts(needs(PROMPTS, "data@rlaif"), settings, tokenizer, params.data.max_dropped_frac, setting.say)
    environment = Environment(tokenizer, prompts, score_lengths, setting.device, setting.say)
    task = open_group_task(needs(SFT, "full_sft"), settings, environment)
    lengths: list[float] = []
    done = 0

    def ours() -> float:
        nonlocal done
        _, collected, _ = group_step(task, settings, setting.device, done)
        lengths.extend(float(len(row.ids)) for row in collected.trajectories)
        done += 1
        return 1.0

    asked = [prompt for index in range(prompts.batches_per_epoch) for prompt in prompts.batch(0, index)]
    model = open_group_task(Path(SFT), settings, environment).policy
    theirs, their_length = with_trl.grpo_steps(model, asked, tokenizer, settings, length_reward, setting.scratch)
    rates = interleaved({"ours": ours, "trl": theirs}, repeats=setting.repeats, device=setting.torch_device)
    means = {"ours": statistics.mean(lengths), "trl": their_length()}
    rows = [(name, f"{1 / rate.median:.2f}", f"{rate.spread:.0%}", f"{means[name]:.1f}") for name, rate in rates.items()]
    workload = (
        f"{settings.batch_size} prompts of stage grpo, {settings.group_size} completions each, at most {settings.max_new_tokens} "
        "tokens, from the weights of full_sft at the same temperature, with a KL to the reference; a reward that costs nothing."
    )
    bars = [Bar("GRPO step against trl's GRPOTrainer", rates["ours"].median / rates["trl"].median, 3.0)]
    return Report("grpo step", workload, ("", "seconds", "spread", "tokens per completion"), rows, bars)


def steps(setting: Setting) -> Report:
    """Seconds of a step of ppo, grpo and agent with their own rewards, and where they go."""
    params = load_params()
    needs(SFT, "full_sft"), needs("checkpoints/reward.pth", "reward")
    rows = []
    for name, stage, take in (("ppo", ppo, ppo_step), ("grpo", grpo, group_step), ("agent", agent, group_step)):
        section = getattr(params, name)
        task, _ = stage.open_task(params, setting.device, setting.say)  # type: ignore[attr-defined]
        measured = [_timed(take, task, section, setting, number) for number in range(setting.repeats + 1)][1:]
        seconds = [step["step"] for step in measured]
        shares = [f"{sum(step[phase] for step in measured) / sum(seconds):.0%}" for phase in PHASES]
        tokens = sum(step["tokens"] for step in measured) / sum(step["rollout"] for step in measured)
        rows.append(
            (
                name,
                f"{statistics.median(seconds):.2f}",
                *shares,
                f"{tokens:,.0f}",
                f"{setting.device.peak_memory_bytes() / 2**30:.1f}",
            )
        )
    columns = ("stage", "seconds", *PHASES, "generated tokens/s", "peak memory so far, GiB")
    return Report("policy steps", "The stages as params.yaml has them, from the weights of full_sft.", columns, rows)


def _timed(take: Callable[..., Any], task: Any, section: Any, setting: Setting, number: int) -> dict[str, float]:
    started = time.perf_counter()
    metrics, collected, _ = take(task, section, setting.device, number)
    seconds = time.perf_counter() - started
    tokens = float(sum(row.num_sampled for row in collected.trajectories))
    return {"step": seconds, "tokens": tokens, **{phase: metrics[f"time/{phase}_s"] for phase in PHASES}}
