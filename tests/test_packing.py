"""Packed rows against each row on its own: hidden states, gradients, and what is computed once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model import packing
from pipeline.model.packing import Packing, pack
from pipeline.model.transformer import CausalLM
from tests.test_kv_cache import CONFIGS, UNCACHED, make

CPU = torch.device("cpu")
MODELS = dict(zip(CONFIGS, UNCACHED.values(), strict=True))
ids = st.lists(st.integers(0, 52), min_size=1, max_size=12)
rows = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 52), max_size=15)), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three rows to a block, so that a handful of rows makes several."""
    monkeypatch.setattr(packing, "BLOCK_ROWS", 3)
    yield


def one_by_one(model: CausalLM, prompts: list[list[int]], suffixes: list[list[int]]) -> list[Tensor]:
    """The hidden states after the prompt and after every id of each row, [len(row) + 1, W]."""
    hidden = [
        model.hidden(torch.tensor([prompt + row]))[0, len(prompt) - 1 :] for prompt, row in zip(prompts, suffixes, strict=True)
    ]
    return hidden


def packed_states(model: CausalLM, packed: Packing, suffixes: list[list[int]]) -> list[Tensor]:
    hidden = model.hidden(packed.input_ids, packing=packed)[0]
    return [hidden[packed.states[place, : len(row) + 1]] for place, row in enumerate(suffixes)]


@pytest.mark.parametrize("shape", CONFIGS)
@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(ids, min_size=3, max_size=3), chosen=rows)
def test_every_row_is_read_as_if_alone(shape: str, prompts: list[list[int]], chosen: list[Any]) -> None:
    model = MODELS[shape]
    own, suffixes = [prompts[which] for which, _ in chosen], [row for _, row in chosen]
    packed = pack(own, suffixes, CPU)
    with torch.no_grad():
        for ours, alone in zip(packed_states(model, packed, suffixes), one_by_one(model, own, suffixes), strict=True):
            torch.testing.assert_close(ours, alone, atol=2e-5, rtol=0)
    assert packed.input_ids.shape[1] == sum(map(len, {tuple(prompt) for prompt in own})) + sum(map(len, suffixes))
    assert packed.longest == max(len(prompt) + len(row) for prompt, row in zip(own, suffixes, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", CONFIGS)
def test_gradients_are_those_of_the_rows(shape: str, checkpointing: bool) -> None:
    model = MODELS[shape]
    own = [[1, 2, 3], [4, 5], [1, 2, 3], [4, 5], [1, 2, 3], [6]]
    suffixes = [[7, 8, 9, 10, 11, 12], [13], [], [14, 15, 16], [17, 18], [19, 20, 21, 22]]
    weights = [torch.randn(len(row) + 1, 1, generator=torch.Generator().manual_seed(place)) for place, row in enumerate(suffixes)]
    gradients = []
    for packing_used in (True, False):
        model.zero_grad()
        model.gradient_checkpointing = checkpointing and packing_used
        each = packed_states(model, pack(own, suffixes, CPU), suffixes) if packing_used else one_by_one(model, own, suffixes)
        torch.stack([(hidden.tanh() * weight).sum() for hidden, weight in zip(each, weights, strict=True)]).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=2e-5, rtol=1e-4)


def test_nothing_leaks_between_rows_of_a_prompt() -> None:
    """Other ids in one row leave every other row as it is, bit for bit."""
    model, own = MODELS["dense"], [[1, 2, 3]] * 4 + [[4, 5]]
    suffixes = [[6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19, 20]]
    other = [suffixes[0], [50, 51, 52], *suffixes[2:]]
    with torch.no_grad():
        before, after = (packed_states(model, pack(own, each, CPU), each) for each in (suffixes, other))
    changed = [not torch.equal(one, two) for one, two in zip(before, after, strict=True)]
    assert changed == [False, True, False, False, False]


def test_states_by_hand() -> None:
    packed = pack([[5, 6], [5, 6], [7]], [[8, 9], [], [3]], CPU)
    assert packed.input_ids.tolist() == [[5, 6, 7, 3, 8, 9]]  # prompts, then rows from the shortest to the longest
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert packed.states.tolist() == [[1, 4, 5], [1, 0, 0], [2, 3, 0]]


def test_a_row_beyond_the_window_is_refused_by_its_own_length() -> None:
    model = make(replace(CONFIGS["dense"], max_position_embeddings=8))
    fits, beyond = ([[1] * 4] * 5, [[2] * 4] * 5), ([[1] * 4] * 2, [[2] * 4, [2] * 5])
    packed = pack(*fits, CPU)
    assert packed.input_ids.shape[1] == 24
    model.hidden(packed.input_ids, packing=packed)
    packed = pack(*beyond, CPU)
    with pytest.raises(ParamsError, match="must be >= 9"):
        model.hidden(packed.input_ids, packing=packed)
