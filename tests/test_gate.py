"""The regression gate: what counts as worse, and what the stage does about it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from pipeline.evaluation.catalogue import METRICS
from pipeline.evaluation.gate import regressions, unproven
from pipeline.params.schema import GatedMetric

ROOT = Path(__file__).resolve().parents[1]


def estimate(name: str, low: float, value: float, high: float, n: float = 200.0) -> dict[str, float]:
    return {name: value, f"{name}_low": low, f"{name}_high": high, f"{name}_n": n}


PARENT = estimate("reward_mean", 0.2, 0.3, 0.4) | estimate("bits_per_byte", 1.4, 1.5, 1.6)


def test_every_metric_of_eval_can_be_gated() -> None:
    assert get_args(GatedMetric) == tuple(METRICS)


@pytest.mark.parametrize(
    ("own", "worse"),
    [
        (estimate("reward_mean", 0.0, 0.1, 0.19), True),
        (estimate("reward_mean", 0.0, 0.1, 0.2), False),  # the intervals touch
        (estimate("reward_mean", 0.5, 0.6, 0.7), False),
        (estimate("bits_per_byte", 1.61, 1.7, 1.8), True),  # lower is better
        (estimate("bits_per_byte", 1.0, 1.1, 1.2), False),
        ({}, False),
    ],
)
def test_worse_is_beyond_both_intervals_and_in_the_metric_s_own_direction(own: dict[str, float], worse: bool) -> None:
    assert bool(list(regressions({"full_sft": PARENT, "grpo": own}, ["reward_mean", "bits_per_byte"]))) is worse


def test_a_line_per_model_with_all_that_is_worse() -> None:
    worse = estimate("reward_mean", 0.0, 0.1, 0.15) | estimate("bits_per_byte", 1.7, 1.8, 1.9)
    measured = {"full_sft": PARENT, "dpo": worse, "grpo": worse, "ppo": PARENT}
    assert list(regressions(measured, ["bits_per_byte"])) == [
        f"{model} is worse than full_sft: bits_per_byte 1.800 [1.700, 1.900] against 1.500 [1.400, 1.600]"
        for model in ("dpo", "grpo")
    ]
    (line, _) = regressions(measured, ["bits_per_byte", "reward_mean"])
    assert line.endswith("; reward_mean 0.100 [0.000, 0.150] against 0.300 [0.200, 0.400]")
    assert list(regressions(measured, [])) == []


def test_too_few_rows_prove_nothing_and_are_named() -> None:
    few = {model: estimate("reward_mean", 0.1, 0.1, 0.1, n) for model, n in (("dpo", 1.0), ("grpo", 19.0), ("ppo", 20.0))}
    measured = {"full_sft": estimate("reward_mean", 0.9, 0.9, 0.9), **few}
    (line,) = unproven(measured, ["reward_mean"])
    assert line.startswith("reward_mean proves nothing about dpo, grpo: measured on 1 to 19 rows, at least 20 are needed")
    assert [line.split()[0] for line in regressions(measured, ["reward_mean"])] == ["ppo"]
    assert list(unproven(measured, ["tool_success"])) == [
        "tool_success proves nothing: no model and its parent were measured by it"
    ]
    assert list(unproven({"full_sft": PARENT, "dpo": PARENT, "reward": {}}, ["reward_mean"])) == []


@pytest.mark.parametrize("name", ["reward_mean", "bits_per_byte"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_good(name: str, value: float) -> None:
    own = PARENT | estimate(name, value, value, value)
    assert len(list(regressions({"full_sft": PARENT, "dpo": own}, [name]))) == 1


@pytest.mark.parametrize(("gate", "code"), [("null", 0), ("[reward_mean]", 7), ("[bits_per_byte]", 0), ("[tool_success]", 0)])
def test_stage_fails_with_its_code(tmp_path: Path, gate: str, code: int) -> None:
    params = (ROOT / "profiles/micro.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(params.replace("  gate: null", f"  gate: {gate}"), encoding="utf-8")
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (tmp_path / "metrics").mkdir()
    measured = {"full_sft": PARENT, "dpo": PARENT | estimate("reward_mean", 0.0, 0.1, 0.15)}
    (tmp_path / "metrics/eval.json").write_text(json.dumps(measured))
    ended = subprocess.run([sys.executable, "-m", "stages.gate"], cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert ended.returncode == code, ended.stderr
    end = json.loads((tmp_path / ".runs/gate/exit.json").read_text())
    assert end["code"] == code
    assert ("gate: tool_success proves nothing" in ended.stderr) is ("tool_success" in gate)
    if code:
        assert end["reason"].startswith("dpo is worse than full_sft: reward_mean 0.100"), end
        hint, line = ended.stderr.splitlines()
        assert hint.startswith("gate: keep the parent's model") and line == f"gate: {end['reason']}"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
