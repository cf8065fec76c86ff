"""Cached forwards equal uncached ones, for rows of different lengths, in any split, and after rows were moved."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig
from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import KVCache
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import RopeScaling

CLOSE = {"rtol": 0.0, "atol": 1e-5}
CONFIG = ModelConfig(
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    max_position_embeddings=64,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    dropout=0.0,
    use_moe=False,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=False,
    router_aux_loss_coef=0.01,
)
YARN = RopeScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=1.0, attention_factor=1.2)
CONFIGS = {
    "dense": CONFIG,
    "ungrouped": replace(CONFIG, num_key_value_heads=6),
    "experts": replace(CONFIG, use_moe=True),
    "yarn": replace(CONFIG, rope_scaling=YARN),
}


def make(config: ModelConfig) -> CausalLM:
    model = CausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)
    return model.eval()


UNCACHED = {InferenceModel(model): model for model in map(make, CONFIGS.values())}
MODELS = dict(zip(CONFIGS, UNCACHED, strict=True))


def make_cache(model: InferenceModel, rows: int, capacity: int) -> KVCache:
    return KVCache([KVBlock.allocate(model, rows, capacity)])


def append(model: InferenceModel, cache: KVCache, rows: list[list[int]]) -> list[Tensor]:
    """One forward of ragged rows, padded on the right; hidden states of the real positions per row."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    hidden = model.hidden(ids, cache)
    cache.advance([len(row) for row in rows])
    return [hidden[index, : len(row)] for index, row in enumerate(rows)]


def whole(model: InferenceModel, row: list[int]) -> Tensor:
    return UNCACHED[model].hidden(torch.tensor([row]))[0]


