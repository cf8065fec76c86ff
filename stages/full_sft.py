"""Stage full_sft: supervised fine-tuning of all weights on chats and tool conversations.

Reads   data/tokenizer, data/encoded/full_sft, data/prepared/full_sft, checkpoints/pretrain, external/<full_sft.init_from>
Writes  checkpoints/full_sft.{pth,json}, metrics/full_sft.json, plots/full_sft.csv
Run     dvc repro --single-item full_sft
"""

from pathlib import Path

from pipeline.checkpoint.files import load_model, model_meta, save_model
from pipeline.checkpoint.foreign import load_foreign
from pipeline.curves import write_curve, write_metrics
from pipeline.data.batches import chat_batches
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.panels import chat_prompts, greedy_panel
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised
from pipeline.training.updater import Updater

ENCODED, PREPARED, OUT = Path("data/encoded/full_sft"), Path("data/prepared/full_sft"), Path("checkpoints/full_sft.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.full_sft, declaration("full_sft", params)
    with stage_run("full_sft", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        train, held_out = (chat_batches(ENCODED / f"{split}.arrow", settings, tokenizer) for split in ("train", "held_out"))

        # 2. State: pretrain's weights, or foreign ones of pretrain's shape
        model = load_model(Path("checkpoints/pretrain.pth"), tokenizer_digest=tokenizer.digest)
        if settings.init_from is not None:
            model = load_foreign(Path("external") / settings.init_from, model.config)
        model = device.prepare(model)
        steps = total_steps(settings, train)
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=steps)})

        # 3. Train
        panel = greedy_panel(model, tokenizer, device, chat_prompts(PREPARED, tokenizer), max_new_tokens=96)
        task = SupervisedTask(state, LanguageModelling(model, device), train, held_out, "train", panel)
        summary = train_supervised(task, settings, device, run)

        # 4. Outputs
        save_model(OUT, model.state_dict(), model_meta("causal_lm", model.config, tokenizer.digest))
        write_metrics(Path("metrics/full_sft.json"), summary)
        write_curve(Path("plots/full_sft.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
