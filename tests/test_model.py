"""The decoder against transformers, the reference project's files, hand arithmetic and itself under transformations."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from reference import FOLDER, models
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from pipeline.checkpoint.foreign import load_foreign
from pipeline.errors import ParamsError
from pipeline.model import transformer
from pipeline.model.config import ModelConfig
from pipeline.model.heads import RewardModel, ValueModel
from pipeline.model.interop import qwen3_config, stack_experts, unstack_experts
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.norm import RMSNorm
from pipeline.model.rope import apply_rope, rope_frequencies, rope_tables
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import ModelParams, RopeScaling
from pipeline.params.sizes import num_parameters

ROOT = Path(__file__).parents[1]
CLOSE = {"rtol": 0.0, "atol": 1e-5}

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    max_position_embeddings=64,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    dropout=0.0,
    use_moe=False,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    norm_topk_prob=True,
    router_aux_loss_coef=0.01,
)
MOE = replace(SMALL, use_moe=True)
YARN = RopeScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=1.0, attention_factor=1.3)


def make(config: ModelConfig, seed: int = 0) -> CausalLM:
    """A model whose every parameter matters: wide random matrices, norms away from 1."""
    model = CausalLM(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model.eval()


def tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def stock(model: CausalLM) -> Any:
    """The same weights in transformers' own class."""
    values = qwen3_config(model.config)
    if model.config.use_moe:
        twin = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values))
    else:
        twin = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))
    twin.load_state_dict(stack_experts(model.state_dict()), strict=True)
    return twin.eval()


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    head_dim=st.sampled_from([2, 8, 10]),
    layers=st.integers(1, 3),
    theta=st.sampled_from([1e4, 1e6]),
    use_moe=st.booleans(),
    top_k=st.integers(1, 4),
    norm_topk_prob=st.booleans(),
    length=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_logits_equal_transformers(heads, head_dim, layers, theta, use_moe, top_k, norm_topk_prob, length, seed):
    config = replace(
        SMALL,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        num_hidden_layers=layers,
        rope_theta=theta,
        use_moe=use_moe,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk_prob,
    )
    model = make(config, seed)
    ids = tokens(config, 3, length, seed)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), stock(model)(ids).logits, **CLOSE)


def test_yarn_equals_transformers():
    config = replace(SMALL, head_dim=16, rope_scaling=YARN)
    model = make(config)
    ids = tokens(config, 2, 60)
    with torch.no_grad():
        expected = stock(model)(ids).logits
        torch.testing.assert_close(model(ids), expected, **CLOSE)
        plain = make(replace(config, rope_scaling=None))(ids)
    assert (plain - expected).abs().max() > 0.1


def test_yarn_band_is_the_published_one():
    # d = 96, theta 1e6, window 2048, beta 32 and 1: dimensions up to 8 keep their frequency, from 21 on they are divided by 16.
    scaling = RopeScaling(factor=16.0, original_max_position_embeddings=2048, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0)
    config = replace(SMALL, head_dim=96, rope_theta=1e6, max_position_embeddings=32768, rope_scaling=scaling)
    ratio = rope_frequencies(replace(config, rope_scaling=None)) / rope_frequencies(config)
    torch.testing.assert_close(ratio[:9], torch.ones(9), **CLOSE)
    torch.testing.assert_close(ratio[21:], torch.full((27,), 16.0), **CLOSE)
    assert 1.0 < ratio[9] < ratio[20] < 16.0


def test_yarn_stretches_the_slowest_pair_in_part_where_the_band_leaves_the_head():
    # d = 8, theta 100, window 2048: low = floor(2.02) = 2, high = ceil(5.03) = 6; of pairs 0 to 3 the last has ramp 1/4,
    # and 1 / (1 - 1/4 + 1/4 / 4) = 16 / 13.
    scaling = RopeScaling(factor=4.0, original_max_position_embeddings=2048, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0)
    config = replace(SMALL, head_dim=8, rope_theta=100.0, max_position_embeddings=4096, rope_scaling=scaling)
    ratio = rope_frequencies(replace(config, rope_scaling=None)) / rope_frequencies(config)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.0, 1.0, 16 / 13]), **CLOSE)


