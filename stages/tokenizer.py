"""Stage tokenizer: byte-level BPE with the chat template, as Hugging Face files.

Reads   data/prepared/{pretrain,full_sft}, external/<tokenizer.init_from>
Writes  data/tokenizer/, metrics/tokenizer.json
Run     dvc repro --single-item tokenizer
"""

from itertools import chain
from pathlib import Path

from pipeline.curves import write_metrics
from pipeline.data.corpus import corpus_texts
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.adoption import adopt_tokenizer
from pipeline.text.quality import tokenizer_metrics
from pipeline.text.tokenizer import load_tokenizer, train_tokenizer

PREPARED, OUT = Path("data/prepared"), Path("data/tokenizer")


def main() -> None:
    params = load_params()
    settings, declared = params.tokenizer, declaration("tokenizer", params)
    with stage_run("tokenizer", params=declared.params, inputs=declared.deps, runtime=params.runtime) as run:
        if settings.init_from is not None:
            adopt_tokenizer(Path("external") / settings.init_from, OUT)
        else:
            texts = chain.from_iterable(
                corpus_texts(PREPARED / name, settings.max_rows_per_set) for name in ("pretrain", "full_sft")
            )
            train_tokenizer(texts, OUT, vocab_size=settings.vocab_size, split_digits=settings.split_digits)
        metrics, samples = tokenizer_metrics(load_tokenizer(OUT), corpus_texts(PREPARED / "full_sft", 200))
        run.log(0, metrics)
        run.log_samples(0, samples)
        write_metrics(Path("metrics/tokenizer.json"), metrics)


if __name__ == "__main__":
    main()
