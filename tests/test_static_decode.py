"""Decoding with static shapes gives what decoding with growing ones gives, and its steps can be replayed without the host.

No CUDA graph can be captured without a GPU. `Recording` stands in for one: it repeats the operations of one step on the same
tensors, so that whatever a step takes from Python is frozen, as in a graph.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import KEYS, PAD, PROMPTS, STOPS, assert_same, full_logprobs, make_model, play_turns, spy_on_forwards
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.model.lora import add_lora
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import RopeScaling
from pipeline.rollout import static_batch, static_decode
from pipeline.rollout.block_decode import BlockDecoder
from pipeline.rollout.records import Completion
from pipeline.rollout.rows import Memory, Row, readers
from pipeline.rollout.sampling import draw, draw_flagged
from pipeline.rollout.static_batch import StaticBatch
from pipeline.rollout.static_decode import StaticDecoder
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.rollout.truncation import Truncation

YARN = RopeScaling(factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=1.0, attention_factor=1.2)
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
WAYS = ["eager", "recorded", pytest.param("cuda", marks=GPU)]
CLOSE = {"eager": 1e-5, "recorded": 1e-5, "cuda": 1e-4}


def adapted() -> CausalLM:
    model = make_model()
    add_lora(model, rank=4, alpha=8.0, targets=["q_proj", "up_proj", "down_proj"], seed=3)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.up_proj.lora.B.weight.normal_(generator=torch.Generator().manual_seed(4))
    return model


MODELS = {
    "dense": make_model(),
    "ungrouped": make_model(num_key_value_heads=4),
    "one_key_head": make_model(num_key_value_heads=1),
    "yarn": make_model(rope_scaling=YARN),
    "adapted": adapted(),
}


class Recording(TorchDispatchMode):
    """The operations of one step, and their repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexes = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        waits = any(index.dtype == torch.bool for index in args[1] if index is not None) if indexes else tags
        assert not waits, f"{func} waits for the device"
        assert "lift_fresh" not in str(func), "a tensor is made of Python values: a copy to the device"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        now: dict[int, Tensor] = {}

        def present(value: Any) -> Any:
            return now.get(id(value), value)

        with torch.autocast("cpu", enabled=False):  # casts are among the calls
            for func, args, kwargs, before in self.calls:
                args, kwargs = tree_map(present, (args, kwargs))
                now |= zip(map(id, tree_leaves(before)), tree_leaves(func(*args, **kwargs)), strict=True)


class Recordings:
    """In the place of CUDA graphs: the first step of a shape is recorded, all others repeat it."""

    made: list[tuple[int, int]] = []

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], Recording] = {}

    def __call__(self, step: Callable[[int, int], None], shape: tuple[int, int], times: int) -> None:
        if shape not in self.of:
            self.made.append(shape)
            times -= 1
            with Recording() as self.of[shape]:
                step(*shape)
        for _ in range(times):
            self.of[shape].replay()


@contextlib.contextmanager
def small_shapes(way: str, *, burst: int = 3, visible_step: int = 8, min_width: int = 2) -> Iterator[None]:
    """Constants at which a few short rows go through many shapes."""
    constants = {"BURST": burst, "VISIBLE_STEP": visible_step, "MIN_WIDTH": min_width}
    Recordings.made = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(static_decode, **constants))
        if way == "recorded":
            stack.enter_context(mock.patch.object(static_batch, "_repeater", lambda device: Recordings()))
        yield


def make_engine(model: CausalLM, static: bool = True, max_rows: int = 64, **changes: Any) -> TorchRolloutEngine:
    return TorchRolloutEngine(model, **({"stop_ids": STOPS, "pad_id": PAD, "max_rows": max_rows, "static": static} | changes))


