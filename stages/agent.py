"""Stage agent: multi-turn tool use, the group losses of grpo on whole token-exact trajectories.

Reads   data/tokenizer, data/prepared/agent, checkpoints/{full_sft,reward}, external/{<reward.external>,<tools.extra>}
Writes  checkpoints/agent.{pth,json}, metrics/agent.json, plots/agent.csv
Run     dvc repro --single-item agent
"""

from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.files import model_meta, save_model
from pipeline.curves import write_curve, write_metrics
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.params.schema import Params
from pipeline.rewards.scoring import EpisodeScorer
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.tools.toolbox import open_toolbox
from pipeline.training.device import Device, open_device
from pipeline.training.group_loop import train_group
from pipeline.training.policy_setup import Environment, open_group_task, open_prompts, open_reward_model
from pipeline.training.rollouts import RolloutTask

PROMPTS, SFT, REWARD = Path("data/prepared/agent"), Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth")
OUT = Path("checkpoints/agent.pth")


def open_task(params: Params, device: Device, announce: Callable[[str], None]) -> tuple[RolloutTask, Environment]:
    """The stage ready to train, from its inputs; steps that are replayed begin here, too."""
    tokenizer = load_tokenizer(Path("data/tokenizer"))
    toolbox, judge = open_toolbox(params.tools), open_reward_model(REWARD, params.reward.external, tokenizer, device)
    prompts = open_prompts(PROMPTS, params.agent, tokenizer, params.data.max_dropped_frac, announce, toolbox)
    score = EpisodeScorer(params.rewards, judge, toolbox)
    environment = Environment(tokenizer, prompts, score, device, announce, toolbox)
    return open_group_task(SFT, params.agent, environment), environment


def main() -> None:
    params = load_params()
    settings, declared = params.agent, declaration("agent", params)
    with stage_run("agent", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        task, environment = open_task(params, device, run.announce)

        # 2. Train
        summary = train_group(task, settings, device, run)

        # 3. Outputs
        save_model(OUT, task.policy.state_dict(), model_meta("causal_lm", task.policy.config, environment.tokenizer.digest))
        write_metrics(Path("metrics/agent.json"), summary | {"data/dropped_prompts": float(len(environment.prompts.dropped))})
        write_curve(Path("plots/agent.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
