"""docs/algorithms.md says what the profiles do."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.maths.policy import REDUCTIONS
from pipeline.params import load_params

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
MICRO, MINIMIND = (load_params(ROOT / "profiles" / f"{name}.yaml") for name in ("micro", "minimind"))
WORDS = {"sequence": "mean of completions' means", "token": "mean over tokens", "constant": "sum over a constant"}


def row(stage: str) -> dict[str, str]:
    """A stage's row of the table by column."""
    lines = [line for line in TEXT.splitlines() if line.startswith("|")]
    header = next(line for line in lines if line.startswith("| stage |"))
    cells = next(line for line in lines if line.startswith(f"| {stage} |"))
    return dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (header, cells)), strict=True))


def both(micro: Any, minimind: Any) -> str:
    return f"{micro}" if micro == minimind else f"{micro} / {minimind}"


@pytest.mark.parametrize("stage", ["grpo", "agent"])
def test_group_stages(stage: str) -> None:
    micro, minimind, said = getattr(MICRO, stage), getattr(MINIMIND, stage), row(stage)
    assert micro.loss == minimind.loss == "cispo" and micro.advantage_std is minimind.advantage_std is None
    assert said["estimator"] == f"(R - mean) / std of the group of {both(micro.group_size, minimind.group_size)}"
    assert said["ratio"] == "token"
    assert said["clip"] == f"cispo: ratio capped at {both(micro.ratio_cap, minimind.ratio_cap)}, detached"
    assert micro.reduction is minimind.reduction is None and said["reduction"] == WORDS[REDUCTIONS["cispo"]]
    assert micro.kl_estimator == minimind.kl_estimator
    assert said["KL"] == f"{both(micro.kl_coef, minimind.kl_coef)} x {micro.kl_estimator} in the loss"


def test_ppo() -> None:
    micro, minimind, said = MICRO.ppo, MINIMIND.ppo, row("ppo")
    gamma, decay = both(micro.gamma, minimind.gamma), both(micro.gae_lambda, minimind.gae_lambda)
    assert said["estimator"] == f"GAE, gamma {gamma}, lambda {decay}, whitened over the step"
    stop = both(micro.early_stop_kl, minimind.early_stop_kl)
    assert said["clip"] == f"{both(micro.clip_eps, minimind.clip_eps)}, early stop at KL {stop}"
    assert micro.kl_in_reward is minimind.kl_in_reward is False and micro.kl_estimator == minimind.kl_estimator
    assert said["KL"] == f"{both(micro.kl_coef, minimind.kl_coef)} x {micro.kl_estimator} in the loss"


def test_dpo() -> None:
    micro, minimind, said = MICRO.dpo, MINIMIND.dpo, row("dpo")
    assert micro.loss == minimind.loss == "sigmoid" and micro.label_smoothing == minimind.label_smoothing == 0
    assert said["estimator"] == f"-log sigmoid(beta h), beta {both(micro.beta, minimind.beta)}"
    assert said["reference"] == f"full_sft, `{both(micro.reference, minimind.reference)}`"


def test_the_losses_of_the_second_table_are_those_of_the_code() -> None:
    table = TEXT[TEXT.index("## Group losses") : TEXT.index("- **Reduction.**")]
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\w+)` \| (divide|do not) \| ", table, flags=re.MULTILINE)
    assert {loss: reduction for loss, reduction, _ in rows} == REDUCTIONS
    assert [loss for loss, _, std in rows if std == "do not"] == ["dr_grpo"]