def on(way: str, model: CausalLM) -> CausalLM:
    return copy.deepcopy(model).to("cuda") if way == "cuda" else model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_the_block_decoder(name: str, way: str, data: st.DataObject) -> None:
    model = on(way, MODELS[name])
    distinct = data.draw(st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=12), min_size=1, max_size=4), label="prompts")
    prompts = data.draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=9), label="rows")
    per_row = {"min_size": len(prompts), "max_size": len(prompts)}
    keys = data.draw(st.lists(st.integers(0, 10**6), **per_row), label="keys")
    greedy = data.draw(st.lists(st.booleans(), **per_row), label="greedy")
    stop_ids = data.draw(st.sets(st.integers(0, 31), max_size=8), label="stops")
    sizes = {"max_rows": data.draw(st.integers(1, 10)), "stop_ids": stop_ids}
    constants = {
        "burst": data.draw(st.integers(1, 9), label="burst"),
        "visible_step": data.draw(st.sampled_from([1, 8, 128]), label="visible_step"),
        "min_width": data.draw(st.integers(1, 4), label="min_width"),
    }
    with small_shapes(way, **constants):
        static, growing = make_engine(model, **sizes), make_engine(model, static=False, **sizes)
        for engine in (growing, static):
            engine.generate(prompts, keys=keys, max_new_tokens=3, temperature=1.3)  # what a call leaves behind changes no other
        limits = data.draw(st.lists(st.integers(1, 12), **per_row), label="limits")
        temperature = data.draw(st.sampled_from([0.6, 1.0]), label="temperature")
        options = {"keys": keys, "max_new_tokens": limits, "temperature": temperature, "greedy": greedy}
        assert_same(growing.generate(prompts, **options), static.generate(prompts, **options), CLOSE[way])
        ends = data.draw(st.sampled_from([2, 3, 7]), label="ends")
        several = [
            play_turns(engine, prompts, keys, greedy, apart=apart, ends=lambda key, turn: (key + turn) % ends == 0)
            for engine, apart in ((growing, True), (static, False))
        ]
        for expected, done in zip(*several, strict=True):
            assert_same(expected, done, CLOSE[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("greedy", [False, True])
def test_logprobs_are_those_of_a_full_forward(way: str, greedy: bool) -> None:
    model = make_model()
    with small_shapes(way):
        engine = make_engine(on(way, model))
        done = engine.generate(PROMPTS, keys=KEYS, max_new_tokens=list(range(15, 8, -1)), temperature=0.7, greedy=greedy)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = full_logprobs(model, prompt, completion.ids, 0.7)
        drawn = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), drawn, atol=CLOSE[way], rtol=0)
        if greedy:
            assert completion.ids == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_row_may_fill_the_window(way: str) -> None:
    prompts, limits = [[4] * 63, [5] * 50, *[[3, index] for index in range(5)]], [1, 14, 40, 62, 8, 40, 1]
    keys = list(range(7))
    with small_shapes(way, visible_step=128):
        both = [
            make_engine(on(way, MODELS["dense"]), static, max_rows=rows, stop_ids=[]).generate(
                prompts, keys=keys, max_new_tokens=limits, temperature=0.7
            )
            for static, rows in ((False, 64), (True, 64), (True, 3))
        ]
    assert [len(completion.ids) for completion in both[1]] == limits
    for done in both[1:]:
        assert_same(both[0], done, CLOSE[way])


@pytest.mark.parametrize("way", WAYS)
def test_weights_temperature_and_shapes_of_each_call_are_its_own(way: str) -> None:
    model = on(way, make_model())

    def check(engine: TorchRolloutEngine, rows: int, temperature: float, limit: int = 12) -> list[Completion]:
        prompts, keys = (PROMPTS * 3)[:rows], [key + rows for key in range(rows)]
        options = {"keys": keys, "max_new_tokens": limit, "temperature": temperature}
        done = engine.generate(prompts, **options)
        assert_same(make_engine(model, static=False, stop_ids=[]).generate(prompts, **options), done, CLOSE[way])
        return done

    with small_shapes(way):
        engine = make_engine(model, max_rows=16, stop_ids=[])
        before = check(engine, 9, 0.7)
        check(engine, 9, 1.1)
        assert [c.ids for c in check(engine, 9, 0.7)] == [c.ids for c in before]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(parameter.device)
        assert [c.ids for c in check(engine, 9, 0.7)] != [c.ids for c in before]
        check(engine, 4, 0.7)
        check(engine, 9, 0.7)
        assert len(Recordings.made) == len(set(Recordings.made))
        check(engine, 16, 0.7)  # more rows, then longer ones: other buffers, for which nothing recorded holds
        check(engine, 16, 0.7, limit=40)
        check(engine, 9, 0.7)
        assert way != "recorded" or len(Recordings.made) > len(set(Recordings.made)) > 0