def yarn_section(
    head_dim: int, theta: float, window: int, longer: int, betas: tuple[float, float], factor: float
) -> dict[str, Any]:
    """Section `model` of a parameter file, with YaRN."""
    names = ModelParams.model_fields
    scaling = {"factor": factor, "original_max_position_embeddings": window, "attention_factor": 1.1}
    return {
        **{name: getattr(SMALL, name) for name in names},
        "head_dim": head_dim,
        "rope_theta": theta,
        "max_position_embeddings": window + longer,
        "rope_scaling": scaling | {"beta_fast": betas[0], "beta_slow": betas[1]},
    }


@settings(max_examples=300, deadline=None)
@given(
    head_dim=st.sampled_from([2, 4, 8, 16, 32, 96, 128]),
    theta=st.sampled_from([1.5, 100.0, 1e3, 1e4, 1e6, 1e9]),
    window=st.one_of(st.sampled_from([1, 6, 16, 340, 2048, 4000]), st.integers(1, 40000)),
    longer=st.integers(-2, 400),
    betas=st.tuples(st.sampled_from([0.5, 2.0, 32.0, 1e3, 1e6]), st.sampled_from([1e-6, 0.25, 1.0, 8.0, 1e3])),
    factor=st.floats(1.01, 64.0),
)
@example(head_dim=16, theta=1e3, window=4000, longer=400, betas=(32.0, 1.0), factor=4.0)  # the band ends behind the last pair
@example(head_dim=96, theta=1e6, window=2048, longer=30720, betas=(32.0, 1.0), factor=16.0)  # MiniMind's
def test_yarn_is_obeyed_as_by_transformers_or_refused(head_dim, theta, window, longer, betas, factor):
    """The angles of the last positions, which differ most, are those of transformers; it stretches in what is refused nothing.

    The oracle is transformers' own table; how far the two are apart is bounded by fp32's rounding of a position times 2 pi.
    """
    section = yarn_section(head_dim, theta, window, longer, betas, factor)
    try:
        params = ModelParams.model_validate(section)
    except ValidationError as error:
        reasons = str(error)
        assert "rope_scaling.beta_" in reasons or longer <= 0 and "max_position_embeddings" in reasons
        return
    config = ModelConfig.from_params(params, SMALL.vocab_size)
    rotary = Qwen3RotaryEmbedding(transformers.Qwen3Config(**qwen3_config(config)))
    plain = rope_frequencies(replace(config, rope_scaling=None))
    torch.testing.assert_close(rope_frequencies(config), rotary.inv_freq, rtol=1e-6, atol=0.0)
    assert not torch.allclose(rope_frequencies(config), plain, rtol=1e-6, atol=0.0)  # what is set is active
    positions = torch.arange(min(config.max_position_embeddings, 500))
    cos, sin = rotary(torch.zeros(1), positions[None])
    own_cos, own_sin = (table[positions] for table in rope_tables(config))
    half = head_dim // 2
    torch.testing.assert_close(own_cos, cos[0], atol=2e-4, rtol=0.0)
    torch.testing.assert_close(torch.cat((-own_sin[:, :half], own_sin[:, half:]), dim=1), sin[0], atol=2e-4, rtol=0.0)


def test_logits_with_a_band_behind_the_last_pair_equal_transformers():
    section = yarn_section(16, 1e3, 4000, 40, (32.0, 1.0), 4.0)
    model = make(ModelConfig.from_params(ModelParams.model_validate(section), SMALL.vocab_size))
    ids = tokens(model.config, 1, 600)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), stock(model)(ids).logits, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"longer": 0}, "max_position_embeddings=2048: must be > rope_scaling.original_max_position_embeddings=2048"),
        ({"betas": (1.0, 1.0)}, "beta_fast=1: must be > beta_slow=1"),
        ({"window": 5, "betas": (4.0, 2.0)}, "beta_slow=2: must be lower, no pair of dimensions turns that often over"),
        ({"theta": 1.5}, "beta_fast=32: must be higher, or YaRN stretches nothing: all 48 pairs"),
    ],
)
def test_yarn_that_would_not_act_is_refused(changes, reason):
    given = {"head_dim": 96, "theta": 1e6, "window": 2048, "longer": 100, "betas": (32.0, 1.0), "factor": 4.0} | changes
    with pytest.raises(ValidationError, match=re.escape(reason)):
        ModelParams.model_validate(yarn_section(**given))


