"""Adapters: which layers, what they compute, what is saved, and merging."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from pipeline.errors import DataError, ParamsError, PipelineError
from pipeline.model.config import ModelConfig
from pipeline.model.interop import qwen3_config
from pipeline.model.lora import LoraLinear, add_lora, load_lora, lora_state_dict, merge_lora
from pipeline.model.transformer import CausalLM

CLOSE = {"rtol": 0.0, "atol": 1e-5}
CONFIG = ModelConfig(
    vocab_size=41,
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
IDS = torch.randint(41, (3, 9), generator=torch.Generator().manual_seed(0))


def make(config: ModelConfig = CONFIG) -> CausalLM:
    model = CausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model.eval()


def scatter(model: CausalLM, seed: int = 3) -> None:
    """As if trained: every adapter tensor random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in lora_state_dict(model).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))


def logits(model: CausalLM) -> Tensor:
    with torch.no_grad():
        return model(IDS)


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does():
    model = make()
    before = logits(model)
    add_lora(model, rank=3, alpha=6.0, targets=["q_proj", "down_proj"], seed=0)
    torch.testing.assert_close(logits(model), before, **CLOSE)
    scatter(model)
    assert (logits(model) - before).abs().max() > 0.1


def test_output_by_hand():
    # W = [[1, 2]], A = [[1, 1]], B = [[3]], alpha / rank = 2 / 1: y = (x1 + 2 x2) + 2 * 3 * (x1 + x2).
    base = torch.nn.Linear(2, 1, bias=False)
    layer = LoraLinear(base, rank=1, alpha=2.0)
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora.A.weight.copy_(torch.tensor([[1.0, 1.0]]))
        layer.lora.B.weight.copy_(torch.tensor([[3.0]]))
    x = torch.tensor([[1.0, 0.0], [0.5, 2.0]])
    torch.testing.assert_close(layer(x), torch.tensor([[7.0], [19.5]]), **CLOSE)
    torch.testing.assert_close(layer.merged()(x), torch.tensor([[7.0], [19.5]]), **CLOSE)


def test_names_and_shapes_of_what_is_saved():
    model = make()
    add_lora(model, rank=3, alpha=6.0, targets=["k_proj", "o_proj"], seed=0)
    shapes = {name: tuple(tensor.shape) for name, tensor in lora_state_dict(model).items()}
    expected = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        expected[f"{prefix}.k_proj.lora.A.weight"] = (3, 16)
        expected[f"{prefix}.k_proj.lora.B.weight"] = (8, 3)
        expected[f"{prefix}.o_proj.lora.A.weight"] = (3, 16)
        expected[f"{prefix}.o_proj.lora.B.weight"] = (16, 3)
    assert shapes == expected


def test_minimind_defaults_adapt_sixteen_modules():
    # q_proj and o_proj, 8 layers, rank 16, width 768: 16 * 2 * 16 * 768 = 393,216 parameters.
    config = replace(
        CONFIG,
        hidden_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=96,
        intermediate_size=64,
    )
    model = CausalLM(config)
    add_lora(model, rank=16, alpha=16.0, targets=["q_proj", "o_proj"], seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 32 and sum(parameter.numel() for parameter in trained) == 393_216


def test_only_the_adapters_train():
    model = make().train()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_lora(model, rank=2, alpha=2.0, targets=["v_proj"], seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in base.items())
    assert all(tensor.abs().max() > 0.05 for name, tensor in state.items() if name.endswith("lora.B.weight"))


def test_initial_adapters_depend_on_the_seed_alone():
    states = []
    for noise, seed in ((1, 5), (2, 5), (3, 6)):
        torch.manual_seed(noise)
        model = make()
        add_lora(model, rank=8, alpha=8.0, targets=["q_proj", "up_proj"], seed=seed)
        states.append(lora_state_dict(model))
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    a = torch.cat([tensor.flatten() for name, tensor in first.items() if ".A." in name])
    # 512 draws: the standard error of the deviation is 6e-4.
    assert abs(a.std().item() - 0.02) < 3e-3
    assert all(not tensor.any() for name, tensor in first.items() if ".B." in name)
    assert not torch.equal(a, torch.cat([tensor.flatten() for name, tensor in other.items() if ".A." in name]))


def test_adapters_survive_the_state_dict():
    model = make()
    add_lora(model, rank=3, alpha=12.0, targets=["q_proj", "gate_proj"], seed=0)
    scatter(model)
    saved = {name: tensor.clone() for name, tensor in lora_state_dict(model).items()}
    twin = make()
    load_lora(twin, saved, {"rank": 3, "alpha": 12.0, "targets": ["q_proj", "gate_proj"]})
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, use_moe=True)])
def test_merged_equals_adapted_and_is_an_ordinary_model(config):
    model = make(config)
    keys = list(model.state_dict())
    add_lora(model, rank=3, alpha=4.5, targets=["q_proj", "down_proj"], seed=0)
    scatter(model)
    adapted = logits(model)
    merge_lora(model)
    torch.testing.assert_close(logits(model), adapted, **CLOSE)
    assert list(model.state_dict()) == keys
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(PipelineError, match="no adapters"):
        merge_lora(model)


def test_the_router_is_no_target():
    model = make(replace(CONFIG, use_moe=True))
    with pytest.raises(ParamsError, match="'gate' is no layer of the model; allowed are down_proj, gate_proj"):
        add_lora(model, rank=2, alpha=2.0, targets=["gate"], seed=0)
    add_lora(model, rank=2, alpha=2.0, targets=["gate_proj"], seed=0)
    assert len(lora_state_dict(model)) == 2 * 2 * 2  # layers, experts, A and B


def test_faults_are_one_line():
    model = make()
    add_lora(model, rank=2, alpha=2.0, targets=["q_proj"], seed=0)
    saved = dict(lora_state_dict(model))
    with pytest.raises(ParamsError, match="adapters already"):
        add_lora(model, rank=2, alpha=2.0, targets=["q_proj"], seed=0)
    name = "model.layers.0.self_attn.q_proj.lora.A.weight"
    meta = {"rank": 2, "alpha": 2.0, "targets": ["q_proj"]}
    missing = {key: tensor for key, tensor in saved.items() if key != name}
    for broken in (missing, {**saved, name: torch.zeros(5, 16)}):
        with pytest.raises(DataError, match=rf"\(1\): {name}") as caught:
            load_lora(make(), broken, meta)
        assert len(caught.value.lines) == 1
    with pytest.raises(DataError):
        load_lora(make(), saved, {**meta, "targets": ["q_proj", "k_proj"]})


def test_outputs_equal_peft():
    peft = pytest.importorskip("peft")
    model = make()
    base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**qwen3_config(CONFIG)))
    base.load_state_dict(model.state_dict(), strict=True)
    targets = ["q_proj", "v_proj", "down_proj"]
    twin = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, lora_dropout=0.0)).eval()
    add_lora(model, rank=3, alpha=7.0, targets=targets, seed=0)
    scatter(model)
    renamed = {
        "base_model.model." + name.replace(".lora.A.", ".lora_A.default.").replace(".lora.B.", ".lora_B.default."): tensor
        for name, tensor in lora_state_dict(model).items()
    }
    result = twin.load_state_dict(renamed, strict=False)
    assert not result.unexpected_keys and not any("lora" in name for name in result.missing_keys)
    with torch.no_grad():
        torch.testing.assert_close(logits(model), twin(IDS).logits, **CLOSE)
        merge_lora(model)
        torch.testing.assert_close(logits(model), twin.merge_and_unload()(IDS).logits, **CLOSE)
