"""What is said before hours of work: missing sources, runs that end within their warm-up, memory and time of a step, results."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import __main__ as command_line
from pipeline.diagnosis.findings import Severity
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import CausalLM
from pipeline.params import Params, load_params
from pipeline.params.load import parse_params
from pipeline.params.needs import FLOAT_BYTES, kept_bytes, needs
from pipeline.reading import machine
from pipeline.stage import stage_process, stage_run
from pipeline.tracking import outlook
from pipeline.tracking.outlook import expected, heavy, missing_sources, never_warm
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
QUIET = {"device": "cpu", "threads": 1, "mlflow": False, "guard": "off"}


def params(profile: str = "micro", **changes: Any) -> Params:
    """A profile with sections replaced in part."""
    tree = read_yaml(ROOT / f"profiles/{profile}.yaml")
    return parse_params({name: body | changes.get(name, {}) for name, body in tree.items()})


def test_sources_that_do_not_exist_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(text.replace("source: data/world.yaml", "source: data/typo.jsonl", 1), encoding="utf-8")
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data/world.yaml", tmp_path / "data/world.yaml")
    (line,) = missing_sources(load_params(tmp_path / "params.yaml"), tmp_path)
    assert line == "data.sets.pretrain.source=data/typo.jsonl: no such file; data@pretrain cannot run without it"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline", "check"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert not ended.value.code and f"warning: {line}" in capsys.readouterr().out


def test_a_run_that_ends_within_its_warm_up_is_named(tmp_path: Path) -> None:
    """7 rows in batches of 2, 2 of which are a step: 2 steps an epoch."""
    for folder, rows in {"data/encoded/pretrain": 7, "data/prepared/rlaif": 7}.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "report.json").write_text(json.dumps({"train": rows}), encoding="utf-8")
    small = {"epochs": 3, "batch_size": 2}
    warm = params(pretrain=small | {"accumulation_steps": 2, "warmup_steps": 5}, grpo=small | {"warmup_steps": 11})
    assert [line for line in never_warm(warm, tmp_path) if line.startswith(("pretrain", "grpo"))] == []
    cold = params(pretrain=small | {"accumulation_steps": 2, "warmup_steps": 6}, grpo=small | {"warmup_steps": 9, "max_steps": 9})
    named = [line.partition(";")[0] for line in never_warm(cold, tmp_path) if line.startswith(("pretrain", "grpo"))]
    assert named == [
        "pretrain.warmup_steps=6: the run has 6 steps and ends before its rate is pretrain.lr",
        "grpo.warmup_steps=9: the run has 9 steps and ends before its rate is grpo.lr",
    ]
    critic = params(ppo=small | {"mini_batch_size": 2, "max_steps": None, "warmup_steps": 0, "critic_warmup_steps": 12})
    (line,) = (line for line in never_warm(critic, tmp_path) if line.startswith("ppo"))
    assert line.startswith("ppo.critic_warmup_steps=12: the run has 12 steps and ends before the policy is trained")


@pytest.mark.parametrize("warmup", [4, 5])
def test_a_stage_says_so_when_it_starts_and_ends_with_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warmup: int
) -> None:
    runtime = params(runtime=QUIET).runtime
    with stage_run("pretrain", params={"pretrain": {"warmup_steps": warmup}}, inputs=[], runtime=runtime, root=tmp_path) as run:
        with run.progress(5):
            pass
        (tmp_path / "metrics").mkdir()
        (tmp_path / "metrics/pretrain.json").write_text('{"val/loss": 2.345678, "val/loss_start": 7.0, "train/loss": 2.0}')
    said = capsys.readouterr().err
    assert ("warning: pretrain.warmup_steps=5: the run has 5 steps" in said) == (warmup == 5)
    assert said.splitlines()[-1] == "pretrain: done, val/loss 2.346, val/loss_start 7"


def test_stages_without_a_run_end_with_their_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {
        "data@dpo": (
            "data/prepared/dpo/report.json",
            {"train": 40, "held_out": 2, "dropped": 1},
            "40 rows, 2 held out, 1 dropped",
        ),
        "eval": ("metrics/eval.json", {"agent": {"tool_success": 0.61234}, "full_sft": {}}, "agent tool_success 0.6123"),
        "tokenizer": ("metrics/tokenizer.json", {"tokenizer/bytes_per_token": 3.0}, "tokenizer/bytes_per_token 3"),
    }
    for stage, (name, value, words) in written.items():
        with stage_process(stage, root=tmp_path):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
        assert capsys.readouterr().err == f"{stage}: done, {words}\n"
    with pytest.raises(SystemExit), stage_process("eval", root=tmp_path):
        raise ValueError
    assert "done" not in capsys.readouterr().err


@pytest.mark.parametrize("use_moe", [False, True])
def test_activations_are_those_that_autograd_keeps(use_moe: bool) -> None:
    """Counted by torch's own hooks; weights, which it keeps too, are not counted twice."""
    changed = params("minimind", model={"num_hidden_layers": 2, "use_moe": use_moe})
    own = changed.model.model_dump()
    model = CausalLM(ModelConfig.from_dict({**own, "vocab_size": 300, "max_position_embeddings": 64})).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(ids)
    assert hidden.requires_grad
    assert ids.numel() * kept_bytes(changed, FLOAT_BYTES) == pytest.approx(sum(kept.values()), rel=0.15)


def test_memory_disk_and_time_belong_to_the_parameters() -> None:
    """64M weights: saves of three copies of them; 87,040 tokens a step of pretrain, 6 operations a weight and token."""
    large = {each.stage: each for each in needs(params("minimind"))}
    weights = 63_912_192
    assert large["pretrain"].save == 3 * 4 * weights and large["ppo"].save == 2 * 3 * 4 * weights
    assert large["grpo"].output == 4 * weights and large["lora"].output < weights
    assert large["pretrain"].flops == pytest.approx(6 * weights * 32 * 8 * 340, rel=0.05)
    assert 7e9 < large["pretrain"].memory < 9.5e9  # 8.8 GB with the process were measured
    halved = {each.stage: each for each in needs(params("minimind", pretrain={"batch_size": 16}))}["pretrain"]
    saved = {each.stage: each for each in needs(params("minimind", runtime={"gradient_checkpointing": True}))}["pretrain"]
    assert halved.flops == large["pretrain"].flops / 2 and halved.memory < large["pretrain"].memory
    assert saved.memory < 3e9 and saved.flops == pytest.approx(large["pretrain"].flops * 4 / 3)


def test_a_step_that_is_too_large_or_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "_flops_per_s", lambda cuda, half: 1e11)
    (step,) = expected(params("minimind", runtime=QUIET), "pretrain")
    assert (
        heavy(replace(step, free=10**12))
        == "a step takes up to 8.1 GB of memory and about 345 s where rows are as long as they may be"
    )
    assert "and 1.0 GB are free; lower pretrain.batch_size, or set runtime.gradient_checkpointing" in str(
        heavy(replace(step, free=10**9))
    )
    assert heavy(replace(step, free=10**12, seconds=29.0)) is None
    severities = [line.severity for line in machine.check_steps(params("micro", runtime=QUIET))]
    assert severities[-1] is Severity.OK
    assert [line.severity for line in machine.check_steps(params("minimind", runtime=QUIET))][0] is Severity.WARN