def test_rope_rotates_half_split_pairs():
    # head_dim 4, theta 10000: pair (0, 2) turns by p, pair (1, 3) by p / 100.
    cos, sin = rope_tables(replace(SMALL, head_dim=4))
    rotated = apply_rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), cos[5], sin[5])
    a, b = 5.0, 0.05
    expected = [
        math.cos(a) - 3 * math.sin(a),
        2 * math.cos(b) - 4 * math.sin(b),
        3 * math.cos(a) + math.sin(a),
        4 * math.cos(b) + 2 * math.sin(b),
    ]
    torch.testing.assert_close(rotated, torch.tensor(expected), **CLOSE)


@pytest.mark.parametrize("name", ["dense", "moe", "moe_top2"])
def test_reference_checkpoints_give_their_logits(name):
    record = models()[name]
    given_values = record["config"]
    config = replace(
        SMALL,
        **given_values,
        head_dim=given_values["hidden_size"] // given_values["num_attention_heads"],
        moe_intermediate_size=given_values["intermediate_size"],
    )
    model = load_foreign(FOLDER / f"minimind_{name}.pth", config)
    ids = torch.tensor(record["input_ids"])
    with torch.no_grad():
        logits = model(ids)
    torch.testing.assert_close(logits[:, -1], torch.tensor(record["last_logits"]), **CLOSE)
    assert logits.mean().item() == pytest.approx(record["logits_mean"], abs=1e-5)
    assert logits.std().item() == pytest.approx(record["logits_std"], abs=1e-5)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(record["loss_labels_equal_input"], abs=1e-5)
    assert len(model.state_dict()) == record["keys"]


def test_experts_stack_and_unstack():
    state = make(MOE).state_dict()
    stacked = stack_experts(state)
    # 4 experts, width 24, intermediate size 20.
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 40, 24)
    assert stacked["model.layers.1.mlp.experts.down_proj"].shape == (4, 24, 20)
    back = unstack_experts(stacked)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


MINIMIND = {
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "intermediate_size": 2432,
    "moe_intermediate_size": 2432,
    "num_experts": 4,
}


@pytest.mark.parametrize(("use_moe", "expected"), [(False, 63_912_192), (True, 198_416_640)])
def test_minimind_has_its_number_of_parameters(use_moe, expected):
    config = replace(SMALL, vocab_size=6400, use_moe=use_moe, **MINIMIND)
    assert num_parameters(config, config.vocab_size) == expected


@pytest.mark.parametrize("config", [SMALL, MOE])
def test_num_parameters_counts_what_the_model_holds(config):
    assert num_parameters(config, config.vocab_size) == sum(parameter.numel() for parameter in CausalLM(config).parameters())


def test_config_survives_json_and_refuses_nonsense():
    config = replace(MOE, rope_scaling=YARN)
    values = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(values) == config
    for broken in ({**values, "widht": 3}, {**values, "num_key_value_heads": 3}, {**values, "vocab_size": None}):
        with pytest.raises(ValueError):
            ModelConfig.from_dict(broken)


