"""Sampling: exact logprobs, the right distribution, and text that does not depend on a row's neighbours."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig
from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import KVCache
from pipeline.model.packing import pack
from pipeline.model.transformer import CausalLM
from pipeline.rollout import block_decode
from pipeline.rollout.records import Completion, NextTurn, StopReason, Trajectory, Turn, completion_tensors
from pipeline.rollout.rows import Memory
from pipeline.rollout.sampling import draw, fold_key, uniforms
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.rollout.truncation import Truncation
from pipeline.text.turns import parse_turn

STOPS, PAD = (2, 9, 17, 22), 0
PROMPTS = [[5, 6, 7], [1], [5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 11, 12, 13, 14], [3, 3], [5, 6, 7], [4, 30, 21, 7, 7]]
KEYS = [11, 12, 13, 14, 15, 16, 2**70 + 5]


def make_model(**changes: Any) -> CausalLM:
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "dropout": 0.0,
        "use_moe": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 5e-4,
    }
    model = CausalLM(ModelConfig(**(shape | changes)), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # distributions far from uniform that depend on the whole context
                parameter *= 10.0
        # signs that keep a tied head from repeating the last id for ever
        model.model.norm.weight.copy_(torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(2)))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return make_model()


def make_engine(model: CausalLM, max_rows: int = 64, **changes: Any) -> TorchRolloutEngine:
    return TorchRolloutEngine(model, **({"stop_ids": STOPS, "pad_id": PAD, "max_rows": max_rows} | changes))


def sample(
    engine: TorchRolloutEngine,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    keys: Sequence[int] = KEYS,
    max_new_tokens: int | Sequence[int] = 15,
    temperature: float = 0.7,
    greedy: bool | Sequence[bool] = False,
) -> list[Completion]:
    return engine.generate(prompts, keys=keys, max_new_tokens=max_new_tokens, temperature=temperature, greedy=greedy)


@torch.no_grad()
def full_logprobs(model: CausalLM, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> Tensor:
    """Logprobs [L, V] before each of `ids`, by one forward without cache, in fp64 from the logits on."""
    logits = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def assert_same(left: Sequence[Completion | None], right: Sequence[Completion | None], atol: float = 1e-5) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.ids == b.ids and a.stop == b.stop
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=atol, rtol=0)


@pytest.mark.parametrize("use_moe", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_logprobs_are_those_of_a_full_forward_at_the_sampling_temperature(use_moe: bool, greedy: bool) -> None:
    model = make_model(use_moe=use_moe)
    completions = sample(make_engine(model), max_new_tokens=list(range(15, 8, -1)), greedy=greedy)
    assert len({len(completion.ids) for completion in completions}) > 2  # ragged
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = full_logprobs(model, prompt, completion.ids, 0.7).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-5, rtol=0)


def test_greedy_ids_are_those_of_a_loop_without_cache(model: CausalLM) -> None:
    for prompt, completion in zip(PROMPTS, sample(make_engine(model), greedy=True), strict=True):
        context = list(prompt)
        while len(context) < len(prompt) + 15 and not (len(context) > len(prompt) and context[-1] in STOPS):
            with torch.no_grad():
                context.append(int(model(torch.tensor([context]))[0, -1].argmax()))
        assert completion.ids == context[len(prompt) :]


def chi_square(counts: Counter[int], probabilities: Tensor) -> float:
    total = sum(counts.values())
    return sum((counts[i] - total * float(p)) ** 2 / (total * float(p)) for i, p in enumerate(probabilities))


def test_samples_follow_the_softmax() -> None:
    model = make_model(vocab_size=12)
    with torch.no_grad():
        model.lm_head.weight *= 0.3  # no probability so small that its expected count is below 5
    prompt, rows = [5, 6, 7], 6000
    completions = sample(
        make_engine(model, max_rows=rows, stop_ids=[]), [prompt] * rows, list(range(rows)), max_new_tokens=2, temperature=0.8
    )
    first = full_logprobs(model, prompt, [0], 0.8)[0].exp()
    second = sum(p * full_logprobs(model, [*prompt, i], [0], 0.8)[0].exp() for i, p in enumerate(first))
    wrong = full_logprobs(model, prompt, [0], 1.0)[0].exp()
    assert float(first.min()) * rows > 5 and float(first.max()) > 0.15
    # chi-square with 11 degrees of freedom exceeds 37.4 with probability 1e-4
    counts = Counter(completion.ids[0] for completion in completions)
    assert chi_square(counts, first) < 37.4
    assert chi_square(Counter(completion.ids[1] for completion in completions), second) < 37.4
    assert chi_square(counts, wrong) > 37.4  # the test can tell the temperature


def test_text_depends_on_prompt_and_key_alone(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    together = sample(make_engine(model))
    assert {completion.stop for completion in together} == {StopReason.EOS, StopReason.LENGTH}
    alone = [sample(make_engine(model), [prompt], [key])[0] for prompt, key in zip(PROMPTS, KEYS, strict=True)]
    assert_same(together, alone)
    assert_same(together, sample(make_engine(model, max_rows=1)))
    assert_same(together, sample(make_engine(model, max_rows=3)))
    assert_same(together, sample(make_engine(model), PROMPTS[::-1], KEYS[::-1])[::-1])
    assert_same(together, sample(make_engine(model), PROMPTS * 3, KEYS * 3)[7:14])
    monkeypatch.setattr("pipeline.rollout.rows.PREFILL_TOKENS", 6)  # prefill in several parts
    assert_same(together, sample(make_engine(model)))
    for padding in (0, 10, 1000):  # a block for every length; blocks that are joined when rows have left; one block
        monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
        assert_same(together, sample(make_engine(model)))
        assert_same(together, sample(make_engine(model, max_rows=4)))


@pytest.mark.parametrize("use_moe", [False, True])
def test_a_next_turn_reads_on_where_the_last_has_ended(use_moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(use_moe=use_moe)
    turns = partial(play_turns, prompts=PROMPTS, keys=KEYS, greedy=[False] * len(PROMPTS), ends=lambda key, turn: key % 3 == turn)
    apart = turns(make_engine(model), apart=True)
    assert any(completion is None for completion in apart[1]) and any(completion for completion in apart[2])
    read = spy_on_forwards(monkeypatch)
    monkeypatch.setattr("pipeline.rollout.rows.JOIN_FRAC", 1.0)
    for expected, done in zip(apart, turns(make_engine(model)), strict=True):
        assert_same(expected, done)
    # later turns read the last sampled id and what is new: at most 6 positions
    prefills = [shape for shape in read if shape[1] > 1]
    assert prefills[0][1] == 11 and 1 < len(prefills) and all(length <= 6 for _, length in prefills[1:])
    for rows, prefill, join_frac in ((64, 7, 0.0), (3, 100, 0.1), (1, 1, 0.5)):
        monkeypatch.setattr("pipeline.rollout.rows.PREFILL_TOKENS", prefill)
        monkeypatch.setattr("pipeline.rollout.rows.JOIN_FRAC", join_frac)
        for padding in (0, 10, 1000):
            monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
            for expected, done in zip(apart, turns(make_engine(model, max_rows=rows)), strict=True):
                assert_same(expected, done)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padding", [0, 1000])  # the turns share a prefix; each has its own copy
def test_equal_next_turns_are_read_once(static: bool, padding: int, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
    first, later = [5, 6, 7], [11, 12, 13]

    def finished(number: int, completion: Completion) -> Callable[[], NextTurn] | None:
        contexts[number] = [*first, *completion.ids, *later]
        return (lambda: NextTurn(contexts[number], 10 + number, 5)) if len(completion.ids) == 2 else None

    contexts: dict[int, list[int]] = {}
    engine = make_engine(model, static=static, stop_ids=[])
    read = spy_on_forwards(monkeypatch)
    done = engine.generate([first] * 4, keys=[1] * 4, max_new_tokens=2, temperature=0.7, finished=finished)
    # prompt; the second id of each; the last of these and what is new
    assert [shape for shape in read if shape[1] > 1] == [(1, 3), (1, 4)]
    begun = engine.generate([first], keys=[1], max_new_tokens=2, temperature=0.7)[0].ids
    alone = [
        engine.generate([[*first, *begun, *later]], keys=[10 + number], max_new_tokens=5, temperature=0.7)[0]
        for number in range(4)
    ]
    assert_same(alone, done)
    assert len({tuple(completion.ids) for completion in done}) > 1


@pytest.mark.parametrize("static", [False, True])
def test_a_next_turn_joins_beside_rows_that_go_on(static: bool, model: CausalLM) -> None:
    told: list[str] = []

    def finished(number: int, completion: Completion) -> Callable[[], NextTurn | None] | None:
        told.append(f"{number} ends")
        if number or told.count("0 ends") > 1:
            return None
        return lambda: told.append("0 goes on") or NextTurn([5, 6, 7, *completion.ids, 9], 3, 2)

    engine = make_engine(model, static=static, stop_ids=[])
    engine.generate([[5, 6, 7], [8, 9]], keys=[1, 2], max_new_tokens=[4, 60], temperature=0.7, finished=finished)
    assert told == ["0 ends", "0 goes on", "0 ends", "1 ends"]


@pytest.mark.parametrize("static", [False, True])
def test_nothing_is_held_of_rows_that_have_ended(static: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    memories: weakref.WeakSet[Tensor] = weakref.WeakSet()
    blocks: weakref.WeakSet[KVBlock] = weakref.WeakSet()
    make, allocate = Memory, KVBlock.__init__
    held: list[int] = []

    def remembered(context: tuple[int, ...], states: Tensor) -> Memory:
        memories.add(states)
        return make(context, states)

    def allocated(block: KVBlock, *args: Any) -> None:
        blocks.add(block)
        allocate(block, *args)

    def finished(number: int, completion: Completion) -> Callable[[], NextTurn | None]:
        held.append(len(memories))
        contexts[number] += [*completion.ids, 9]

        def go_on() -> NextTurn | None:
            assert len(memories) <= 2 and len(blocks) == static  # the static batch is one block
            return NextTurn(tuple(contexts[number]), 3, 4) if len(contexts[number]) < 12 else None

        return go_on

    monkeypatch.setattr("pipeline.rollout.rows.Memory", remembered)
    monkeypatch.setattr(KVBlock, "__init__", allocated)
    contexts = [[5 + number] for number in range(6)]
    engine = make_engine(model, max_rows=2, static=static, stop_ids=[])
    engine.generate([tuple(prompt) for prompt in contexts], keys=range(6), max_new_tokens=4, temperature=0.7, finished=finished)
    assert held == [0] * 18 and not memories  # three turns of six rows: a memory ends when the next turn is read


def spy_on_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Rows and positions of every forward to come."""
    shapes: list[tuple[int, ...]] = []
    hidden = InferenceModel.hidden

    def noted(model: InferenceModel, input_ids: Tensor, cache: KVCache) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        return hidden(model, input_ids, cache)

    monkeypatch.setattr(InferenceModel, "hidden", noted)
    return shapes


