"""Stage ppo: improve the full_sft policy with a critic and clipped updates (arXiv:1707.06347).

Reads   data/tokenizer, data/prepared/rlaif, checkpoints/{full_sft,reward}, external/<reward.external>
Writes  checkpoints/ppo.{pth,json}, metrics/ppo.json, plots/ppo.csv
Run     dvc repro --single-item ppo
"""

from pathlib import Path

from pipeline.checkpoint.files import load_model, model_meta, save_model
from pipeline.curves import write_curve, write_metrics
from pipeline.lineage.declaration import declaration
from pipeline.model.heads import ValueModel
from pipeline.params import load_params
from pipeline.rewards.scoring import CompletionScorer
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.policy_setup import open_engine, open_prompts, open_reward_model, open_rollout
from pipeline.training.ppo_loop import PpoTask, train_ppo
from pipeline.training.rollouts import total_steps
from pipeline.training.state import TrainState
from pipeline.training.updater import Updater

PROMPTS, SFT, REWARD = Path("data/prepared/rlaif"), Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth")
OUT = Path("checkpoints/ppo.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.ppo, declaration("ppo", params)
    with stage_run("ppo", params=declared.params, inputs=declared.deps, runtime=params.runtime) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        prompts = open_prompts(PROMPTS, settings, tokenizer, params.data.max_dropped_frac, run.announce)
        reference = device.prepare(load_model(SFT, tokenizer_digest=tokenizer.digest).requires_grad_(False))
        score = CompletionScorer(params.rewards, open_reward_model(REWARD, params.reward.external, tokenizer, device))

        # 2. State: the critic starts from the policy's backbone
        policy = device.prepare(load_model(SFT, tokenizer_digest=tokenizer.digest))
        critic = device.prepare(ValueModel.from_causal_lm(policy, seed=settings.seed))
        steps = total_steps(settings, prompts)
        updaters = {
            "policy": Updater(policy, settings, total_steps=steps),
            "critic": Updater(critic, settings, total_steps=steps, lr=settings.critic_lr),
        }
        state = TrainState({"policy": policy, "critic": critic}, updaters)

        # 3. Train: `policy` is trained in place, so the engine always samples from the current weights
        engine = open_engine(policy, tokenizer, device, max_rows=settings.batch_size)
        max_total_len = settings.max_prompt_len + settings.max_new_tokens
        rollout = open_rollout(engine, tokenizer, settings, max_turns=1, max_total_len=max_total_len)
        text = tokenizer.decode_all, tokenizer.pad_id
        task = PpoTask(state, policy, reference, prompts, rollout, score, *text, run.announce, critic)
        summary = train_ppo(task, settings, device, run)

        # 4. Outputs
        save_model(OUT, policy.state_dict(), model_meta("causal_lm", policy.config, tokenizer.digest))
        write_metrics(Path("metrics/ppo.json"), summary | {"data/dropped_prompts": float(len(prompts.dropped))})
        write_curve(Path("plots/ppo.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