def test_config_takes_every_parameter_of_the_section():
    section = yaml.safe_load((ROOT / "profiles" / "micro.yaml").read_text(encoding="utf-8"))["model"]
    section["rope_theta"] = float(section["rope_theta"])
    section["router_aux_loss_coef"] = float(section["router_aux_loss_coef"])
    section["rms_norm_eps"] = float(section["rms_norm_eps"])
    config = ModelConfig.from_params(ModelParams.model_validate(section), vocab_size=700)
    assert {**section, "vocab_size": 700} == config.to_dict()


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = CausalLM(SMALL, seed=7)
    torch.manual_seed(2)
    again, other = CausalLM(SMALL, seed=7), CausalLM(SMALL, seed=8)
    for one, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    wide = CausalLM(replace(SMALL, hidden_size=256, vocab_size=512), seed=3)
    embedding = wide.model.embed_tokens.weight
    # 131072 draws: the standard error of the mean is 5.5e-5, of the deviation 3.9e-5.
    assert abs(embedding.mean().item()) < 3e-4
    assert abs(embedding.std().item() - 0.02) < 2e-4
    assert abs(wide.model.layers[0].mlp.down_proj.weight.std().item() - 0.02) < 6e-4
    assert torch.equal(wide.model.layers[1].self_attn.q_norm.weight, torch.ones(8))


def test_embedding_and_head_are_one_tensor_under_two_names():
    model = CausalLM(SMALL)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert not any("rotation" in name or "bias" in name for name in state)


@pytest.mark.parametrize("config", [SMALL, MOE])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4), seed=st.integers(0, 100))
def test_padding_on_the_right_changes_no_earlier_logit(config, lengths, seed):
    model = make(config)
    ids = tokens(config, len(lengths), max(lengths), seed)
    padded = ids.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 0
    with torch.no_grad():
        logits = model(padded)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(logits[row : row + 1, :length], model(ids[row : row + 1, :length]), **CLOSE)


def test_a_position_beyond_the_window_is_one_line():
    model = CausalLM(replace(SMALL, max_position_embeddings=8))
    assert model(tokens(SMALL, 2, 8)).shape == (2, 8, 61)
    with pytest.raises(ParamsError, match="max_position_embeddings=8: must be >= 9"):
        model(tokens(SMALL, 2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.scale)])  # a minute of g++
def test_compiled_layers_give_the_same_gradients(backend, checkpointing):
    """Layers, lengths and row numbers share compiled code, sampling stays as it is."""
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    with mock.patch.object(
        transformer, "_compiled_layer", lambda: torch.compile(transformer._run_layer, backend=counted, dynamic=True)
    ):
        for rows, length in ((3, 11), (5, 17), (2, 8)):
            ids = tokens(SMALL, rows, length)
            gradients = []
            for compiled in (False, True):
                model = make(SMALL).train()
                model.compiled, model.gradient_checkpointing = compiled, checkpointing
                nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
                with torch.no_grad():
                    model(ids)
            for plain, fused in zip(*gradients, strict=True):
                torch.testing.assert_close(fused, plain, **CLOSE)
    assert 1 <= counted.frame_count <= 3


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("use_moe", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_moe, dropout):
    config = replace(SMALL, use_moe=use_moe, dropout=dropout)
    ids = tokens(config, 3, 11)
    gradients = []
    for enabled in (False, True):
        model = make(config).train()
        model.gradient_checkpointing = enabled
        torch.manual_seed(5)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) + model.router_aux_loss()
        calls: list[int] = []
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        loss.backward()
        assert len(calls) == int(enabled), "the backward pass recomputes the layer exactly where switched on"
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, **CLOSE)


