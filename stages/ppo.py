"""Stage ppo: improve the full_sft policy with a critic and clipped updates (arXiv:1707.06347).

Reads   data/tokenizer, data/prepared/rlaif, checkpoints/{full_sft,reward}, external/<reward.external>
Writes  checkpoints/ppo.{pth,json}, metrics/ppo.json, plots/ppo.csv
Run     dvc repro --single-item ppo
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
from pipeline.training.policy_setup import Environment, open_prompts, open_reward_model
from pipeline.training.ppo_loop import PpoTask, train_ppo
from pipeline.training.ppo_setup import open_ppo_task

PROMPTS, SFT, REWARD = Path("data/prepared/rlaif"), Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth")
OUT = Path("checkpoints/ppo.pth")


def open_task(params: Params, device: Device, announce: Callable[[str], None]) -> tuple[PpoTask, Environment]:
    """The stage ready to train, from its inputs; steps that are replayed begin here, too."""
    tokenizer = load_tokenizer(Path("data/tokenizer"))
    prompts = open_prompts(PROMPTS, params.ppo, tokenizer, params.data.max_dropped_frac, announce)
    score = CompletionScorer(params.rewards, open_reward_model(REWARD, params.reward.external, tokenizer, device))
    environment = Environment(tokenizer, prompts, score, device, announce)
    return open_ppo_task(SFT, params.ppo, environment), environment


def main() -> None:
    params = load_params()
    settings, declared = params.ppo, declaration("ppo", params)
    with stage_run("ppo", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        task, environment = open_task(params, device, run.announce)

        # 2. Train
        summary = train_ppo(task, settings, device, run)

        # 3. Outputs
        save_model(OUT, task.policy.state_dict(), model_meta("causal_lm", task.policy.config, environment.tokenizer.digest))
        write_metrics(Path("metrics/ppo.json"), summary | {"data/dropped_prompts": float(len(environment.prompts.dropped))})
        write_curve(Path("plots/ppo.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
