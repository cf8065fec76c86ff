"""Stage reward: a Bradley-Terry reward model on the full_sft backbone on preference pairs.

Reads   data/tokenizer, data/encoded/dpo, checkpoints/full_sft
Writes  checkpoints/reward.{pth,json}, metrics/reward.json, plots/reward.csv
Run     dvc repro --single-item reward
"""

from pathlib import Path

from pipeline.checkpoint.files import load_model, model_meta, save_model
from pipeline.curves import write_curve, write_metrics
from pipeline.data.batches import PairBatches
from pipeline.lineage.declaration import declaration
from pipeline.model.heads import RewardModel
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.reward_objective import RewardModelling, score_scale, scored_panel
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised
from pipeline.training.updater import Updater

ENCODED, SFT, OUT = Path("data/encoded/dpo"), Path("checkpoints/full_sft.pth"), Path("checkpoints/reward.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.reward, declaration("reward", params)
    with stage_run("reward", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        train, held_out = (
            PairBatches(
                ENCODED / f"{split}.arrow", batch_size=settings.batch_size, seed=settings.seed, tokenizer=tokenizer
            ).judged()
            for split in ("train", "held_out")
        )

        # 2. State: the policy's backbone under a scalar head
        policy = load_model(SFT, tokenizer_digest=tokenizer.digest)
        model = device.prepare(RewardModel.from_causal_lm(policy, seed=settings.seed))
        steps = total_steps(settings, train)
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=steps)})

        # 3. Train
        objective = RewardModelling(model, device)
        panel = scored_panel(objective, next(held_out.in_order()), tokenizer.decode_all)
        task = SupervisedTask(state, objective, train, held_out, "reward_model", panel)
        summary = train_supervised(task, settings, device, run)

        # 4. Outputs: with the scores' location and scale, so that a unit of reward means the same for every model
        offset, scale = score_scale(objective, train)
        meta = model_meta("reward", model.config, tokenizer.digest, score={"offset": offset, "scale": scale})
        save_model(OUT, model.state_dict(), meta)
        write_metrics(Path("metrics/reward.json"), summary | {"reward_model/offset": offset, "reward_model/scale": scale})
        write_curve(Path("plots/reward.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