@pytest.mark.parametrize("use_moe", [False, True])
def test_flags_per_row_give_what_two_calls_give(use_moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(use_moe=use_moe)
    sampled, greedy = (sample(make_engine(model), greedy=flag) for flag in (False, True))
    assert any(a.ids != b.ids for a, b in zip(sampled, greedy, strict=True))
    read = spy_on_forwards(monkeypatch)
    flags = [False] * len(PROMPTS) + [True] * len(PROMPTS)
    for padding in (0, 1000):
        monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
        both = make_engine(model).generate(PROMPTS * 2, keys=KEYS * 2, max_new_tokens=15, temperature=0.7, greedy=flags)
        assert_same([*sampled, *greedy], both)
    assert read[-1][1] == 1
    alternating = [index % 2 == 0 for index in range(len(PROMPTS))]
    mixed = make_engine(model, max_rows=3).generate(PROMPTS, keys=KEYS, max_new_tokens=15, temperature=0.7, greedy=alternating)
    assert_same([(greedy if flag else sampled)[index] for index, flag in enumerate(alternating)], mixed)


def play_turns(
    engine: TorchRolloutEngine,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    greedy: Sequence[bool],
    *,
    apart: bool = False,
    ends: Callable[[int, int], bool] = lambda key, turn: False,
) -> list[list[Completion | None]]:
    """Three turns per row, [turn][row]; limits differ, and so does what is added between turns.

    `apart` makes each turn a call of its own, which knows nothing of the one before; a row ends early where `ends` says so.
    """
    contexts = [list(prompt) for prompt in prompts]
    said: list[list[Completion | None]] = [[None] * len(prompts) for _ in range(3)]

    def next_turn(number: int, turn: int) -> NextTurn:
        return NextTurn(contexts[number], keys[number] + 100 * turn, 2 + (keys[number] + 3 * turn) % 9)

    def take(number: int, completion: Completion) -> Callable[[], NextTurn | None]:
        turn = [done[number] for done in said].index(None)
        said[turn][number] = completion
        contexts[number] += [*completion.ids, *[3, 8, 20, 7, 5][: 1 + (keys[number] + turn) % 5]]
        return lambda: None if turn == 2 or ends(keys[number], turn) else next_turn(number, turn + 1)

    def generate(numbers: Sequence[int], turn: int, finished: Callable[[int, Completion], Any]) -> None:
        turns = [next_turn(number, turn) for number in numbers]
        engine.generate(
            [list(each.prompt) for each in turns],
            keys=[each.key for each in turns],
            max_new_tokens=[each.max_new_tokens for each in turns],
            temperature=0.7,
            greedy=[greedy[number] for number in numbers],
            finished=finished,
        )

    if apart:
        going = list(range(len(prompts)))
        for turn in range(3):
            numbers = tuple(going)
            generate(numbers, turn, lambda index, completion, numbers=numbers: take(numbers[index], completion) and None)
            going = [number for number in going if not ends(keys[number], turn)]
    else:
        generate(range(len(prompts)), 0, take)
    return said


def test_no_neighbour_no_order_and_no_uninitialised_memory_changes_a_row(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 14, (12,), generator=generator).tolist()
    prompts = [torch.randint(32, (length,), generator=generator).tolist() for length in lengths]
    prompts += prompts[:6]  # in other company: other keys, other flags
    keys, greedy = list(range(40, 58)), [row % 3 == 0 for row in range(18)]
    alone = [
        play_turns(make_engine(model), [prompt], [key], [flag], apart=True)
        for prompt, key, flag in zip(prompts, keys, greedy, strict=True)
    ]
    try:
        torch.use_deterministic_algorithms(True)  # fills what `torch.empty` gives with NaN
        assert torch.empty(3).isnan().all()
        for max_rows, prefill, padding in ((64, 2048, 1024), (64, 20, 12), (5, 9, 4), (7, 2048, 0), (64, 2048, 40)):
            monkeypatch.setattr("pipeline.rollout.rows.PREFILL_TOKENS", prefill)
            monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
            together = play_turns(make_engine(model, max_rows=max_rows), prompts, keys, greedy)
            for turn, done in enumerate(together):
                assert_same([turns[turn][0] for turns in alone], done)
    finally:
        torch.use_deterministic_algorithms(False)
    # and every id has the logprob of a full forward
    contexts = [list(prompt) for prompt in prompts]
    for turn, done in enumerate(together):
        for context, key, completion in zip(contexts, keys, done, strict=True):
            expected = full_logprobs(model, context, completion.ids, 0.7).gather(1, torch.tensor(completion.ids)[:, None])
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected[:, 0], atol=1e-4, rtol=0)
            context += [*completion.ids, *[3, 8, 20, 7, 5][: 1 + (key + turn) % 5]]