def test_dropout_acts_in_training_only():
    model = make(replace(SMALL, dropout=0.5))
    ids = tokens(SMALL, 2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
        torch.testing.assert_close(model(ids), make(SMALL)(ids), **CLOSE)
        model.train()
        assert not torch.allclose(model(ids), model(ids))


def test_autocast_keeps_the_residual_stream_in_fp32():
    model = make(MOE).train()
    seen: dict[str, set[torch.dtype]] = {"stream": set(), "linear": set()}
    for block in model.model.layers:
        block.register_forward_hook(lambda _m, _i, output: seen["stream"].add(output[0].dtype))
        block.self_attn.o_proj.register_forward_hook(lambda _m, _i, output: seen["linear"].add(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(tokens(MOE, 2, 9))
    assert seen == {"stream": {torch.float32}, "linear": {torch.bfloat16}}
    assert hidden.dtype == torch.float32
    reference = make(MOE).hidden(tokens(MOE, 2, 9))
    assert 0 < (hidden - reference).abs().mean() < 0.1


# --- experts -----------------------------------------------------------------------------------------------------------


def naive_mixture(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """Token by token, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    moe = copy.deepcopy(moe).double()
    for index in [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1])]:
        token = x[index].double()
        probs = (moe.gate.weight @ token).softmax(0)
        chosen = sorted(range(len(probs)), key=lambda e: -probs[e].item())[: moe.top_k]
        total = sum(probs[e] for e in chosen) if moe.norm_topk_prob else 1.0
        for e in chosen:
            expert = moe.experts[e]
            inner = nn.functional.silu(expert.gate_proj.weight @ token) * (expert.up_proj.weight @ token)
            out[index] += probs[e] / total * (expert.down_proj.weight @ inner)
    return out


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_mixture_equals_a_loop_over_tokens(top_k, norm_topk_prob):
    moe = make(replace(MOE, num_experts_per_tok=top_k, norm_topk_prob=norm_topk_prob)).model.layers[0].mlp
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mixed, stats = moe(x)
        torch.testing.assert_close(mixed, naive_mixture(moe, x).float(), **CLOSE)
    assert stats is None


def test_aux_loss_by_hand():
    # Width 1, two experts, gate weights 0 and ln 3: x = 1 gives probabilities 1/4, 3/4; x = -1 gives 3/4, 1/4.
    config = replace(MOE, hidden_size=1, num_experts=2, num_experts_per_tok=1, router_aux_loss_coef=0.1)
    moe = MixtureOfExperts(config).train()
    with torch.no_grad():
        moe.gate.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))
    x = torch.tensor([[[1.0], [1.0]], [[1.0], [-1.0]]])
    # Loads 1/4, 3/4; mean probabilities (3 * 1/4 + 3/4) / 4 = 3/8 and 5/8: 0.1 * 2 * (1/4 * 3/8 + 3/4 * 5/8) = 0.1125.
    _, stats = moe(x)
    assert stats.aux_loss.item() == pytest.approx(0.1125, abs=1e-6)
    assert stats.load.tolist() == pytest.approx([0.25, 0.75], abs=1e-6)
    # With the first row's tokens hidden: loads 1/2, 1/2: 0.1 * 2 * 1/2 * (1/2 + 1/2) = 0.1, whatever the probabilities.
    _, visible_stats = moe(x, torch.tensor([[False, False], [True, True]]))
    assert visible_stats.aux_loss.item() == pytest.approx(0.1, abs=1e-6)
    assert visible_stats.load.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


def test_aux_loss_sums_over_layers_and_slots():
    # A router of zeros is uniform: load sums to k = 2, mean probability 1/4: 0.01 * 4 * 2 * 1/4 = 0.02 per layer, two layers.
    model = make(MOE).train()
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()
    model(tokens(MOE, 2, 9))
    assert model.router_aux_loss().item() == pytest.approx(0.04, abs=1e-6)
    for stats in model.model.router_stats:
        assert stats.load.sum().item() == pytest.approx(1.0, abs=1e-6)
    # Every token chose the same two experts: half of the slots each.
    assert model.expert_load_max().item() == pytest.approx(0.5, abs=1e-6)
    model.eval()
    model(tokens(MOE, 2, 9))
    assert model.router_aux_loss().item() == 0.0
    dense = make(SMALL).train()
    dense(tokens(SMALL, 2, 9))
    assert dense.router_aux_loss().item() == 0.0 and dense.expert_load_max().item() == 0.0


def test_hidden_padding_does_not_count_in_the_router_statistics():
    model = make(MOE).train()
    ids = tokens(MOE, 2, 6)
    padded = torch.cat((ids, torch.zeros(2, 20, dtype=torch.int64)), dim=1)
    model(ids)
    expected, load = model.router_aux_loss(), model.expert_load_max()
    model.hidden(padded)
    assert (model.router_aux_loss() - expected).abs() > 1e-3
    model.hidden(padded, visible=torch.arange(26).expand(2, 26) < 6)
    torch.testing.assert_close(model.router_aux_loss(), expected, **CLOSE)
    torch.testing.assert_close(model.expert_load_max(), load, **CLOSE)


@pytest.mark.parametrize(("norm_topk_prob", "learns"), [(False, True), (True, False)])
def test_top1_router_learns_from_the_language_loss_only_without_renormalisation(norm_topk_prob, learns):
    config = replace(MOE, num_experts_per_tok=1, norm_topk_prob=norm_topk_prob)
    model = make(config).train()
    ids = tokens(config, 2, 12)
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    router = max(block.mlp.gate.weight.grad.abs().max().item() for block in model.model.layers)
    expert = max(p.grad.abs().max().item() for p in model.model.layers[0].mlp.experts.parameters())
    assert expert > 1e-3
    assert router > 1e-3 if learns else router < 1e-7


def test_an_expert_without_tokens_has_zero_gradients_not_none():
    model = make(replace(MOE, num_experts_per_tok=1)).train()
    model(tokens(MOE, 2, 1)).sum().backward()
    unused = [
        (layer, expert)
        for layer, stats in enumerate(model.model.router_stats)
        for expert in (stats.load == 0).nonzero().flatten().tolist()
    ]
    assert unused
    for layer, expert in unused:
        for parameter in model.model.layers[layer].mlp.experts[expert].parameters():
            assert parameter.grad is not None and not parameter.grad.any()


def test_a_trained_mixture_can_be_copied():
    model = make(MOE).train()
    ids = tokens(MOE, 2, 5)
    model(ids).sum().backward()
    twin = copy.deepcopy(model).eval()
    assert twin.router_aux_loss().item() == 0.0
    with torch.no_grad():
        assert torch.equal(twin(ids), model.eval()(ids))


# --- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, MOE])
def test_values_read_the_hidden_states_normed_once(config):
    model = make(config)
    critic = ValueModel.from_causal_lm(model, seed=4).eval()
    ids = tokens(config, 3, 7)
    with torch.no_grad():
        values = critic(ids)
        expected = torch.einsum("btw,w->bt", model.hidden(ids), critic.score.weight[0])
    assert values.shape == (3, 7) and values.std() > 1e-3
    torch.testing.assert_close(values, expected, **CLOSE)


def test_the_critic_is_a_copy():
    model = make(SMALL)
    before = model.model.norm.weight.clone()
    critic = ValueModel.from_causal_lm(model, seed=4)
    with torch.no_grad():
        critic.model.norm.weight.add_(1.0)
    assert torch.equal(model.model.norm.weight, before)
    again, other = (ValueModel.from_causal_lm(model, seed=seed) for seed in (4, 5))
    assert torch.equal(critic.score.weight, again.score.weight)
    assert not torch.equal(critic.score.weight, other.score.weight)


def test_reward_scores_equal_transformers():
    model = RewardModel.from_causal_lm(make(SMALL), seed=2).eval()
    values = {**qwen3_config(SMALL), "num_labels": 1, "pad_token_id": 0}
    twin = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**values)).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    lengths = torch.tensor([3, 9, 6])
    ids = tokens(SMALL, 3, 9).clamp(min=1)
    ids[torch.arange(9) >= lengths[:, None]] = 0
    with torch.no_grad():
        expected = twin(ids, attention_mask=ids != 0).logits[:, 0]
        torch.testing.assert_close(model(ids, lengths - 1), expected, **CLOSE)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-4, 1.0, 1e4]), shape=st.sampled_from([(8,), (3, 8), (2, 5, 3, 8)]))
def test_the_norm_and_its_gradients_are_the_formulas(seed: int, scale: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = RMSNorm(8, 1e-6)
    x, grad = ((torch.randn(shape, generator=generator) * scale).requires_grad_(), torch.randn(shape, generator=generator))
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8, generator=generator))
    ours = norm(x)
    gradients = torch.autograd.grad(ours, (x, norm.weight), grad)
    exact_x, exact_weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = exact_x / (exact_x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * exact_weight
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    for got, want in zip(gradients, expected, strict=True):
        size = max(float(want.abs().max()), 1e-12)
        torch.testing.assert_close(got.double() / size, want / size, rtol=0, atol=1e-5)
