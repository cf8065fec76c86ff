"""A mistake in params.yaml is one line that names its place, in a moment, before any heavy import."""

import copy
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from ruamel.yaml import YAML

from pipeline.data.draws import permutation
from pipeline.errors import ParamsError
from pipeline.evaluation.statistics import mean, proportion
from pipeline.maths.preference import dpo_loss
from pipeline.model.config import ModelConfig
from pipeline.model.rope import rope_frequencies
from pipeline.params import Params, load_params, parse_params
from pipeline.params.schema import ModelParams, Optimizer
from pipeline.training.policy_setup import rows_in_memory
from pipeline.training.updater import Updater
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
TREE = read_yaml(ROOT / "params.yaml")


def changed(key: str, value: Any, tree: dict[str, Any] = TREE) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    *path, last = key.split(".")
    section = tree
    for part in path:
        section = section[part]
    section[last] = value
    return tree


def fault(tree: Any) -> str:
    with pytest.raises(ParamsError) as caught:
        parse_params(tree)
    assert len(caught.value.lines) == 1
    assert "\n" not in caught.value.lines[0]
    assert caught.value.exit_code == 2
    return caught.value.lines[0]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("grpo.group_sise", 4, "grpo.group_sise: unknown key; did you mean `group_size`?"),
        ("model.rope_tetha", 1.0, "model.rope_tetha: unknown key; did you mean `rope_theta`?"),
        ("gpro", {}, "gpro: unknown key; did you mean `grpo`?"),
        ("data.sets.pretain", {"source": "x"}, "data.sets.pretain: unknown key; did you mean `pretrain`?"),
        ("rewards.length.zzz", 1, "rewards.length.zzz: unknown key; known here: min_chars, max_chars, weight, penalty"),
        ("grpo.group_size", 1, "grpo.group_size=1: "),
        ("grpo.group_size", "8", "grpo.group_size='8': "),
        ("grpo.group_size", 8.0, "grpo.group_size=8.0: "),
        ("grpo.loss", "gspoo", "grpo.loss='gspoo': "),
        ("pretrain.lr", 0.0, "pretrain.lr=0.0: "),
        ("pretrain.lr", float("nan"), "pretrain.lr=nan: "),
        ("pretrain.lr", float("inf"), "pretrain.lr=inf: "),
        ("pretrain.epochs", True, "pretrain.epochs=True: "),
        ("pretrain.epochs", None, "pretrain.epochs=None: "),
        ("pretrain", 3, "pretrain=3: "),
        ("data.held_out_frac", 1.0, "data.held_out_frac=1.0: "),
        ("lora.targets", [], "lora.targets=[]: "),
        ("runtime.device", "gpu", "runtime.device='gpu': "),
        ("model.head_dim", 33, "model.head_dim=33: "),
        ("model.num_key_value_heads", 3, "model.num_key_value_heads=3: must divide num_attention_heads=4"),
        ("model.num_experts_per_tok", 5, "model.num_experts_per_tok=5: must be <= num_experts=4"),
        ("ppo.mini_batch_size", 60000, "ppo.mini_batch_size=60000: must be <= batch_size="),
        ("rewards.length.min_chars", 801, "rewards.length.min_chars=801: must be <= max_chars=800"),
        ("agent.max_total_len", 10, "agent.max_total_len=10: must hold max_prompt_len + max_new_tokens = "),
        ("full_sft.max_seq_len", 10**6, "full_sft.max_seq_len=1000000: must be <= model.max_position_embeddings="),
        ("grpo.max_new_tokens", 10**6, "grpo.max_prompt_len + grpo.max_new_tokens = "),
        ("eval.max_new_tokens", 2048, "eval.max_new_tokens=2048: must be < model.max_position_embeddings=2048"),
        ("ppo.critic_warmup_steps", 13, "ppo.critic_warmup_steps=13: must be < max_steps=13"),
        *((f"{name}.temperature", 0.0099, f"{name}.temperature=0.0099: ") for name in ("ppo", "grpo", "agent", "eval")),
        ("grpo.temperature", 1e-42, "grpo.temperature=1e-42: "),
        ("model.rope_theta", 1.0, "model.rope_theta=1.0: "),
        ("model.rope_theta", float("inf"), "model.rope_theta=inf: "),
        ("grpo.epochs", 0, "grpo.epochs=0: "),
        ("lora.epochs", 0, "lora.epochs=0: "),
        ("pretrain.epochs", 0, "pretrain.epochs=0: must be >= 1 with init_from: null"),
    ],
)
def test_fault_is_one_line_with_path_and_remedy(key: str, value: Any, said: str) -> None:
    assert fault(changed(key, value)).startswith(f"params.yaml: {said}")