def test_a_next_turn_must_go_on_from_its_completion(model: CausalLM) -> None:
    engine = make_engine(model)
    wrong: list[Callable[[list[int]], tuple[list[int], int]]] = [
        lambda ids: ([5, 6, 8, *ids, 1], 4),
        lambda ids: ([5, 6], 4),
        lambda ids: ([5, 6, 7, *ids[:-1]], 4),
        lambda ids: ([5, 6, 7, *ids], 4),
        lambda ids: ([5, 6, 7, *ids[:-1], ids[-1] ^ 1, 1], 4),
        lambda ids: ([5, 6, 7, *ids, 1], 0),
    ]
    for make in wrong:
        with pytest.raises(ValueError, match="must begin with its prompt and completion"):
            engine.generate(
                [[5, 6, 7]],
                keys=[1],
                max_new_tokens=4,
                temperature=0.7,
                finished=lambda _, done, make=make: lambda: NextTurn(make(done.ids)[0], 2, make(done.ids)[1]),
            )


@pytest.mark.parametrize("static", [False, True])
def test_a_next_turn_must_fit_the_window(static: bool, model: CausalLM) -> None:
    def finished(number: int, done: Completion) -> Callable[[], NextTurn]:
        return lambda: NextTurn([5, *done.ids, 3], 2, 63 - len(done.ids))

    engine = make_engine(model, static=static)
    with pytest.raises(ParamsError, match="max_position_embeddings=64: must be >= 65"):
        engine.generate([[5]], keys=[1], max_new_tokens=4, temperature=0.7, finished=finished)


