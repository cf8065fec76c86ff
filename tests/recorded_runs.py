"""Run folders as stages leave them, and the origin of a file as `whence` finds it, without training."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.lineage.whence import Origin, Run, Step

TERMS = ("answer", "length", "model")
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{ 7 * 7 }}"


def write_run(
    home: Path,
    number: int,
    *,
    stage: str = "grpo",
    params: Mapping[str, Any] | None = None,
    metrics: Sequence[tuple[int, Mapping[str, float | None]]] = ((1, {"reward/mean": 0.5}),),
    samples: Sequence[Mapping[str, Any]] = (),
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    code: int | None = 0,
    experiment: str = "",
) -> Path:
    """One run; `code` None leaves it without an end.

    Args:
        number: of the run, from which its start and the id of its MLflow run follow.
    """
    own = {"lr": 1e-4, "seed": 42} | dict(params or {})
    folder = home / ".runs" / stage / f"key{number}" / "1"
    folder.mkdir(parents=True)
    about: dict[str, Any] = {
        "stage": stage,
        "name": f"{stage} · lr {own['lr']:g} · s{own['seed']}",
        "started_s": 1000.0 * number,
        "tracking_uri": "sqlite:///mlflow.db",
        "params": {stage: own},
        "tags": {"dvc.stage": stage} | {f"dvc.{path}": md5 for path, md5 in (inputs or {"data/in": "a" * 32}).items()},
    }
    if experiment:
        about["tags"]["dvc.experiment"] = experiment
    (folder / "run.json").write_text(json.dumps(about))
    lines = [json.dumps({"step": step, "time_s": 1.0, "metrics": dict(values)}) for step, values in metrics]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    (folder / "feeder.json").write_text(json.dumps({"run_id": f"mlflow{number}"}))
    if code is not None:
        end = {"code": code, "reason": "", "time_s": 1000.0 * number + 60, "outputs": dict(outputs or {})}
        (folder / "exit.json").write_text(json.dumps(end))
    return folder


def curves(seed: int, steps: int, level: float) -> list[tuple[int, dict[str, float | None]]]:
    """What a reinforcement run could have logged: rewards that rise to `level`, entropy that falls."""
    draw = random.Random(seed)
    rows: list[tuple[int, dict[str, float | None]]] = []
    for step in range(1, steps + 1):
        risen = level * (1 - math.exp(-3 * step / steps))
        values = {f"reward/term/{name}": risen / 3 + draw.gauss(0, 0.05) for name in TERMS}
        values |= {
            "reward/mean": sum(values.values()),
            "policy/ref_kl": 0.05 * step / steps * level + draw.gauss(0, 0.002),
            "policy/entropy": 2.0 - 0.8 * step / steps + draw.gauss(0, 0.03),
            "rollout/length_mean": 40 + 10 * risen + draw.gauss(0, 2),
            "train/loss": draw.gauss(0, 0.01),
            "time/step_s": draw.uniform(0.8, 1.2),
        }
        rows.append((step, values))
    return rows


def answers(seed: int, steps: Sequence[int], prompts: int = 3, times: int = 2) -> list[dict[str, Any]]:
    """Sample rows: `times` completions of each prompt at each step, hostile ones among them."""
    draw = random.Random(seed)
    words = "the answer is 12 or 34, 小雨 says so".split()
    return [
        {
            "step": step,
            "prompt": f"<|im_start|>user\nquestion {prompt} {HOSTILE}<|im_end|>\n<|im_start|>assistant\n",
            "completion": "I think " + " ".join(draw.choices([*words, HOSTILE], k=12)),
            "reward": draw.gauss(0, 1),
            **{f"term/{name}": draw.gauss(0, 1) for name in TERMS},
            "advantage": draw.gauss(0, 1),
            "stop": "eos",
        }
        for step in steps
        for prompt in range(prompts)
        for _ in range(times)
    ]


def origin(run_folder: str, file: str = "kept.pth") -> Origin:
    """raw -> data -> tokenizer -> encode -> model, the model reading all but raw; `late` is read by the model alone."""
    run = Run(f"model {HOSTILE}", run_folder, "mlflow1", "sqlite:///mlflow.db", 1000.0, 60.0)
    params = {"model.lr": 1e-4, "model.note": HOSTILE}
    chain = [
        Step("data", {}, {"raw": "r" * 32}, {"data.out": "d" * 32}, None),
        Step("late", {}, {"raw": "r" * 32}, {"late.out": "l" * 32}, None),
        Step("tokenizer", {}, {"data.out": "d" * 32}, {"tokenizer.out": "t" * 32}, None),
        Step("encode", {}, {"data.out": "d" * 32, "tokenizer.out": "t" * 32}, {"encoded": "e" * 32}, None),
    ]
    reads = {path: md5 for step in chain for path, md5 in step.outs.items()}
    made = Step("model", params, reads, {"model.pth": "m" * 32}, run)
    commits = [{"commit": "1" * 40, "time": "2026-01-02T03:04:05"}]
    evaluation = {"score": 0.5, "score_low": 0.4, "score_high": 0.6, "score_n": 9.0}
    return Origin(file, "m" * 32, "model.pth", {}, False, commits, [*chain, made], {"raw": "r" * 32}, evaluation)