def test_absent_key_is_named() -> None:
    tree = copy.deepcopy(TREE)
    del tree["dpo"]["beta"]
    assert fault(tree).startswith("params.yaml: dpo.beta: missing")


def test_every_fault_is_reported_at_once() -> None:
    tree = changed("grpo.lr", -1.0)
    tree["dpo"]["beta"] = "x"
    with pytest.raises(ParamsError) as caught:
        parse_params(tree)
    assert [line.split("=")[0] for line in caught.value.lines] == ["params.yaml: dpo.beta", "params.yaml: grpo.lr"]


def test_every_impossible_combination_is_reported_at_once() -> None:
    tree = changed("model.max_position_embeddings", 100)
    with pytest.raises(ParamsError) as caught:
        parse_params(tree)
    said = [line.removeprefix("params.yaml: ").split("=")[0].strip() for line in caught.value.lines]
    lengths = [f"{name}.max_seq_len" for name in ("pretrain", "full_sft", "lora", "dpo")]
    sums = [f"{name}.max_prompt_len + {name}.max_new_tokens" for name in ("ppo", "grpo")]
    assert said == [*lengths, *sums, "agent.max_total_len", "eval.max_new_tokens"]
    with pytest.raises(ParamsError, match="ppo.batch_size=1: must be >= 2, advantages are whitened"):
        parse_params(changed("ppo.batch_size", 1, changed("ppo.mini_batch_size", 1)))
    tree = changed("ppo.mini_batch_size", 60000, changed("ppo.critic_warmup_steps", 99))
    with pytest.raises(ParamsError) as caught:
        parse_params(changed("model.num_key_value_heads", 3, tree))
    assert [line.split("=")[0].removeprefix("params.yaml: ") for line in caught.value.lines] == [
        "model.num_key_value_heads",
        "ppo.mini_batch_size",
        "ppo.critic_warmup_steps",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"eval.max_new_tokens": 2047},
        {"ppo.critic_warmup_steps": 10},
        {"ppo.critic_warmup_steps": 99, "ppo.max_steps": None},
        {"pretrain.epochs": 0, "pretrain.init_from": "a.pth"},
        {"full_sft.epochs": 0},  # takes pretrain's weights over
        {"model.rope_theta": 1.5},
        {"ppo.temperature": 0.01, "grpo.temperature": 0.01, "agent.temperature": 0.01, "eval.temperature": 0.01},
    ],
)
def test_what_lies_just_inside_is_accepted(changes: dict[str, Any]) -> None:
    tree = TREE
    for key, value in changes.items():
        tree = changed(key, value, tree)
    parse_params(tree)


def renamed(*path: str, to: str) -> dict[str, Any]:
    tree = copy.deepcopy(TREE)
    section = tree
    for part in path[:-1]:
        section = section[part]
    section[to] = section.pop(path[-1])
    return tree


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (renamed("grpo", "group_size", to="group_sise"), "grpo.group_sise: unknown key; did you mean `group_size`?"),
        # `plot_every` is there, so the one that is missing was meant
        (
            renamed("ppo", "sample_every", to="plots_every"),
            "ppo.plots_every: unknown key; did you mean `sample_every`?",
        ),
        (renamed("grpo", to="gpro"), "gpro: unknown key; did you mean `grpo`?"),
        (
            renamed("rewards", "length", "min_chars", to="min_char"),
            "rewards.length.min_char: unknown key; did you mean `min_chars`?",
        ),
    ],
)
def test_a_misspelt_key_is_not_missing_too(tree: dict[str, Any], said: str) -> None:
    assert fault(tree) == f"params.yaml: {said}"


