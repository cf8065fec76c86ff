"""Stage grpo: improve the full_sft policy within groups of completions (arXiv:2402.03300, arXiv:2506.13585).

Reads   data/tokenizer, data/prepared/rlaif, checkpoints/{full_sft,reward}, external/<reward.external>
Writes  checkpoints/grpo.{pth,json}, metrics/grpo.json, plots/grpo.csv
Run     dvc repro --single-item grpo
"""

from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.files import model_meta, save_model
from pipeline.curves import write_curve, write_metrics
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.params.schema import Params
from pipeline.rewards.scoring import CompletionScorer
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import Device, open_device
from pipeline.training.group_loop import train_group
from pipeline.training.policy_setup import Environment, open_group_task, open_prompts, open_reward_model
from pipeline.training.rollouts import RolloutTask

PROMPTS, SFT, REWARD = Path("data/prepared/rlaif"), Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth")
OUT = Path("checkpoints/grpo.pth")


def open_task(params: Params, device: Device, announce: Callable[[str], None]) -> tuple[RolloutTask, Environment]:
    """The stage ready to train, from its inputs; steps that are replayed begin here, too."""
    tokenizer = load_tokenizer(Path("data/tokenizer"))
    prompts = open_prompts(PROMPTS, params.grpo, tokenizer, params.data.max_dropped_frac, announce)
    score = CompletionScorer(params.rewards, open_reward_model(REWARD, params.reward.external, tokenizer, device))
    environment = Environment(tokenizer, prompts, score, device, announce)
    return open_group_task(SFT, params.grpo, environment), environment


def main() -> None:
    params = load_params()
    settings, declared = params.grpo, declaration("grpo", params)
    with stage_run("grpo", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        task, environment = open_task(params, device, run.announce)

        # 2. Train
        summary = train_group(task, settings, device, run)

        # 3. Outputs
        save_model(OUT, task.policy.state_dict(), model_meta("causal_lm", task.policy.config, environment.tokenizer.digest))
        write_metrics(Path("metrics/grpo.json"), summary | {"data/dropped_prompts": float(len(environment.prompts.dropped))})
        write_curve(Path("plots/grpo.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
