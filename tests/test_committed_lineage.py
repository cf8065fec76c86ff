"""The committed record: it is of the code and parameters that lie beside it, and what it shows is good enough."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pandas import read_csv

from pipeline.lineage.code_hash import write_code_hashes
from pipeline.params import load_params
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
LOCK = read_yaml(ROOT / "dvc.lock")["stages"]


def metrics(stage: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "metrics" / f"{stage}.json").read_text(encoding="utf-8")))


EVAL = metrics("eval")


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_the_lock_file_is_of_this_code_and_world(tmp_path: Path) -> None:
    write_code_hashes(ROOT, tmp_path)
    outs = {out["path"]: out["md5"] for out in LOCK["code"]["outs"]}
    assert outs == {f"data/code/{path.name}": md5(path) for path in tmp_path.iterdir()}, "dvc repro, then commit what it wrote"
    for name in ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent"):
        deps = {dep["path"]: dep["md5"] for dep in LOCK[f"data@{name}"]["deps"]}
        assert deps["data/world.yaml"] == md5(ROOT / "data" / "world.yaml")


def test_the_lock_file_is_of_these_params() -> None:
    tree = read_yaml(ROOT / "params.yaml")
    for stage, locked in LOCK.items():
        for key, value in locked.get("params", {}).get("params.yaml", {}).items():
            now: Any = tree
            for part in key.split("."):
                now = now[part]
            assert now == value, f"{stage}: {key}: dvc repro, then commit what it wrote"


def test_supervised_stages_learned() -> None:
    vocab_size = load_params(ROOT / "params.yaml").tokenizer.vocab_size
    assert metrics("pretrain")["val/loss"] <= 0.35 * math.log(vocab_size)
    lora = metrics("lora")
    assert lora["val/loss"] <= 0.8 * lora["val/loss_start"]
    for stage in ("pretrain", "full_sft", "dpo", "reward"):
        assert metrics(stage)["val/loss"] < 0.6 * metrics(stage)["val/loss_start"]


def test_the_chat_model_stops_and_has_room_to_learn() -> None:
    full_sft = EVAL["full_sft"]
    assert full_sft["stops_frac"] >= 0.98
    assert 0.2 <= full_sft["tool_success"] <= 0.8
    assert all(full_sft[f"{name}_n"] >= 200 for name in ("stops_frac", "qa_exact", "reward_mean", "tool_success"))


def test_preferences_were_learned() -> None:
    errors = {model: 1 - EVAL[model]["preference_accuracy"] for model in ("full_sft", "dpo")}
    assert errors["dpo"] <= min(0.15, errors["full_sft"] / 3)  # a gain in points ends at 1
    assert EVAL["reward"]["preference_accuracy"] >= 0.85
    assert EVAL["dpo"]["preference_accuracy_low"] > EVAL["full_sft"]["preference_accuracy_high"]


@pytest.mark.parametrize("model", ["ppo", "grpo"])
def test_reinforcement_raised_the_reward(model: str) -> None:
    assert EVAL[model]["reward_mean_low"] > EVAL["full_sft"]["reward_mean_high"]


def test_the_agent_solves_more() -> None:
    assert EVAL["agent"]["tool_success"] >= EVAL["full_sft"]["tool_success"] + 0.2
    assert EVAL["agent"]["tool_success_low"] > EVAL["full_sft"]["tool_success_high"]


def test_every_metric_is_explained_in_the_readme() -> None:
    """`group/{a,b}`, `group/a`, `_k1` after its stem, `group/*` and `<name>` in the table of keys count."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("What the MLflow keys mean") : readme.index("</details>")]
    patterns = set()
    for written in re.findall(r"`([^`]+)`", table):
        escaped = re.escape(written).replace(r"\*", ".+").replace("<name>", ".+").replace("<reason>", ".+")
        patterns.add(re.sub(r"\\{(.+?)\\}", lambda m: f"({m[1].replace(',', '|')})", escaped))
    patterns |= {f"{stem}{suffix}" for stem in ("policy/approx_kl", "policy/ref_kl") for suffix in ("_k1", "_k3")}
    for path in sorted((ROOT / "metrics").glob("*.json")):
        if path.stem != "eval":  # docs/evaluation.md has those
            for key in metrics(path.stem):
                assert any(re.fullmatch(pattern, key) for pattern in patterns), f"{key} of metrics/{path.name}"


def test_the_readme_shows_these_figures() -> None:
    """Of "Is my loss normal?": every figure with the digits that stand there, the first ones of reinforcement from its curves."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Is my loss normal?")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == 8
    for stage, at_the_start, at_the_end in rows:
        stage = stage.strip("`")
        last = metrics(stage)
        first = {
            **read_csv(ROOT / "plots" / f"{stage}.csv").iloc[0],
            **{key: last[key] for key in last if key.endswith("_start")},
        }
        for cell, known in ((at_the_start, first), (at_the_end, last)):
            for key, figure in re.findall(r"`([a-z_/]+)` ([0-9.]+[0-9])", cell):
                digits = len(figure.partition(".")[2])
                assert f"{known[key]:.{digits}f}" == figure, f"README.md, {stage}: {key}"