def spy_on_bursts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(width, visible, steps) of every burst to come."""
    bursts = []
    burst = StaticBatch.burst

    def noted(batch: StaticBatch, *shape: int) -> Any:
        bursts.append(shape)
        return burst(batch, *shape)

    monkeypatch.setattr(StaticBatch, "burst", noted)
    return bursts


def test_fewer_rows_take_narrower_steps_and_short_ones_read_less(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = spy_on_bursts(monkeypatch)
    limits = [2] * 4 + [5] * 3 + [8, 20]
    with small_shapes("eager", burst=3, visible_step=8, min_width=2):
        done = make_engine(MODELS["dense"], stop_ids=[]).generate(
            [[3, index] for index in range(9)], keys=range(9), max_new_tokens=limits, temperature=0.7
        )
    assert [len(completion.ids) for completion in done] == limits
    # With its prefill a row has 1 id, then 4, 7, ...: 9 rows run, then 5, then 2, then the one of 20, whose last burst is short.
    assert [width for width, _, _ in bursts] == [9, 8, 2, 2, 2, 2, 2]
    # It is at positions up to 2 + 3 = 5, 8, 11, 14, 17, 20, 21 of 22, in eights.
    assert [visible for _, visible, _ in bursts] == [8, 8, 16, 16, 24, 24, 24]
    assert [steps for _, _, steps in bursts] == [3, 3, 3, 3, 3, 3, 1]


def test_shapes_do_not_depend_on_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes decide rounding, and a resumed run, whose engine is new, must draw the same bytes."""
    bursts = spy_on_bursts(monkeypatch)
    with small_shapes("eager", burst=3, visible_step=8, min_width=4):
        engine = make_engine(MODELS["dense"], stop_ids=[])

        def shapes(limits: list[int]) -> list[tuple[int, int, int]]:
            bursts.clear()
            prompts = [[3, index] for index in range(len(limits))]
            engine.generate(prompts, keys=range(len(limits)), max_new_tokens=limits, temperature=0.7)
            return list(bursts)

        first = shapes([6, 5, 3])
        shapes([40] * 9)  # more slots, and longer ones
        assert shapes([6, 5, 3]) == first == [(3, 8, 3), (3, 8, 2)]


def test_waiting_rows_join_and_a_group_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = spy_on_forwards(monkeypatch)
    prompts = [prompt for prompt in ([5, 6, 7], [9, 8, 7, 6]) for _ in range(8)]
    with small_shapes("eager"):
        together = make_engine(MODELS["dense"]).generate(prompts, keys=range(16), max_new_tokens=9, temperature=0.7)
        assert [shape for shape in read if shape[1] > 1] == [(2, 4)]
        read.clear()
        in_turn = make_engine(MODELS["dense"], max_rows=3).generate(prompts, keys=range(16), max_new_tokens=9, temperature=0.7)
    assert max(rows for rows, _ in read) == 3 and len([shape for shape in read if shape[1] > 1]) >= 16 / 3
    assert_same(together, in_turn)


def test_uninitialised_memory_changes_no_row() -> None:
    prompts, keys, greedy = PROMPTS * 2, list(range(40, 54)), [row % 3 == 0 for row in range(14)]
    expected = play_turns(make_engine(MODELS["dense"], static=False), prompts, keys, greedy)
    try:
        torch.use_deterministic_algorithms(True)  # fills what `torch.empty` gives with NaN
        for max_rows in (64, 5):
            with small_shapes("eager"):
                together = play_turns(make_engine(MODELS["dense"], max_rows=max_rows), prompts, keys, greedy)
            for turn, done in zip(expected, together, strict=True):
                assert_same(turn, done)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_call_with_broken_weights_spoils_no_other() -> None:
    model = make_model()
    engine = make_engine(model)
    options = {"keys": KEYS, "max_new_tokens": 9, "temperature": 0.7}
    expected = engine.generate(PROMPTS, **options)
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    assert torch.tensor(engine.generate(PROMPTS, **options)[0].logprobs).isnan().all()
    model.load_state_dict(kept)
    assert_same(expected, engine.generate(PROMPTS, **options))


