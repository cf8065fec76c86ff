"""Every policy-gradient algorithm on the embedded world: held-out reward over full_sft, from one command.

    dvc repro reward && python benchmarks/algorithms.py [NAME ...] [--steps N] [--seed N ...] [--updates N ...]

Trains from checkpoints/full_sft.pth with the `grpo` and `ppo` sections of params.yaml, changed only in what names the algorithm,
and measures the mean reward of sampled replies to the held-out prompts, as stage eval does. Nothing is written but the table.
With one update per rollout every ratio is 1: cispo, grpo and gspo take nearly the same step. With several, the later ones learn
from rollouts of a policy that is no more: ratios leave 1, and clips, caps and ratios of whole sequences act, which is where
algorithms differ. Both are compared; the columns behind the reward show how far the policy went and how often it was held.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from pipeline.checkpoint.files import load_model
from pipeline.evaluation.examiner import all_tasks, open_held_out
from pipeline.evaluation.statistics import Estimate, mean
from pipeline.model.transformer import CausalLM
from pipeline.params import Params, load_params
from pipeline.params.schema import Group, Ppo
from pipeline.rewards.scoring import CompletionScorer
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Trajectory
from pipeline.supervise import exit_on_error
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer, load_tokenizer
from pipeline.training.device import Device, open_device
from pipeline.training.group_loop import train_group
from pipeline.training.policy_setup import (
    Environment,
    open_engine,
    open_group_task,
    open_prompts,
    open_reward_model,
)
from pipeline.training.ppo_loop import train_ppo
from pipeline.training.ppo_setup import open_ppo_task
from pipeline.training.updater import seed_for

SFT, REWARD, PROMPTS = Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth"), Path("data/prepared/rlaif")
GROUP_VARIANTS: dict[str, dict[str, Any]] = {
    "cispo": {"loss": "cispo"},
    "grpo": {"loss": "grpo"},
    "dapo": {"loss": "dapo", "clip_eps_high": 0.28, "dynamic_sampling": {"max_rounds": 3}, "kl_coef": 0.0},
    "gspo": {"loss": "gspo"},
    "dr_grpo": {"loss": "dr_grpo"},
}
NAMES = [*GROUP_VARIANTS, "ppo"]
UPDATES = (1, 4)
"""Per rollout: on-policy, and off-policy."""
SHOWN = ("policy/approx_kl", "policy/clip_frac", "policy/ratio_max")


class Silent:
    """A recorder and progress bar that keep nothing; one line per tenth of the run on stderr."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._every = name, max(1, steps // 10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def update(self, step: int, **figures: float) -> None:
        if step % self._every == 0:
            shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{self._name}: step {step}, {shown}", file=sys.stderr, flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def keep_rollouts(self, step: int, rollouts: Mapping[int, Trajectory]) -> None: ...
    def load(self) -> None: ...
    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None: ...
    def progress(self, total: int) -> Self:
        return self


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(NAMES)}; all when left out")] = None,
    steps: Annotated[int | None, typer.Option(help="rollouts per run; those of params.yaml when left out")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="training seeds, may be given several times; 42 when left out")] = None,
    updates: Annotated[
        list[int] | None, typer.Option(help="updates per rollout, may be given several times; 1 and 4 when left out", min=1)
    ] = None,
) -> None:
    """Prints a Markdown table."""
    unknown = sorted(set(names or []) - set(NAMES))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(NAMES)}")
    params = load_params()
    device = open_device(params.runtime)
    tokenizer = load_tokenizer(Path("data/tokenizer"))
    score = CompletionScorer(params.rewards, open_reward_model(REWARD, params.reward.external, tokenizer, device))
    start = device.prepare(load_model(SFT, tokenizer_digest=tokenizer.digest))
    before = held_out_reward(start, params, tokenizer, score, device)
    print(
        f"full_sft: mean reward {shown(before)} over {before.n} held-out prompts, {100 * params.eval.confidence:g}% intervals\n"
    )
    columns = ["updates", "algorithm", "seed", "steps", "reward", "better than full_sft", *SHOWN, "minutes"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for count, name, number in product(updates or UPDATES, names or NAMES, seed or [42]):
        started = time.perf_counter()
        policy, measured = train(name, params, tokenizer, score, device, steps=steps, seed=number, updates=count)
        after = held_out_reward(policy, params, tokenizer, score, device)
        verdict = "yes, intervals apart" if after.low > before.high else "no"
        figures = [f"{measured[key]:.2g}" if key in measured else "-" for key in SHOWN]
        minutes = f"{(time.perf_counter() - started) / 60:.1f}"
        cells = [count, name, number, f"{measured['train/steps']:.0f}", shown(after), verdict, *figures, minutes]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def train(
    name: str,
    params: Params,
    tokenizer: Tokenizer,
    score: CompletionScorer,
    device: Device,
    *,
    steps: int | None,
    seed: int,
    updates: int,
) -> tuple[CausalLM, dict[str, float]]:
    """The trained policy of an algorithm and the run's summary."""
    settings = settings_of(name, params, steps=steps, seed=seed, updates=updates)
    prompts = open_prompts(PROMPTS, settings, tokenizer, params.data.max_dropped_frac, print)
    environment = Environment(tokenizer, prompts, score, device, lambda line: print(f"{name}: {line}", file=sys.stderr))
    recorder = Silent(name, settings.max_steps or settings.epochs * prompts.batches_per_epoch)
    if isinstance(settings, Ppo):
        task = open_ppo_task(SFT, settings, environment)
        return task.policy, train_ppo(task, settings, device, recorder)
    assert isinstance(settings, Group)
    group_task = open_group_task(SFT, settings, environment)
    return group_task.policy, train_group(group_task, settings, device, recorder)


def settings_of(name: str, params: Params, *, steps: int | None, seed: int, updates: int) -> Group | Ppo:
    """The section of params.yaml with what names the algorithm; in ppo a mini-batch is the whole batch, as in the others."""
    section = params.ppo if name == "ppo" else params.grpo
    own = {"mini_batch_size": params.ppo.batch_size} if name == "ppo" else GROUP_VARIANTS[name]
    changes = {**own, "updates_per_rollout": updates, "seed": seed, **({"max_steps": steps} if steps else {})}
    return type(section).model_validate(section.model_dump() | changes)


def held_out_reward(policy: CausalLM, params: Params, tokenizer: Tokenizer, score: CompletionScorer, device: Device) -> Estimate:
    """Mean reward of one sampled reply per held-out prompt, with stage eval's prompts, seeds and temperature."""
    settings = params.eval
    room = policy.config.max_position_embeddings - settings.max_new_tokens
    held_out = open_held_out("rlaif", settings, tokenizer, room, settings.thinking_ratio, print)
    tasks = list(all_tasks(held_out))[: settings.panel_rows]
    trajectories = run_episodes(
        open_engine(policy, tokenizer, device, max_rows=settings.batch_size),
        ChatEncoder(tokenizer),
        tokenizer,
        tasks,
        keys=[seed_for(settings.seed, "eval", "reward", row) for row in range(len(tasks))],
        max_turns=1,
        max_new_tokens=settings.max_new_tokens,
        max_total_len=policy.config.max_position_embeddings,
        temperature=settings.temperature,
    )
    return mean([scored.total for scored in score(tasks, trajectories)], settings.confidence)


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]" if math.isfinite(estimate.low) else "-"


if __name__ == "__main__":
    with exit_on_error("algorithms"):
        typer.run(main)