@pytest.mark.parametrize("name", list(CONFIGS))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_chunks_of_any_length_equal_one_uncached_forward(name, data):
    model = MODELS[name]
    batch = data.draw(st.integers(2, 4))
    chunks = data.draw(st.lists(st.lists(st.integers(0, 6), min_size=batch, max_size=batch), min_size=1, max_size=5))
    chunks = [chunk for chunk in chunks if any(chunk)] or [[1] * batch]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = [torch.randint(53, (sum(chunk[row] for chunk in chunks),), generator=generator).tolist() for row in range(batch)]
    # No slack: padding behind the longest row has to go somewhere harmless.
    cache = make_cache(model, batch, max(len(row) for row in rows))
    got: list[list[Tensor]] = [[] for _ in rows]
    with torch.inference_mode():
        start = [0] * batch
        for chunk in chunks:
            pieces = append(model, cache, [row[s : s + n] for row, s, n in zip(rows, start, chunk, strict=True)])
            start = [s + n for s, n in zip(start, chunk, strict=True)]
            for row, piece in enumerate(pieces):
                got[row].append(piece)
        assert cache.lengths == [len(row) for row in rows]
        for row, pieces in zip(rows, got, strict=True):
            if row:
                torch.testing.assert_close(torch.cat(pieces), whole(model, row), **CLOSE)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_ragged_prefill_then_decode(name):
    model = MODELS[name]
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
    cache = make_cache(model, 3, 12)
    with torch.inference_mode():
        append(model, cache, prompts)
        for token in (20, 21, 22, 23, 24):
            hidden = model.hidden(torch.full((3, 1), token), cache)
            cache.advance(1)
            prompts = [[*row, token] for row in prompts]
            for row, expected in enumerate(prompts):
                torch.testing.assert_close(hidden[row, 0], whole(model, expected)[-1], **CLOSE)
    assert cache.lengths == [12, 7, 9]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_of_several_blocks_leave_in_any_order(data):
    """Whoever leaves, and whichever blocks are joined, the others go on from where they were."""
    model = MODELS["dense"]
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    padding = data.draw(st.sampled_from([0, 6, 1000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = KVCache()
    rows: list[list[int]] = [[] for _ in range(sum(sizes))]
    cache.blocks += [KVBlock.allocate(model, size, 20) for size in sizes]
    new = torch.randint(1, 9, (len(rows),), generator=generator).tolist()
    with torch.inference_mode():
        while rows:
            chunk = [torch.randint(53, (length,), generator=generator).tolist() for length in new]
            rows = [[*row, *ids] for row, ids in zip(rows, chunk, strict=True)]
            for piece, row, ids in zip(append(model, cache, chunk), rows, chunk, strict=True):
                torch.testing.assert_close(piece, whole(model, row)[-len(ids) :], **CLOSE)
            stays = [len(row) < 18 and data.draw(st.booleans()) for row in rows]
            held = cache.slots
            left = cache.keep(stays, padding=padding)
            assert sorted(left) == [row for row, flag in enumerate(stays) if flag] and len(cache) == len(left)
            assert cache.slots <= held and all(len(block) for block in cache.blocks)
            rows, new = [rows[row] for row in left], [1] * len(left)
            if data.draw(st.booleans()):
                cache.fit()
                assert cache.slots == len(cache) == len(rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_that_share_prefixes_are_rows_of_their_own(data):
    """Whoever leaves, and whenever the others part with their prefixes, each goes on from where it was."""
    model = MODELS[data.draw(st.sampled_from(["dense", "ungrouped", "experts"]))]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    prompts = [torch.randint(53, (length,), generator=generator).tolist() for length in lengths]
    sources = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=7))
    padding = data.draw(st.sampled_from([-1, 5, 20]))
    cache, plain = KVCache(), make_cache(model, 2, 20)
    with torch.inference_mode():
        prefixes = make_cache(model, len(prompts), max(lengths))
        append(model, prefixes, prompts)
        append(model, plain, [[1, 2], [3]])
        cache.blocks = [KVBlock.behind(prefixes.blocks[0], sources, model, 12), *plain.blocks]
        rows = [*(prompts[source] for source in sources), [1, 2], [3]]
        assert cache.blocks[0].saved == sum(len(prompts[s]) for s in sources) - sum(len(prompts[s]) for s in set(sources))
        while rows:
            assert cache.lengths == [len(row) for row in rows]
            chunk = torch.randint(53, (len(rows), 1), generator=generator).tolist()
            rows = [[*row, *ids] for row, ids in zip(rows, chunk, strict=True)]
            kept = prefixes.blocks[0].states.clone()
            for piece, row in zip(append(model, cache, chunk), rows, strict=True):
                torch.testing.assert_close(piece[-1], whole(model, row)[-1], **CLOSE)
            assert torch.equal(prefixes.blocks[0].states, kept)
            stays = [len(row) < 12 and data.draw(st.booleans()) for row in rows]
            left = cache.keep(stays, padding=padding)
            assert sorted(left) == [row for row, flag in enumerate(stays) if flag]
            sharing = [block for block in cache.blocks if block.prefixes is not None]
            assert all(block.saved > padding and len(block.prefixes) == len(set(block.sources)) for block in sharing)
            rows = [rows[row] for row in left]
            for index, row in enumerate(rows):
                assert cache.read(index).shape[3] == len(row)
            if data.draw(st.booleans()):
                cache.fit()
                assert cache.slots == len(cache)
                assert all(block.prefixes.slots == len(block.prefixes) for block in sharing)


def test_small_blocks_are_joined_where_that_wastes_little():
    model = MODELS["dense"]
    for padding, blocks in ((8, 1), (7, 2)):
        cache = KVCache([KVBlock.allocate(model, 3, 16), KVBlock.allocate(model, 3, 16)])
        with torch.inference_mode():
            append(model, cache, [[1] * 3, [2] * 2, [3], [4] * 7, [5] * 5, [6] * 4])
            # two rows of at most 3 positions would be read as far as position 7
            assert cache.keep([True, True, False, True, False, False], padding=padding) == (
                [3, 0, 1] if blocks == 1 else [0, 1, 3]
            )
        assert len(cache.blocks) == blocks and cache.slots == 3 * blocks


@pytest.mark.parametrize(("padding", "blocks"), [(20, 1), (10, 1), (9, 2)])
def test_full_blocks_are_joined_where_little_is_to_be_moved(padding, blocks):
    """Of 3 and 2 rows with 2 and 3 positions, no slot free, the earlier block the wider: together 5 rows of 16."""
    model = MODELS["dense"]
    cache = KVCache([KVBlock.allocate(model, 3, 16), KVBlock.allocate(model, 2, 12)])
    rows = [[1] * 2, [2] * 2, [3] * 2, [4] * 3, [5] * 3]
    with torch.inference_mode():
        append(model, cache, rows)
        left = cache.keep([True] * 5, padding=padding)
        assert len(cache.blocks) == blocks and cache.slots == 5
        assert left == ([3, 4, 0, 1, 2] if blocks == 1 else [0, 1, 2, 3, 4])
        assert {block.capacity for block in cache.blocks} == ({16} if blocks == 1 else {16, 12})
        for piece, row in zip(append(model, cache, [[9]] * 5), left, strict=True):
            torch.testing.assert_close(piece[-1], whole(model, [*rows[row], 9])[-1], **CLOSE)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_memory_held_before_has_no_effect(name):
    model = MODELS[name]
    prompts = [[5, 6, 7, 8, 9], [12, 13], [14, 15, 16]]
    block = KVBlock.allocate(model, 3, 12)
    block.states.fill_(1e4)
    cache = KVCache([block])
    with torch.inference_mode():
        append(model, cache, prompts)
        append(model, cache, [[20, 21], [22], [23, 24, 25]])
        prompts = [[5, 6, 7, 8, 9, 20, 21], [12, 13, 22], [14, 15, 16, 23, 24, 25]]
        for piece, row in zip(append(model, cache, [[30], [31], [32]]), prompts, strict=True):
            torch.testing.assert_close(piece[-1], whole(model, [*row, 30 + prompts.index(row)])[-1], **CLOSE)


def test_only_positions_written_before_they_are_read_are_left_uninitialised():
    model = MODELS["dense"]
    try:
        torch.use_deterministic_algorithms(True)  # fills what `torch.empty` gives with NaN
        block = KVBlock.allocate(model, 2, 6, written=4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert block.states[..., :4, :].isnan().all() and (block.states[..., 4:, :] == 0).all()


def test_places_hold_what_was_read_elsewhere():
    model = MODELS["dense"]
    prompts = [[5, 6, 7, 8, 9], [12, 13], [14, 15, 16, 17]]
    cache = make_cache(model, 3, 16)
    with torch.inference_mode():
        append(model, cache, prompts)
        (block,) = cache.blocks
        other = KVBlock.allocate(model, 5, 7)
        order = [2, 0, 2, 1, 2]
        for place, row in enumerate(order):
            other.place(place, block.read(row))
        picked = KVCache([other])
        assert len(picked) == 5 and picked.lengths == [4, 5, 4, 2, 4]
        rows = [[*prompts[index], 30 + place, 40 + place] for place, index in enumerate(order)]
        for piece, row in zip(append(model, picked, [row[-2:] for row in rows]), rows, strict=True):
            torch.testing.assert_close(piece, whole(model, row)[-2:], **CLOSE)
        # the source is untouched and its own rows go on, too
        for piece, row in zip(append(model, cache, [[50]] * 3), prompts, strict=True):
            torch.testing.assert_close(piece[-1], whole(model, [*row, 50])[-1], **CLOSE)
        with pytest.raises(IndexError):
            cache.read(3)


def test_what_was_not_advanced_is_forgotten():
    model = MODELS["dense"]
    cache = make_cache(model, 2, 16)
    with torch.inference_mode():
        append(model, cache, [[5, 6, 7], [8]])
        model.hidden(torch.tensor([[9, 10, 11], [12, 13, 14]]), cache)
        cache.advance([1, 0])
        first, second = append(model, cache, [[20], [21]])
        torch.testing.assert_close(first[-1], whole(model, [5, 6, 7, 9, 20])[-1], **CLOSE)
        torch.testing.assert_close(second[-1], whole(model, [8, 21])[-1], **CLOSE)


def test_limits_are_named():
    model = MODELS["dense"]
    with pytest.raises(ParamsError, match="max_position_embeddings=64: must be >= 65"):
        make_cache(model, 2, 65)
    cache = make_cache(model, 2, 4)
    with torch.inference_mode():
        append(model, cache, [[1, 2, 3, 4], [5]])
        model.hidden(torch.tensor([[6], [7]]), cache)
        with pytest.raises(ValueError, match="a row of 5 positions exceeds the capacity of 4"):
            cache.advance(1)
        cache.advance([0, 1])
        assert cache.lengths == [4, 2]
        behind = KVCache([KVBlock.behind(cache.blocks[0], [0, 0, 1], model, 3)])
        behind.advance([3, 2, 0])
        assert behind.lengths == [7, 6, 2]
        with pytest.raises(ValueError, match="a row of 4 positions exceeds the capacity of 3"):
            behind.advance([1, 0, 0])


def test_the_whole_window_can_be_used():
    model = MODELS["dense"]
    row = torch.randint(53, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = make_cache(model, 2, 64)
    with torch.inference_mode():
        append(model, cache, [row[:60], row[:3]])
        piece, other = append(model, cache, [row[60:], row[3:10]])
        torch.testing.assert_close(piece, whole(model, row)[60:], **CLOSE)
        torch.testing.assert_close(other, whole(model, row[:10])[3:], **CLOSE)


def test_keys_and_values_are_kept_in_half_precision():
    model = InferenceModel(make(CONFIG), torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.inference_mode():
        cache = make_cache(model, 2, 8)
        model.hidden(ids[:, :3], cache)
        cache.advance(3)
        hidden = model.hidden(ids[:, 3:], cache)
        assert cache.read(0).dtype == torch.bfloat16 and hidden.dtype == torch.float32
        assert 0 < (hidden[:, 0] - make(CONFIG).hidden(ids)[:, 3]).abs().mean() < 0.1
