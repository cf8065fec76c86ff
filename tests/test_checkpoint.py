"""Files: same weights, same bytes; strict loading; one readable line for every fault."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from pipeline.checkpoint.files import load_meta, load_model, load_state, model_meta, save_model, write_atomically
from pipeline.checkpoint.foreign import load_foreign
from pipeline.checkpoint.lora import load_lora_model, lora_meta
from pipeline.checkpoint.reward import load_reward_model
from pipeline.errors import DataError, NumericsError
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel
from pipeline.model.interop import qwen3_config, stack_experts
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import RopeScaling

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=20,
    max_position_embeddings=32,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    dropout=0.0,
    use_moe=False,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=12,
    norm_topk_prob=False,
    router_aux_loss_coef=0.01,
)
IDS = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(path: Path, model: CausalLM, digest: str = "abc") -> Path:
    save_model(path, model.state_dict(), model_meta("causal_lm", model.config, digest))
    return path


def logits(model: CausalLM) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS)


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert len(error.value.lines) == 1 and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, use_moe=True)])
def test_a_model_comes_back_as_it_was(tmp_path, config):
    model = CausalLM(config, seed=3)
    loaded = load_model(save(tmp_path / "full_sft.pth", model), tokenizer_digest="abc")
    assert loaded.config == config and not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_bytes_do_not_depend_on_name_order_or_process(tmp_path):
    model = CausalLM(CONFIG, seed=3)
    first = save(tmp_path / "pretrain.pth", model).read_bytes()
    backwards = dict(reversed(model.state_dict().items()))
    save_model(tmp_path / "another_name.pth", backwards, model_meta("causal_lm", CONFIG, "abc"))
    assert (tmp_path / "another_name.pth").read_bytes() == first
    assert (tmp_path / "another_name.json").read_bytes() == (tmp_path / "pretrain.json").read_bytes()
    code = (
        "import sys; from pathlib import Path; from pipeline.checkpoint.files import *\n"
        "from pipeline.model.transformer import CausalLM, ModelConfig\n"
        "source, target = map(Path, sys.argv[1:]); model = load_model(source)\n"
        "save_model(target, model.state_dict(), model_meta('causal_lm', model.config, 'abc'))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code, str(tmp_path / "pretrain.pth"), str(tmp_path / "sub" / "x.pth")]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    assert (tmp_path / "sub" / "x.pth").read_bytes() == first
    save(tmp_path / "other.pth", CausalLM(CONFIG, seed=4))
    assert (tmp_path / "other.pth").read_bytes() != first


def test_the_file_is_fp32_flat_and_stores_the_tied_tensor_once(tmp_path):
    model = CausalLM(replace(CONFIG, vocab_size=5000), seed=3)
    path = save(tmp_path / "m.pth", model)
    state = torch.load(path, weights_only=True)
    assert type(state) is dict and list(state) == sorted(model.state_dict())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert state[EMBEDDING].data_ptr() == state[HEAD].data_ptr()
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert weights < path.stat().st_size < weights + 20_000


def test_halves_are_widened_and_views_do_not_drag_their_storage_along(tmp_path):
    large = torch.randn(1000, 1000)
    state = {"b": large[:2, :3], "a": large[0, :4].to(torch.bfloat16), "c": large[:3, :2].T}
    save_model(tmp_path / "v.pth", state, {})
    assert (tmp_path / "v.pth").stat().st_size < 5000
    loaded = load_state(tmp_path / "v.pth")
    assert torch.equal(loaded["b"], large[:2, :3]) and torch.equal(loaded["c"], large[:3, :2].T)
    assert loaded["c"].is_contiguous()
    assert loaded["a"].dtype == torch.float32 and torch.equal(loaded["a"], state["a"].float())


def test_the_description_is_sorted_json(tmp_path):
    save(tmp_path / "m.pth", CausalLM(CONFIG))
    text = (tmp_path / "m.json").read_text(encoding="utf-8")
    meta = json.loads(text)
    assert text == json.dumps(meta, sort_keys=True, indent=2) + "\n"
    assert meta == {"kind": "causal_lm", "tokenizer": "abc", "model": CONFIG.to_dict()}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.pth"
    path.write_bytes(b"old")

    def broken(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, broken)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["m.pth"]


def test_what_does_not_fit_is_named(tmp_path):
    path = save(tmp_path / "m.pth", CausalLM(CONFIG))
    state = load_state(path)
    gone, wrong = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    del state[gone]
    state[wrong] = torch.zeros(3, 16)
    state["extra.weight"] = torch.zeros(1)
    save_model(path, state, model_meta("causal_lm", CONFIG, "abc"))
    with pytest.raises(DataError) as error:
        load_model(path)
    message = one_line(error)
    assert message.startswith(f"{path}: does not fit the model")
    assert f"wrong shape: {wrong} (file [3, 16], model [16, 16])" in message
    assert f"missing: {gone}" in message and "unexpected: extra.weight" in message


def test_another_depth_is_refused(tmp_path):
    path = tmp_path / "m.pth"
    save_model(path, CausalLM(replace(CONFIG, num_hidden_layers=1)).state_dict(), model_meta("causal_lm", CONFIG, "abc"))
    with pytest.raises(DataError, match="missing: model.layers.1.* and 8 more"):
        load_model(path)


def test_untied_weights_are_refused(tmp_path):
    state = {name: tensor.clone() for name, tensor in CausalLM(CONFIG).state_dict().items()}
    state[HEAD] += 1
    save_model(tmp_path / "m.pth", state, model_meta("causal_lm", CONFIG, "abc"))
    with pytest.raises(DataError, match="different, although the model ties them: .*embed_tokens.weight and lm_head.weight"):
        load_model(tmp_path / "m.pth")


def test_another_tokenizer_is_refused(tmp_path):
    path = save(tmp_path / "m.pth", CausalLM(CONFIG), digest="0123456789abcdef")
    with pytest.raises(DataError, match="trained with tokenizer 0123456789ab, but the tokenizer in use is fedcba987654"):
        load_model(path, tokenizer_digest="fedcba9876543210")


@pytest.mark.parametrize("damage", "empty text half head pickle tensor nested numbered absent folder".split())
def test_a_damaged_file_is_one_line(tmp_path, damage):
    path = save(tmp_path / "m.pth", CausalLM(CONFIG))
    content = path.read_bytes()
    if damage in ("absent", "folder"):
        path.unlink()
    if damage == "folder":
        path.mkdir()
    replaced = {
        "empty": b"",
        "text": b"weights, honestly\n" * 20,
        "half": content[: len(content) // 2],
        "head": content[:30],
        "pickle": b"cos\nsystem\n(S'true'\ntR.",
    }
    if damage in replaced:
        path.write_bytes(replaced[damage])
    if damage == "tensor":
        torch.save(torch.zeros(2), path)
    if damage == "numbered":
        torch.save({0: torch.zeros(2)}, path)
    if damage == "nested":
        torch.save({"model": {"a": torch.zeros(2)}, "step": 3}, path)
    with pytest.raises(DataError) as error:
        load_model(path)
    assert one_line(error).startswith(f"{path}: ")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_weights_that_are_not_finite_are_neither_written_nor_loaded(tmp_path, name, value):
    path = tmp_path / "checkpoints" / "full_sft.pth"
    state = CausalLM(CONFIG).state_dict()
    state[name].view(-1)[3] = value
    with pytest.raises(NumericsError) as refused:
        save_model(path, state, model_meta("causal_lm", CONFIG, "abc"))
    assert str(path) in str(refused.value) and f"1 of {len(state)} tensors are not finite ({name})" in str(refused.value)
    assert not path.exists() and not path.with_suffix(".json").exists()
    save(path, CausalLM(CONFIG))
    torch.save(state, path)  # made elsewhere
    for load in (load_model, partial(load_foreign, config=CONFIG)):
        with pytest.raises(DataError) as error:
            load(path)
        assert one_line(error).startswith(f"{path}: 1 of {len(state)} tensors are not finite ({name})")
        assert "stage full_sft made it: lower full_sft.lr" in one_line(error)


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex", "integer", "nan", "infinite"])
def test_a_tensor_that_cannot_be_a_weight_is_named(tmp_path, kind):
    state = CausalLM(CONFIG).state_dict()
    weight = state["model.norm.weight"]
    state["model.norm.weight"] = {
        "sparse": weight.to_sparse(),
        "meta": weight.to("meta"),
        "complex": weight.to(torch.complex64),
        "integer": weight.to(torch.int64),
        "nan": torch.full_like(weight, torch.nan),
        "infinite": torch.full_like(weight, -torch.inf),
    }[kind]
    torch.save(state, tmp_path / "m.pth")
    with pytest.raises(DataError) as error:
        load_foreign(tmp_path / "m.pth", CONFIG)
    assert "model.norm.weight" in one_line(error)


def test_no_flipped_byte_changes_a_weight_silently(tmp_path):
    path = save(tmp_path / "m.pth", CausalLM(CONFIG))
    content, expected = path.read_bytes(), load_model(path).state_dict()
    refused = 0
    for place in range(7, len(content), len(content) // 80):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            state = load_model(path).state_dict()
        except DataError as error:
            assert len(error.lines) == 1
            refused += 1
        else:
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items()), place
    assert refused > 20


@pytest.mark.parametrize("damage", ["absent", "text", "list", "key", "value"])
def test_a_damaged_description_is_one_line(tmp_path, damage):
    path = save(tmp_path / "m.pth", CausalLM(CONFIG))
    beside = tmp_path / "m.json"
    meta = json.loads(beside.read_text(encoding="utf-8"))
    if damage == "absent":
        beside.unlink()
    elif damage == "text":
        beside.write_text("{", encoding="utf-8")
    elif damage == "list":
        beside.write_text("[]", encoding="utf-8")
    elif damage == "key":
        del meta["model"]["head_dim"]
        beside.write_text(json.dumps(meta), encoding="utf-8")
    else:
        meta["model"]["num_key_value_heads"] = 3
        beside.write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_model(path)
    assert one_line(error).startswith(f"{beside}: ")


def test_adapters_come_back_on_their_base(tmp_path):
    base = save(tmp_path / "full_sft.pth", CausalLM(CONFIG, seed=1))
    model = CausalLM(CONFIG, seed=1)
    given = {"rank": 2, "alpha": 5.0, "targets": ["q_proj", "down_proj"]}
    add_lora(model, **given, seed=0)
    with torch.no_grad():
        for tensor in lora_state_dict(model).values():
            tensor.normal_(generator=torch.Generator().manual_seed(9))
    save_model(tmp_path / "lora.pth", lora_state_dict(model), lora_meta(CONFIG, "abc", **given))
    assert all(".lora." in name for name in load_state(tmp_path / "lora.pth"))
    loaded = load_lora_model(base, tmp_path / "lora.pth", tokenizer_digest="abc")
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.allclose(logits(loaded), logits(load_model(base)))
    with pytest.raises(DataError, match="kind 'lora'; expected 'causal_lm'"):
        load_model(tmp_path / "lora.pth")
    save_model(tmp_path / "lora.pth", {}, lora_meta(CONFIG, "abc", **given))
    with pytest.raises(DataError, match="lora.pth: the adapters do not fit the model"):
        load_lora_model(base, tmp_path / "lora.pth")


def test_a_reward_model_comes_back(tmp_path):
    model = RewardModel.from_causal_lm(CausalLM(CONFIG, seed=1), seed=2).eval()
    save_model(tmp_path / "reward.pth", model.state_dict(), model_meta("reward", CONFIG, "abc"))
    loaded = load_reward_model(tmp_path / "reward.pth", tokenizer_digest="abc")
    last = torch.tensor([7, 3])
    with torch.no_grad():
        assert torch.equal(loaded(IDS, last), model(IDS, last))


@pytest.mark.parametrize("dropped", [None, EMBEDDING, HEAD])
def test_foreign_half_precision_weights_load_with_or_without_the_tied_copy(tmp_path, dropped):
    model = CausalLM(CONFIG, seed=1)
    halves = {name: tensor.half() for name, tensor in model.state_dict().items() if name != dropped}
    torch.save(halves, tmp_path / "foreign.pth")
    loaded = load_foreign(tmp_path / "foreign.pth", CONFIG)
    assert loaded.lm_head.weight.dtype == torch.float32
    # Half precision keeps 11 bits; every weight is below 0.125.
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=5e-4, atol=1e-6)
    assert torch.equal(loaded.lm_head.weight, halves[HEAD if dropped == EMBEDDING else EMBEDDING].float())


def test_a_foreign_file_of_another_size_is_one_line(tmp_path):
    torch.save(CausalLM(CONFIG).state_dict(), tmp_path / "foreign.pth")
    with pytest.raises(DataError) as error:
        load_foreign(tmp_path / "foreign.pth", replace(CONFIG, vocab_size=50))
    message = one_line(error)
    assert "model.embed_tokens.weight (file [37, 16], model [50, 16])" in message and "section `model` of params.yaml" in message


YARN = RopeScaling(factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=0.1, attention_factor=1.1)
FORMS = ["folder", "file", "transformers 4"]


def stock_folder(folder: Path, config: ModelConfig) -> CausalLM:
    """A folder that transformers wrote, and the model that it holds."""
    model = CausalLM(config, seed=5)
    kind, family = (
        (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)
        if config.use_moe
        else (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
    )
    stock = family(kind(**qwen3_config(config)))
    stock.load_state_dict(stack_experts(model.state_dict()), strict=True)
    stock.save_pretrained(folder)
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [{}, {"use_moe": True}, {"rope_scaling": YARN, "max_position_embeddings": 64}])
def test_what_transformers_wrote_is_taken_over(tmp_path, form, changes):
    config = replace(CONFIG, **changes)
    model = stock_folder(tmp_path / "stock", config)
    if form == "transformers 4":
        described = json.loads((tmp_path / "stock/config.json").read_bytes())
        rope = described.pop("rope_parameters")
        described["rope_theta"] = rope.pop("rope_theta")
        described["rope_scaling"] = rope if config.rope_scaling else None
        (tmp_path / "stock/config.json").write_text(json.dumps(described), encoding="utf-8")
    path = tmp_path / "stock" / ("" if form == "folder" else "model.safetensors")
    loaded = load_foreign(path, config)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("here", "named"),
    [
        ({"rope_theta": 1e6}, "rope_theta 10000.0 (here 1000000.0)"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06 (here 1e-05)"),
        # 16 = 4 heads of 4 = 2 of 8: no tensor but the norms of a head has another shape
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}, "num_attention_heads 4 (here 2)"),
        ({"rope_scaling": YARN, "max_position_embeddings": 64}, "rope_type default (here yarn)"),
    ],
)
def test_a_description_that_contradicts_is_named(tmp_path, here, named):
    stock_folder(tmp_path, CONFIG)
    with pytest.raises(DataError) as error:
        load_foreign(tmp_path / "model.safetensors", replace(CONFIG, **here))
    assert one_line(error).startswith(f"{tmp_path / 'config.json'}: describes another model") and named in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("attention_bias", True), ("use_sliding_window", True), ("norm_topk_prob", True)]
)
def test_what_this_model_cannot_be_is_named(tmp_path, key, value):
    config = replace(CONFIG, use_moe=True)
    stock_folder(tmp_path, config)
    described = json.loads((tmp_path / "config.json").read_bytes()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(DataError, match=f"{key} {value}"):
        load_foreign(tmp_path, config)


@pytest.mark.parametrize("damage", ["cut", "text", "no description", "no json", "list"])
def test_a_damaged_folder_is_one_line(tmp_path, damage):
    stock_folder(tmp_path, CONFIG)
    weights, description = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:500])
    elif damage == "text":
        weights.write_text("weights, honestly", encoding="utf-8")
    elif damage == "no description":
        description.unlink()
    else:
        description.write_text("{" if damage == "no json" else "[]", encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_foreign(tmp_path, CONFIG)
    assert one_line(error).startswith(str(weights if damage in ("cut", "text") else description))


def test_a_description_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("/proc/self/mem")  # a file that opens and gives EIO
    with pytest.raises(DataError, match=r"a\.json: cannot be read: ") as caught:
        load_meta(tmp_path / "a.pth", "causal_lm")
    assert len(caught.value.lines) == 1