def test_equal_prompts_with_different_keys_differ(model: CausalLM) -> None:
    texts = {tuple(c.ids) for c in sample(make_engine(model), [[5, 6, 7]] * 8, list(range(8)))}
    assert len(texts) == 8


def test_stop_marks_and_limits(model: CausalLM) -> None:
    prompts, keys = PROMPTS * 6, list(range(42))
    limits = [1 + index % 20 for index in range(42)]
    completions = sample(make_engine(model), prompts, keys, max_new_tokens=limits)
    assert {completion.stop for completion in completions} == {StopReason.EOS, StopReason.LENGTH}
    for completion, limit in zip(completions, limits, strict=True):
        assert len(completion.logprobs) == len(completion.ids) <= limit
        assert not set(STOPS) & set(completion.ids[:-1])
        if completion.stop is StopReason.EOS:
            assert completion.ids[-1] in STOPS
        else:
            assert completion.ids[-1] not in STOPS and len(completion.ids) == limit
    longer = sample(make_engine(model), prompts, keys, max_new_tokens=20)
    assert all(long.ids[: len(short.ids)] == short.ids for short, long in zip(completions, longer, strict=True))


@pytest.mark.parametrize("static", [False, True])
def test_the_end_of_a_row_is_told_once_while_others_go_on(model: CausalLM, static: bool) -> None:
    told: list[tuple[int, list[int]]] = []
    limits = [1 + 3 * index for index in range(7)]
    completions = make_engine(model, max_rows=4, static=static, stop_ids=[]).generate(
        PROMPTS,
        keys=KEYS,
        max_new_tokens=limits,
        temperature=0.7,
        finished=lambda number, completion: told.append((number, list(completion.ids))),
    )
    assert sorted(told) == [(number, completion.ids) for number, completion in enumerate(completions)]
    assert [len(ids) for _, ids in told] != sorted(limits, reverse=True) and len(told[-1][1]) > 1


