"""How fast the pipeline is on this machine, beside what others would do: `python benchmarks/run.py [--device cuda] [NAME ...]`.

Writes benchmarks/results/<machine>.md. Every comparison is one run in which the ways take turns; figures are medians.
What needs trained weights takes those of this repository (`dvc repro reward agent`); what needs trl needs `make interop`.
"""

import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import correctness, episodes, growth, machine, mfu, policy, recording, sampling, startup, training
from benchmarks.report import Report, keep, table
from benchmarks.setting import Setting
from pipeline.errors import PipelineError
from pipeline.params import load_params
from pipeline.supervise import exit_on_error
from pipeline.training.device import open_device

RESULTS = Path(__file__).parent / "results"
BENCHMARKS: dict[str, Callable[[Setting], Report]] = {
    "correctness": correctness.correctness,
    "rollout": sampling.rollout_64m,
    "rollout-micro": sampling.rollout_micro,
    "episodes": episodes.episodes,
    "pretrain": training.pretrain,
    "full_sft": training.full_sft,
    "dpo": training.dpo,
    "grpo": policy.grpo_against_trl,
    "steps": policy.steps,
    "startup": startup.startup,
    "recording": recording.recording,
    "mfu": mfu.mfu,
    "growth": growth.growth,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(BENCHMARKS)}; all when left out")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    repeats: Annotated[int, typer.Option(help="of everything that is timed", min=1)] = 5,
    texts: Annotated[Path | None, typer.Option(help="a JSONL file of documents: adds `pretrain-64m`")] = None,
    chats: Annotated[Path | None, typer.Option(help="a JSONL file of chats: adds `full_sft-64m`")] = None,
) -> None:
    """Runs the benchmarks, prints their tables and keeps them."""
    with tempfile.TemporaryDirectory() as scratch:
        known = dict(BENCHMARKS)
        for name, source in (("pretrain", texts), ("full_sft", chats)):
            if source is not None:
                known[f"{name}-64m"] = partial(of_file, name, source)
        unknown = sorted(set(names or []) - set(known))
        if unknown:
            raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(known)}")
        runtime = load_params().runtime.model_copy(update={"device": device})
        setting = Setting(open_device(runtime), repeats, Path(scratch), partial(print, file=sys.stderr, flush=True))
        reports, failed = [], False
        try:
            for name in names or known:
                started = time.perf_counter()
                try:
                    reports.append(known[name](setting))
                except PipelineError as error:
                    failed = True
                    setting.say(f"{name}: {error}")
                    continue
                peak_gib = setting.device.peak_memory_bytes() / 2**30
                reports[-1].workload += f" Peak memory of the process until here: {peak_gib:.1f} GiB."
                setting.say(f"{name}: {time.perf_counter() - started:.0f} s")
                print(reports[-1].markdown(), flush=True)
        finally:  # what has been measured is kept, whatever comes after it
            lost = keep(reports, head(setting), RESULTS, machine.file_name(setting.torch_device))
    for line in lost:
        setting.say(f"slower than before: {line}")
    missed = [bar.name for report in reports for bar in report.bars if bar.verdict == "MISSED"]
    for name in missed:
        setting.say(f"missed: {name}")
    raise typer.Exit(1 if failed or missed else 0)


def of_file(name: str, source: Path, setting: Setting) -> Report:
    """`pretrain-64m` and `full_sft-64m`."""
    limit = getattr(training.profile("minimind"), name).max_seq_len
    return training.supervised_64m(setting, name, training.of_file(name, source, setting.scratch, limit), source.name)


def head(setting: Setting) -> str:
    """The machine and its limits."""
    device = setting.torch_device
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    rows = [
        ("matrix product, TFLOP/s", f"{machine.product_rate(device, setting.dtype) / 1e12:.3f}"),
        ("memory copy, GB/s", f"{machine.copy_rate(device) / 1e9:.1f}"),
        ("threads", str(torch.get_num_threads())),
        ("type of the layers' products", str(setting.dtype).removeprefix("torch.")),
    ]
    lines = [
        f"# {machine.machine_name(device)}",
        f"`python benchmarks/run.py`, medians of {setting.repeats} turns; {packages}.",
        table(("limit", ""), rows),
    ]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    with exit_on_error("run"):
        typer.run(main)
