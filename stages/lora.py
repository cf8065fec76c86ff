"""Stage lora: low-rank adapters on frozen full_sft weights (arXiv:2106.09685).

Reads   data/tokenizer, data/encoded/lora, data/prepared/lora, checkpoints/full_sft
Writes  checkpoints/lora.{pth,json} (adapter tensors only), metrics/lora.json, plots/lora.csv
Run     dvc repro --single-item lora
"""

from pathlib import Path

from pipeline.checkpoint.files import load_model, save_model
from pipeline.checkpoint.lora import lora_meta
from pipeline.curves import write_curve, write_metrics
from pipeline.data.batches import chat_batches
from pipeline.lineage.declaration import declaration
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.panels import chat_prompts, greedy_panel
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised
from pipeline.training.updater import Updater

ENCODED, PREPARED, OUT = Path("data/encoded/lora"), Path("data/prepared/lora"), Path("checkpoints/lora.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.lora, declaration("lora", params)
    with stage_run("lora", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        train, held_out = (chat_batches(ENCODED / f"{split}.arrow", settings, tokenizer) for split in ("train", "held_out"))

        # 2. State: full_sft frozen, adapters at zero
        model = load_model(Path("checkpoints/full_sft.pth"), tokenizer_digest=tokenizer.digest)
        add_lora(model, rank=settings.rank, alpha=settings.alpha, targets=settings.targets, seed=settings.seed)
        model = device.prepare(model)
        steps = total_steps(settings, train)
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=steps)})

        # 3. Train
        panel = greedy_panel(model, tokenizer, device, chat_prompts(PREPARED, tokenizer), max_new_tokens=96)
        task = SupervisedTask(state, LanguageModelling(model, device), train, held_out, "train", panel)
        summary = train_supervised(task, settings, device, run)

        # 4. Outputs
        meta = lora_meta(model.config, tokenizer.digest, rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
        save_model(OUT, lora_state_dict(model), meta)
        write_metrics(Path("metrics/lora.json"), summary)
        write_curve(Path("plots/lora.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