def test_truncation_rules_ids_out_and_changes_the_logprobs_alike(model: CausalLM) -> None:
    greedy = sample(make_engine(model), greedy=True)
    assert [row.ids for row in sample(make_engine(model, truncation=Truncation(top_k=1)))] == [row.ids for row in greedy]
    temperature = 0.7
    for prompt, row in zip(PROMPTS, sample(make_engine(model, truncation=Truncation(3, 0.9, 1.3))), strict=True):
        for step, (token, logprob) in enumerate(zip(row.ids, row.logprobs, strict=True)):
            logits = model(torch.tensor([[*prompt, *row.ids[:step]]]))[:, -1] / temperature
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[0, [*prompt, *row.ids[:step]]] = True
            expected = Truncation(3, 0.9, 1.3)(logits, seen).log_softmax(dim=-1)[0, token]
            assert abs(float(expected.detach()) - logprob) < 1e-5


def test_a_row_may_fill_the_window(model: CausalLM) -> None:
    # the first row fills the window of 64 with its one id while the others go on
    prompts = [[4] * 63, *[[3, index] for index in range(9)]]
    completions = sample(make_engine(model, stop_ids=[]), prompts, list(range(10)), max_new_tokens=[1] + [40] * 9)
    assert [len(completion.ids) for completion in completions] == [1] + [40] * 9
    expected = full_logprobs(model, prompts[3], completions[3].ids, 0.7).gather(1, torch.tensor(completions[3].ids)[:, None])
    torch.testing.assert_close(torch.tensor(completions[3].logprobs).double(), expected[:, 0], atol=1e-5, rtol=0)


