"""Stage dpo: direct preference optimisation against the frozen full_sft policy (arXiv:2305.18290).

Reads   data/tokenizer, data/encoded/dpo, checkpoints/full_sft
Writes  checkpoints/dpo.{pth,json}, metrics/dpo.json, plots/dpo.csv
Scratch reference/ (the frozen policy's logprobs, by model and data)
Run     dvc repro --single-item dpo
"""

from pathlib import Path

from pipeline.checkpoint.files import load_model, model_meta, save_model
from pipeline.curves import write_curve, write_metrics
from pipeline.data.batches import PairBatches
from pipeline.digests import digests
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.panels import greedy_panel, pair_prompts
from pipeline.training.preference_objective import DirectPreference, cached_reference, live_reference
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised
from pipeline.training.updater import Updater

ENCODED, SFT, OUT = Path("data/encoded/dpo"), Path("checkpoints/full_sft.pth"), Path("checkpoints/dpo.pth")


def main() -> None:
    params = load_params()
    settings, declared = params.dpo, declaration("dpo", params)
    with stage_run("dpo", params=declared.params, inputs=declared.deps, runtime=params.runtime, ranked=True) as run:
        # 1. Inputs
        device = open_device(params.runtime)
        tokenizer = load_tokenizer(Path("data/tokenizer"))
        train, held_out = (
            PairBatches(
                ENCODED / f"{split}.arrow",
                batch_size=settings.batch_size,
                seed=settings.seed,
                tokenizer=tokenizer,
                drop_empty_think_frac=settings.drop_empty_think_frac,
            )
            for split in ("train", "held_out")
        )
        reference = device.prepare(load_model(SFT, tokenizer_digest=tokenizer.digest).requires_grad_(False))

        # 2. State
        model = device.prepare(load_model(SFT, tokenizer_digest=tokenizer.digest))
        steps = total_steps(settings, train)
        state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=steps)})

        # 3. Train
        panel = greedy_panel(model, tokenizer, device, pair_prompts(held_out), max_new_tokens=96)
        if settings.reference == "cached":
            known = digests(Path.cwd(), [ENCODED, SFT, "data/code/dpo.json"])
            draws = settings.seed, settings.epochs, settings.drop_empty_think_frac
            identity = f"{known} {draws}"
            folder = run.scratch / "reference"
            scores = cached_reference(reference, train, held_out, device, folder, identity, epochs=settings.epochs)
        else:
            scores = live_reference(reference, device)
        objective = DirectPreference(model, scores, device, settings)
        summary = train_supervised(SupervisedTask(state, objective, train, held_out, "dpo", panel), settings, device, run)

        # 4. Outputs
        save_model(OUT, model.state_dict(), model_meta("causal_lm", model.config, tokenizer.digest))
        write_metrics(Path("metrics/dpo.json"), summary)
        write_curve(Path("plots/dpo.csv"), run.folder.metrics, every=settings.plot_every)


if __name__ == "__main__":
    main()
