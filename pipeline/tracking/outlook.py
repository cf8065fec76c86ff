"""What the present parameters ask of this machine: sources, steps, memory and time, said before hours of work."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import ParamsError
from pipeline.params import Params, load_params
from pipeline.params.needs import FLOAT_BYTES, needs
from pipeline.params.schema import Supervised

PROCESS_BYTES = 500_000_000
"""Of Python, torch and what else a stage imports."""
MEASURED_SIZE, MEASURED_TIMES = 512, 12
LONG_STEP_S = 30.0
"""A step that takes longer is announced."""
FEW_FLOPS = 5e11
"""What no machine takes long for."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A step of a stage on this machine, where its rows are as long as they may be.

    Attributes:
        memory: bytes, of all ranks that share a memory.
        free: bytes of that memory.
        seconds: at the speed of products of matrices here and now; 0 where a stage samples.
    """

    stage: str
    memory: int
    free: int
    seconds: float


def expected(params: Params, stage: str | None = None) -> list[Expected]:
    """A step of a stage, or of every stage that trains. Takes a tenth of a second beyond the import of torch."""
    import torch  # seconds

    runtime = params.runtime
    cuda = runtime.device != "cpu" and torch.cuda.is_available()
    half = runtime.dtype == "bfloat16" or (runtime.dtype == "auto" and cuda)
    found = [each for each in needs(params, 2 if half else FLOAT_BYTES) if stage in (None, each.stage)]
    free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
    here, elsewhere = (1, runtime.ranks) if cuda else (runtime.ranks, 1)  # processes in this memory, and of this speed
    base = 0 if cuda else PROCESS_BYTES
    speed = elsewhere * _flops_per_s(cuda, half) if max((each.flops for each in found), default=0.0) > FEW_FLOPS else float("inf")
    return [Expected(each.stage, here * (each.memory + base), free, each.flops / speed) for each in found]


def _flops_per_s(cuda: bool, half: bool) -> float:
    """The speed of products of matrices as large as a layer's."""
    import torch

    device, dtype = "cuda" if cuda else "cpu", torch.bfloat16 if half else torch.float32
    size = (16 if cuda else 1) * MEASURED_SIZE
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    taken = []
    for _ in range(MEASURED_TIMES):
        started = time.perf_counter()
        (left @ right)[0, 0].item()
        taken.append(time.perf_counter() - started)
    return 2 * size**3 / min(taken)  # the first ones are slow, and others may be at work


def missing_sources(params: Params, root: Path) -> Iterator[str]:
    """A line for every source of data that is not there. Only the stage that reads it needs it."""
    for name, entry in params.data.sets:
        if not (root / entry.source).is_file():
            yield f"data.sets.{name}.source={entry.source}: no such file; data@{name} cannot run without it"


def never_warm(params: Params, root: Path) -> Iterator[str]:
    """Lines for every stage whose rate never reaches its peak, or whose policy is never trained, with the data that are there."""
    for stage, rows_of in {
        **{name: f"data/encoded/{name}" for name in ("pretrain", "full_sft", "lora", "dpo")},
        "reward": "data/encoded/dpo",
        "ppo": "data/prepared/rlaif",
        "grpo": "data/prepared/rlaif",
        "agent": "data/prepared/agent",
    }.items():
        own, report = getattr(params, stage), root / rows_of / "report.json"
        if not report.is_file():
            continue
        rows = json.loads(report.read_text(encoding="utf-8"))["train"]
        steps = -(-rows // own.batch_size)
        if isinstance(own, Supervised):
            steps = -(-steps // own.accumulation_steps)
        steps *= own.epochs
        limit = getattr(own, "max_steps", None)
        yield from cold(stage, steps if limit is None else min(steps, limit), own.model_dump())


def cold(stage: str, steps: int, settings: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of a run that ends within its warm-up, or within that of its critic."""
    for key, missed in (
        ("warmup_steps", f"ends before its rate is {stage}.lr"),
        ("critic_warmup_steps", "ends before the policy is trained"),
    ):
        if 0 < steps <= settings.get(key, 0):
            yield f"{stage}.{key}={settings[key]}: the run has {steps} steps and {missed}; lower it, or train longer"


def heavy(step: Expected) -> str | None:
    """What is to be said of a step that takes more memory than is free, or long."""
    size = f"up to {step.memory / 1e9:.1f} GB"
    if step.memory > step.free:
        return f"a step may take {size} of memory, and {step.free / 1e9:.1f} GB are free; {_remedy(step.stage)}"
    if step.seconds > LONG_STEP_S:
        return f"a step takes {size} of memory and about {step.seconds:.0f} s where rows are as long as they may be"
    return None


def heavy_step(stage: str, root: Path) -> str | None:
    """The same of the steps that a stage is going to take. It runs without params.yaml, too."""
    if not (root / "params.yaml").exists():
        return None
    with suppress(ParamsError):  # edited since the stage read it: what comes of that is not decided here
        for step in expected(load_params(root / "params.yaml"), stage):
            return heavy(step)
    return None


def _remedy(stage: str) -> str:
    rows = "micro_batch_size" if stage in ("ppo", "grpo", "agent") else "batch_size"
    return f"lower {stage}.{rows}, or set runtime.gradient_checkpointing: true"
