"""What recording a step costs the process that trains; MLflow is fed by another one."""

from pathlib import Path

from benchmarks.measure import timed
from benchmarks.models import config_of, make_model
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting
from benchmarks.supervised import our_steps
from benchmarks.training import of_lineage
from pipeline.data.batches import SupervisedBatches
from pipeline.params import load_params
from pipeline.tracking.console import ProgressBar
from pipeline.tracking.recorder import JsonLines, Recorder

STEPS = 1000
TRAINED = 30
METRICS = {f"train/metric_{number}": 0.123456789 * number for number in range(12)}
"""As many as pretrain logs."""


def recording(setting: Setting) -> Report:
    """Beside the shortest steps that a stage of the lineage has: those of pretrain."""
    settings = load_params().pretrain
    data = of_lineage("pretrain", settings.max_seq_len)
    batches = SupervisedBatches(data.path, batch_size=settings.batch_size, seed=settings.seed, tokenizer=data.tokenizer)
    train = our_steps(make_model(config_of("micro"), setting.torch_device), batches, settings, setting.device, TRAINED)
    step = min(timed(train, setting.torch_device)[1] for _ in range(setting.repeats)) / TRAINED
    record = min(timed(lambda: _record(setting.scratch), setting.torch_device)[1] for _ in range(setting.repeats)) / STEPS
    rows = [
        ("a step of pretrain", f"{step * 1e3:.2f}"),
        ("recording it", f"{record * 1e3:.3f}"),
        ("share", f"{record / step:.2%}"),
    ]
    bars = [Bar("1 % of a step over what recording it costs", 0.01 * step / record, 1.0)]
    return Report("recording", "Metrics to metrics.jsonl and to the progress bar.", ("", "ms"), rows, bars)


def _record(folder: Path) -> float:
    recorder = Recorder(JsonLines(folder / "metrics.jsonl", 0), JsonLines(folder / "samples.jsonl", 0))
    with ProgressBar("benchmark", STEPS) as bar:
        for step in range(STEPS):
            recorder.log(step, METRICS)
            bar.update(step, loss=0.5, lr=0.1)
    return float(STEPS)
