"""Truncated sampling against transformers' own processors, and its edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from pipeline.errors import ParamsError
from pipeline.rollout.truncation import Truncation

SEEDS = st.integers(0, 10**6)


def draw(seed: int, rows: int = 4, vocabulary: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, the ids that each row holds [N, L], and the same as a mask."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    ids = torch.randint(vocabulary, (rows, 12), generator=generator)
    return logits, ids, torch.zeros(rows, vocabulary, dtype=torch.bool).scatter(1, ids, True)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, top_k=st.integers(1, 60), top_p=st.floats(0.05, 0.99), penalty=st.floats(0.5, 2.0))
def test_each_equals_the_processor_of_transformers(seed: int, top_k: int, top_p: float, penalty: float) -> None:
    logits, ids, seen = draw(seed)
    penalised = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    torch.testing.assert_close(Truncation(repetition_penalty=penalty)(logits, seen), penalised)
    assert torch.equal(Truncation(top_k=top_k)(logits, seen), TopKLogitsWarper(top_k)(ids, logits))
    ours, theirs = Truncation(top_p=top_p)(logits, seen), TopPLogitsWarper(top_p)(ids, logits)
    cumulative = logits.sort(descending=True).values.softmax(-1).cumsum(-1)
    if (cumulative - top_p).abs().min() > 1e-4:  # transformers sums from the other end
        assert torch.equal(ours, theirs)
    together = Truncation(top_k, top_p, penalty)(logits, seen)
    chained = Truncation(top_p=top_p)(TopKLogitsWarper(top_k)(ids, penalised), seen)
    torch.testing.assert_close(together, chained)


def test_the_defaults_change_nothing_and_one_id_is_always_left() -> None:
    logits, _, seen = draw(1)
    assert torch.equal(Truncation()(logits, seen), logits)
    assert ((Truncation(top_p=1e-6)(logits, seen) > -torch.inf).sum(dim=-1) == 1).all()
    assert torch.equal(Truncation(top_k=1)(logits, seen).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"top_k": -1}, "top_k=-1: must be >= 1, or 0 for no limit"),
        ({"top_p": 0.0}, "top_p=0.0: must be > 0 and <= 1"),
        ({"top_p": 1.5}, "top_p=1.5: must be > 0 and <= 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be a number > 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan: must be a number > 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf: must be a number > 0"),
        ({"top_p": math.nan}, "top_p=nan: must be > 0 and <= 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(wrong: dict, line: str) -> None:
    with pytest.raises(ParamsError, match=line.replace("(", r"\(")):
        Truncation(**wrong)