def test_a_key_that_resembles_none_does_not_hide_a_missing_one() -> None:
    with pytest.raises(ParamsError) as caught:
        parse_params(renamed("grpo", "group_size", to="zzz"))
    assert sorted(line.split(":")[1].strip() for line in caught.value.lines) == ["grpo.group_size", "grpo.zzz"]


def test_file_that_is_no_mapping_no_yaml_or_absent(tmp_path: Path) -> None:
    for text, said in (
        ("- 1\n", "must be a mapping"),
        ("a: [1\n", "not readable as YAML"),
        ("a: 1\na: 2\n", "not readable as YAML"),
    ):
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ParamsError, match=said) as caught:
            load_params(tmp_path / "params.yaml")
        assert "\n" not in str(caught.value)
    with pytest.raises(ParamsError, match="python -m pipeline use micro"):
        load_params(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "[" * 3000 + "]" * 3000,
        "{a: " * 3000 + "}" * 3000,
        "!!int ten",
        "!!bool maybe",
        "!!float ''",
        "2001-06-31",
        "9" * 5000,
        '"\\UFFFFFFFF"',
    ],
)
def test_values_that_the_reader_chokes_on_are_one_line(tmp_path: Path, value: str) -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8").replace("max_rows_per_set: 10000", f"max_rows_per_set: {value}")
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ParamsError, match="params.yaml: not readable as YAML: ") as caught:
        load_params(tmp_path / "params.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [10, 50, 100, 150, 200, 300, 500])
def test_nesting_of_any_depth_is_one_line(tmp_path: Path, depth: int) -> None:
    """The reader, the validation and the message recurse, and none may end in a traceback where the others still can."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(text.replace("epochs: 12", "epochs: " + "[" * depth + "]" * depth, 1), encoding="utf-8")
    with pytest.raises(ParamsError) as caught:
        load_params(tmp_path / "params.yaml")
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_aliases_and_enormous_values_are_shown_in_short() -> None:
    billion: Any = "x"
    for _ in range(30):
        billion = [billion] * 9
    endless: dict[str, Any] = {}
    endless["sets"] = endless
    for key, value in (("pretrain.epochs", billion), ("pretrain.epochs", 10**5000), ("reward.external", [endless])):
        line = fault(changed_in_place(key, value))
        assert line.startswith(f"params.yaml: {key}=") and len(line) < 200
    with pytest.raises(ParamsError) as caught:
        parse_params({**TREE, "data": endless})
    assert all("\n" not in line and len(line) < 200 for line in caught.value.lines)


def changed_in_place(key: str, value: Any) -> dict[str, Any]:
    """As `changed`, without a copy of what is shared inside `value`."""
    section, name = key.split(".")
    return {**TREE, section: {**TREE[section], name: value}}


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").mkdir()
    with pytest.raises(ParamsError, match=r"params\.yaml: cannot be read: Is a directory"):
        load_params(tmp_path / "params.yaml")
    with pytest.raises(ParamsError, match="cannot be read: File name too long"):
        load_params(tmp_path / ("x" * 5000))


def test_values_are_frozen_and_read_as_yaml_1_2() -> None:
    params = parse_params(TREE)
    with pytest.raises(ValueError, match="frozen"):
        params.grpo.lr = 1.0  # type: ignore[misc]
    assert isinstance(YAML(typ="safe", pure=True).load("1e-4"), float)


KINDS = {
    "tokenizer.init_from": "folder",
    "pretrain.init_from": "file or folder",
    "full_sft.init_from": "file or folder",
    "reward.external": "folder",
    "tools.extra": "file",
}


def written(root: Path, key: str, value: str) -> Path:
    with open(root / "params.yaml", "w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(changed(key, value), file)
    return root / "params.yaml"


@pytest.mark.parametrize(("key", "kind"), KINDS.items())
def test_foreign_weights_must_lie_below_external(tmp_path: Path, key: str, kind: str) -> None:
    (tmp_path / "external/there").mkdir(parents=True)
    (tmp_path / "external/there.pth").write_text("")
    (tmp_path / "external/None").write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside.pth").write_text("")
    good, other_kind, outside = (
        ("there", "there.pth", "../outside") if kind == "folder" else ("there.pth", "there", "../outside.pth")
    )
    section, name = key.split(".")
    assert getattr(getattr(load_params(written(tmp_path, key, good)), section), name) == good
    for bad in ("absent", other_kind) if kind in ("file", "folder") else ("absent",):
        with pytest.raises(ParamsError, match=f"{key}='{bad}': no such {kind}: external/{bad}"):
            load_params(written(tmp_path, key, bad))
    for bad in (outside, str(tmp_path / good), "None", "", "."):
        with pytest.raises(ParamsError, match=f"{key}=.*: must be null or a path relative to external/"):
            load_params(written(tmp_path, key, bad))


@pytest.mark.parametrize("key", ["pretrain.init_from", "full_sft.init_from"])
@pytest.mark.parametrize("named", ["stock", "stock/model.safetensors"])
def test_weights_of_transformers_need_their_description(tmp_path: Path, key: str, named: str) -> None:
    folder = tmp_path / "external/stock"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ParamsError, match=f"{key}='{named}': without config.json; a folder needs model.safetensors"):
        load_params(written(tmp_path, key, named))
    (folder / "config.json").write_bytes(b"{}")
    load_params(written(tmp_path, key, named))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    missing = "no such file" if "/" in named else "without model.safetensors"
    with pytest.raises(ParamsError, match=missing):
        load_params(written(tmp_path, key, named))


SOURCES = [f"data.sets.{name}.source" for name in TREE["data"]["sets"]]


@pytest.mark.parametrize("key", [*KINDS, *SOURCES])
def test_a_name_that_no_file_can_have_is_one_short_line(tmp_path: Path, key: str) -> None:
    with pytest.raises(ParamsError) as caught:
        load_params(written(tmp_path, key, "x" * 5000))
    assert str(caught.value) == f"params.yaml: {key}='{'x' * 56}...: File name too long"


def test_sources_may_be_absent_until_their_stage_runs(tmp_path: Path) -> None:
    assert load_params(written(tmp_path, SOURCES[0], "absent.jsonl")).data.sets.pretrain.source == "absent.jsonl"


def test_stage_refuses_before_heavy_imports(tmp_path: Path) -> None:
    """The script of any stage, in a folder whose params.yaml has a typo: exit code 2, one line, quickly."""
    stages = sorted(path.stem for path in (ROOT / "stages").glob("*.py") if path.stem not in ("__init__", "code"))
    (tmp_path / "params.yaml").write_text(
        (ROOT / "params.yaml").read_text(encoding="utf-8").replace("group_size:", "group_sise:", 1)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in {stages[0], stages[-1]}:
        start = time.perf_counter()
        command = [sys.executable, "-X", "importtime", "-m", f"stages.{name}"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        lines = done.stderr.splitlines()
        assert done.returncode == 2
        assert not [
            line for line in lines if line.startswith("import time:") and line.split("|")[-1].strip() in ("torch", "mlflow")
        ]
        said = [line for line in lines if not line.startswith("import time:")]
        assert said[-1].endswith("params.yaml: grpo.group_sise: unknown key; did you mean `group_size`?")
        assert len(said) == 1
        assert seconds < 3


def numbers(model: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, type, bool]]:
    """Key, int or float, and whether it is a seed, of every number in the schema."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        kinds += [inner for kind in kinds for inner in getattr(kind, "__args__", ())]
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if nested:
            yield from numbers(nested[0], f"{prefix}{name}.")
        elif int in kinds or float in kinds:
            yield f"{prefix}{name}", int if int in kinds else float, name == "seed"


NUMBERS = list(numbers())
YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
SCALED = changed("model.rope_scaling", YARN, changed("model.max_position_embeddings", 4096))


def as_given(key: str, value: Any) -> Any:
    return [0.9, value] if key.endswith(".betas") else value


@pytest.mark.parametrize(("key", "kind", "is_seed"), NUMBERS)
def test_every_number_has_an_upper_bound(key: str, kind: type, is_seed: bool) -> None:
    values = [2**53 + 1, 2**63, 10**400] if is_seed else [2**53, 2**63, 10**400] if kind is int else [1e308, 1e30]
    for value in values:
        with pytest.raises(ParamsError) as caught:
            parse_params(changed(key, as_given(key, value), SCALED))
        assert any(line.startswith(f"params.yaml: {key}") for line in caught.value.lines), caught.value.lines


EDGES = [0, 1, 2, 3, 7, 8, 64, 1000, 2**16, 2**20, 10**9, 2**31, 2**53, 2**63]
FLOAT_EDGES = [5e-324, 1e-300, 1e-12, 1e-6, 0.1, 0.49, 0.5, 0.99, 1 - 1e-16, 1.0, 1 + 3e-16, 2.0, 1e6, 1e10, 1e308]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_check_accepts_the_stages_can_compute_with(data: st.DataObject) -> None:
    tree, sections = SCALED, set()
    for key, kind, _ in data.draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3)):
        sections.add(key.split(".")[0])
        edges = st.sampled_from(EDGES) if kind is int else st.sampled_from(FLOAT_EDGES)
        value = data.draw(edges | (st.integers(0, 10**10) if kind is int else st.floats(0, 1e12)))
        tree = changed(key, as_given(key, value), tree)
    try:
        params = parse_params(tree)
    except ParamsError as error:
        assert all(line.startswith("params.yaml: ") for line in error.lines)
        return
    for name in sections:
        if isinstance(section := getattr(params, name), Optimizer):
            check_optimizer(section)
    for section in (params.ppo, params.grpo, params.agent):
        longest = getattr(section, "max_total_len", section.max_prompt_len + section.max_new_tokens)
        assert rows_in_memory(ModelConfig.from_params(params.model, 1024), section, torch.float32, longest) >= 1
        assert torch.softmax(torch.tensor([3.0, -30.0]) / section.temperature, 0).isfinite().all()
    check_losses(params)
    check_rotations(params.model)
    low = mean([0.0, 0.5, 1.0], params.eval.confidence)
    assert math.isfinite(low.value) and low.low <= low.value <= low.high
    assert proportion([True, False], params.eval.confidence).high <= 1