def test_prompts_of_a_group_are_prefilled_once_and_finished_rows_leave(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = spy_on_forwards(monkeypatch)
    prompts = [prompt for prompt in ([5, 6, 7], [9, 8, 7, 6]) for _ in range(8)]
    completions = sample(make_engine(model, stop_ids=range(2, 8)), prompts, list(range(16)))
    assert shapes[0] == (2, 4)
    going = [sum(len(completion.ids) > position for completion in completions) for position in range(1, len(shapes))]
    assert going[0] < 16 and going[-1] >= 1
    assert shapes[1:] == [(count, 1) for count in going]


def test_a_groups_prompt_is_held_once_while_that_pays(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    step = block_decode._step

    def noted(copy: InferenceModel, rows: Sequence[Any], cache: KVCache) -> Tensor:
        held.append((len(rows), sum(block.saved for block in cache.blocks)))
        return step(copy, rows, cache)

    monkeypatch.setattr(block_decode, "_step", noted)
    prompts, limits = [[7] * 30] * 6 + [[8] * 40] * 2, [3, 3, 5, 5, 7, 9, 5, 9]
    done = {}
    for padding in (1024, 45):
        monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": padding})
        held.clear()
        done[padding] = sample(make_engine(model, stop_ids=[]), prompts, range(8), max_new_tokens=limits)
        # five of six rows and one of two need not read their prompt again; two rows of 30 would save no more than padding costs
        expected = [(8, 190)] * 2 + [(6, 130)] * 2 + [(3, 0)] * 2 + [(2, 0)] * 2
        assert held == (expected if padding == 45 else [(rows, 0) for rows, _ in expected])
    assert_same(done[1024], done[45])
    held.clear()
    sample(make_engine(model, stop_ids=[], autocast_dtype=torch.bfloat16), prompts, range(8), max_new_tokens=limits)
    assert {saved for _, saved in held} == {0}  # scores of what is shared are kept as they are, which bf16 would round


def test_waiting_rows_join_when_others_have_left(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = spy_on_forwards(monkeypatch)
    monkeypatch.setattr("pipeline.rollout.block_decode.BLOCK_PADDING", {"cpu": 0})
    prompts = [[index + 1] * (1 + index) for index in range(5)]
    limits = [9, 2, 4, 3, 2]
    completions = sample(make_engine(model, max_rows=2, stop_ids=[]), prompts, list(range(5)), max_new_tokens=limits)
    assert [len(completion.ids) for completion in completions] == limits
    # never more than two rows are held, and the first one decodes on while the others come and go
    assert max(rows for rows, _ in shapes) == 2 and sum(rows for rows, _ in shapes) == sum(limits)
    assert shapes.count((2, 1)) == 1 + 3 + 2
    monkeypatch.undo()
    assert_same(completions, sample(make_engine(model, stop_ids=[]), prompts, list(range(5)), max_new_tokens=limits))


def test_no_dropout_no_gradient_and_the_mode_is_restored() -> None:
    steady, noisy = make_model(), make_model(dropout=0.5)
    noisy.train()
    assert_same(sample(make_engine(steady)), sample(make_engine(noisy)))
    assert noisy.training and not steady.training
    noisy(torch.tensor([[1, 2, 3]])).sum().backward()  # nothing of inference mode stays behind
    assert noisy.lm_head.weight.grad is not None


def test_an_outer_autocast_changes_nothing(model: CausalLM) -> None:
    expected = sample(make_engine(model))
    engine = make_engine(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done = [sample(engine), sample(engine)]
    for each in done:
        assert_same(expected, each)


def test_the_present_weights_are_sampled_from() -> None:
    model = make_model()
    engine = make_engine(model)
    before = sample(engine)
    with torch.no_grad():
        model.lm_head.weight += torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    assert [c.ids for c in sample(engine)] != [c.ids for c in before]
    assert_same(sample(engine), sample(make_engine(model)))


def test_under_autocast_logprobs_are_near_those_of_a_full_forward(model: CausalLM) -> None:
    completions = sample(make_engine(model, autocast_dtype=torch.bfloat16))
    assert not torch.is_autocast_enabled("cpu")
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = full_logprobs(model, prompt, completion.ids, 0.7)
        drawn = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert float((torch.tensor(completion.logprobs).double() - drawn).abs().mean()) < 0.1


@pytest.mark.parametrize(
    "fault",
    [
        {"temperature": 0.0},
        {"max_new_tokens": 0},
        {"prompts": [[]] * 7},
        {"keys": [1]},
        {"max_new_tokens": [3]},
        {"greedy": [True]},
    ],
)
def test_impossible_requests_are_refused(model: CausalLM, fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        sample(make_engine(model), **fault)


def test_no_prompts_no_completions(model: CausalLM) -> None:
    assert sample(make_engine(model), [], []) == []


def test_draw_inverts_the_cumulative_distribution() -> None:
    # probabilities 1/2, 0, 1/4, 1/4 -> cumulative 0.5, 0.5, 0.75, 1
    logits = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = draw(logits, 1.0, uniform)
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    expected = torch.tensor([math.log(0.5)] * 2 + [math.log(0.25)] * 4)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    # temperature 1/2 squares them: 4/6, 0, 1/6, 1/6 -> cumulative 0.667, 0.667, 0.833, 1
    assert draw(logits, 0.5, uniform)[0].tolist() == [0, 0, 0, 2, 2, 3]
    # an id of probability 0 is never drawn, not even the first one at uniform 0
    assert draw(torch.tensor([[0.0, 1.0]]).log(), 1.0, torch.zeros(1, dtype=torch.float64))[0].tolist() == [1]
    ids, logprobs = draw(logits[:1], 0.5, None)
    assert ids.tolist() == [0]
    torch.testing.assert_close(logprobs, torch.tensor([math.log(4 / 6)]), atol=1e-6, rtol=0)


def test_random_streams_are_keyed_by_row_and_position() -> None:
    streams = uniforms([3, 4, 3], 50)
    assert torch.equal(streams[0], streams[2]) and not torch.equal(streams[0], streams[1])
    assert torch.equal(uniforms([4], 7)[0], streams[1, :7])
    assert float(streams.min()) >= 0 and float(streams.max()) < 1
    many = uniforms(range(2000), 2)  # neighbouring keys are independent: mean 1/2 and correlation 0, within 4 standard errors
    assert abs(float(many.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 4000)
    assert abs(float(torch.corrcoef(torch.stack((many[:-1, 0], many[1:, 0])))[0, 1])) < 4 / math.sqrt(2000)


def test_folded_keys_are_distinct_and_stay_what_they_are() -> None:
    assert len({fold_key(key, turn) for key in range(100) for turn in range(10)}) == 1000
    assert fold_key(1, 11) != fold_key(11, 1)
    assert 0 <= fold_key(2**70, 0) < 2**64


def trajectory(prompt_ids: list[int], ids: list[int], sampled: list[bool]) -> Trajectory:
    logprobs = [-0.5 - index if flag else 0.0 for index, flag in enumerate(sampled)]
    return Trajectory(prompt_ids, ids, sampled, logprobs, turns=[])


def test_completion_tensors_by_hand() -> None:
    rows = [
        trajectory([7, 8], [9, 2, 5, 6, 2], [True, True, False, True, True]),
        trajectory([4], [0, 3], [True, True]),  # the pad id, sampled, is trained like any other
        trajectory([1, 1, 1], [], []),
    ]
    labels, old_logprobs, loss_mask = completion_tensors(rows)
    ignored = -100
    assert labels.tolist() == [[9, 2, ignored, 6, 2], [0, 3, *[ignored] * 3], [ignored] * 5]
    assert loss_mask.tolist() == [[True, True, False, True, True], [True, True, *[False] * 3], [False] * 5]
    assert old_logprobs.tolist() == [[-0.5, -1.5, 0, -3.5, -4.5], [-0.5, -1.5, 0, 0, 0], [0] * 5]
    assert (labels.dtype, old_logprobs.dtype, loss_mask.dtype) == (torch.int64, torch.float32, torch.bool)


def test_training_tensors_give_the_recorded_logprobs_back(model: CausalLM) -> None:
    completions = sample(make_engine(model))
    rows = [
        Trajectory(list(prompt), done.ids, [True] * len(done.ids), done.logprobs, [], stop=done.stop)
        for prompt, done in zip(PROMPTS, completions, strict=True)
    ]
    labels, old_logprobs, loss_mask = completion_tensors(rows)
    packing = pack([row.prompt_ids for row in rows], [row.ids for row in rows], torch.device("cpu"))
    with torch.no_grad():
        logits = model.head(model.hidden(packing.input_ids, packing=packing))[0, packing.states[:, :-1]]
    logprobs = torch.log_softmax(logits / 0.7, dim=-1)
    new = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(torch.where(loss_mask, new, 0.0), old_logprobs, atol=1e-5, rtol=0)
    assert loss_mask.sum(dim=1).tolist() == [row.num_sampled for row in rows] == [len(c.ids) for c in completions]
    for row, label, mask in zip(rows, labels, loss_mask, strict=True):
        if row.stop is StopReason.EOS:
            assert int(label[mask][-1]) in STOPS  # the end of turn is the last trained token


def test_only_an_ended_trajectory_has_a_final_answer() -> None:
    turn = Turn("hm</think>42", parse_turn("hm</think>42", open_thinking=True))
    for stop, answer in ((StopReason.EOS, "42"), (StopReason.LENGTH, "")):
        row = Trajectory([1], [5], [True], [-1.0], [turn], stop=stop, open_thinking=True)
        assert (row.final_answer, row.num_sampled) == (answer, 1)
