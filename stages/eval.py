"""Stage eval: every model on the same held-out panel, with intervals and a verdict against its parent.

Reads   data/tokenizer, data/encoded/{pretrain,dpo}, data/prepared/{lora,dpo,rlaif,agent}, checkpoints/*, plots/*,
        external/{<reward.external>,<tools.extra>}
Writes  metrics/eval.json, reports/eval.md, reports/curves/*.png
Scratch cache/ (row values by model, panel and code)
Run     dvc repro --single-item eval
"""

from pathlib import Path

from pipeline.evaluation.examiner import measure_all
from pipeline.evaluation.report import write_report
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_run


def main() -> None:
    params = load_params()
    declared = declaration("eval", params)
    with stage_run("eval", params=declared.params, inputs=declared.deps, runtime=params.runtime) as run:
        measured = measure_all(params, declared.deps, declared.params, run.scratch / "cache", announce=run.announce)
        for model, examined in measured.items():
            run.log_samples(0, [{"model": model, **row} for row in examined.samples])
        values = {model: examined.values for model, examined in measured.items()}
        estimates = write_report(values, params.eval, metrics=Path("metrics/eval.json"), folder=Path("reports"))
        run.log(0, {f"{model}/{name}": e.value for model, metrics in estimates.items() for name, e in metrics.items()})


if __name__ == "__main__":
    main()