def test_the_model_is_left_as_it_was() -> None:
    model = make_model(dropout=0.5)
    model.train()
    options = {"keys": KEYS, "max_new_tokens": 9, "temperature": 0.7}
    assert_same(make_engine(make_model()).generate(PROMPTS, **options), make_engine(model).generate(PROMPTS, **options))
    assert model.training
    model(torch.tensor([[1, 2, 3]])).sum().backward()  # nothing of inference mode stays behind
    assert model.lm_head.weight.grad is not None and model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_under_autocast_logprobs_are_near_those_of_a_full_forward(way: str) -> None:
    model = make_model()
    with small_shapes(way):
        engine = make_engine(on(way, model), autocast_dtype=torch.bfloat16)
        done = engine.generate(PROMPTS, keys=KEYS, max_new_tokens=15, temperature=0.7)
    assert not torch.is_autocast_enabled("cpu")
    for prompt, completion in zip(PROMPTS, done, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = full_logprobs(model, prompt, completion.ids, 0.7)
        drawn = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert float((torch.tensor(completion.logprobs).double() - drawn).abs().mean()) < 0.1


def test_flagged_draws_are_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((200, 50), generator=generator) * 3
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    greedy = torch.rand(200, generator=generator) < 0.3
    sampled = (~greedy).nonzero()[:, 0]
    expected = draw(logits, 0.7, uniform[sampled], sampled)
    got = draw_flagged(logits, torch.tensor(0.7), uniform, greedy)
    assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
    assert (got[0][greedy] == logits[greedy].argmax(dim=-1)).all() and (got[0] != logits.argmax(dim=-1)).any()


def test_readers_are_the_first_of_equal_prompts_and_the_others_give_up_their_memory() -> None:
    prompts = {"a": (1, 2), "b": (1, 2, 3), "c": (3,)}
    memories = [Memory(prompts[name][:1], torch.zeros(1)) for name in "abbacb"]
    rows = [
        Row(prompts[name], number, 1, False, lambda _: None, memory)
        for number, (name, memory) in enumerate(zip("abbacb", memories, strict=True))
    ]
    assert readers(rows) == ([rows[0], rows[1], rows[4]], [0, 1, 1, 0, 2, 1])
    assert [row.memory for row in rows] == [memories[0], memories[1], None, None, memories[4], None]


def test_mixtures_keep_shapes_that_follow_the_rows() -> None:
    mixture = make_model(use_moe=True)
    with pytest.raises(ValueError, match="need a dense model"):
        make_engine(mixture)
    with pytest.raises(ValueError, match="know no truncation"):
        make_engine(MODELS["dense"], truncation=Truncation(top_k=3))
    for model in (mixture, MODELS["dense"]):
        assert isinstance(TorchRolloutEngine(model, stop_ids=STOPS, pad_id=PAD, max_rows=4)._decoder, BlockDecoder)


def test_nothing_to_sample_and_one_row() -> None:
    engine = make_engine(MODELS["dense"], max_rows=1)
    assert engine.generate([], keys=[], max_new_tokens=4, temperature=0.7) == []
    (done,) = engine.generate([[5]], keys=[1], max_new_tokens=1, temperature=0.7)
    assert len(done.ids) == 1


def test_a_shape_is_run_then_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: mock.Mock(wait_stream=lambda other: told.append(("wait", other))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mock.Mock(wait_stream=lambda other: told.append(("rejoin", None))))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: told.append(("replay", None))))

    @contextlib.contextmanager
    def capture(graph: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        told.append(("capture", pool))
        yield
        told.append(("captured", None))

    monkeypatch.setattr(torch.cuda, "graph", capture)
    run = static_batch._repeater(torch.device("cuda"))

    def doings(shape: tuple[int, int], times: int) -> list[str]:
        told.clear()
        run(lambda width, visible: told.append(("step", (width, visible))), shape, times)
        assert {detail for doing, detail in told if doing == "step"} <= {shape}
        assert {detail for doing, detail in told if doing == "capture"} <= {"pool"}
        return [doing for doing, _ in told]

    first = ["wait", "step", "step", "rejoin", "capture", "step", "captured"]
    assert doings((8, 128), 2) == first
    assert doings((8, 128), 3) == ["replay"] * 3
    assert doings((4, 128), 2) == first
    assert doings((8, 256), 2) == first
    assert doings((4, 128), 1) == doings((8, 128), 1) == ["replay"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_are_captured_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().to("cuda")
    bursts = spy_on_bursts(monkeypatch)
    captures = []
    graph = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: captures.append(args) or graph(*args, **kwargs))
    engine = TorchRolloutEngine(model, stop_ids=[], pad_id=PAD, max_rows=64)
    assert isinstance(engine._decoder, StaticDecoder)
    for _ in range(3):
        engine.generate(PROMPTS * 5, keys=range(35), max_new_tokens=list(range(1, 36)), temperature=0.7)
    assert len(captures) == len({shape[:2] for shape in bursts}) < len(bursts) / 3
