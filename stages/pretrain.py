"""Stage pretrain: next-token prediction on raw text, from random or given weights.

Reads   data/tokenizer, data/encoded/pretrain, external/<pretrain.init_from>
Writes  checkpoints/pretrain.{pth,json}, metrics/pretrain.json, plots/pretrain.csv
Run     dvc repro --single-item pretrain
"""

from pathlib import Path

from pipeline.checkpoint.files import model_meta, save_model
from pipeline.checkpoint.foreign import load_foreign
from pipeline.curves import write_curve, write_metrics
from pipeline.data.batches import SupervisedBatches
from pipeline.lineage.declaration import declaration
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import CausalLM
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.panels import document_prompts, greedy_panel
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised
from pipeline.training.updater import Updater

ENCODED, OUT = Path("data/encoded/pretrain"), Path("checkpoints/pretrain.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.pretrain, declaration("pretrain", params)
    with stage_run("pretrain", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        train, held_out = (
            SupervisedBatches(ENCODED / f"{split}.arrow", batch_size=settings.batch_size, seed=settings.seed, tokenizer=tokenizer)
            for split in ("train", "held_out")
        )

        # 2. State: fresh or foreign weights; the loop restores the newest save of this very recipe
        config = ModelConfig.from_params(params.model, tokenizer.vocab_size)
        if settings.init_from is None:
            model = CausalLM(config, seed=settings.seed)
        else:
            model = load_foreign(Path("external") / settings.init_from, config)
        model = device.prepare(model)
        steps = total_steps(settings, train)
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=steps)})

        # 3. Train
        panel = greedy_panel(model, tokenizer, device, document_prompts(held_out), max_new_tokens=48)
        task = SupervisedTask(state, LanguageModelling(model, device), train, held_out, "train", panel)
        summary = train_supervised(task, settings, device, run)

        # 4. Outputs
        save_model(OUT, model.state_dict(), model_meta("causal_lm", config, tokenizer.digest))
        write_metrics(Path("metrics/pretrain.json"), summary)
        write_curve(Path("plots/pretrain.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