def check_optimizer(section: Optimizer) -> None:
    """Every epoch has a plan, every step a rate, and a step leaves finite weights."""
    per_epoch = -(-10_000 // section.batch_size)
    assert sorted(permutation(section.seed, section.epochs, "rows", 5)) == [0, 1, 2, 3, 4]
    total = max(1, section.epochs * per_epoch)
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.data.fill_(0.02)
    updater = Updater(module, section, total_steps=total)
    assert all(0 <= updater.lr_at(step) <= section.lr for step in (0, section.warmup_steps, total - 1, total))
    for step in range(2):
        module.weight.grad = torch.full((2, 2), 0.3)
        assert updater.update(step, context="").applied
    assert module.weight.isfinite().all()


def check_losses(params: Params) -> None:
    loss, _ = dpo_loss(
        torch.tensor([-1.0, -30.0, -2.0, -3.0]),
        torch.tensor([-1.5, -2.0, -2.0, -3.5]),
        beta=params.dpo.beta,
        loss=params.dpo.loss,
        label_smoothing=params.dpo.label_smoothing,
        num_pairs=2,
    )
    assert loss.isfinite()


def check_rotations(model: ModelParams) -> None:
    frequencies = rope_frequencies(ModelConfig.from_params(model, 1024))
    assert (frequencies * (model.max_position_embeddings - 1)).isfinite().all()
