"""Chunked logprobs and cross-entropy against the naive formulas, their gradients, and the promise about memory."""

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.maths import chunks
from pipeline.maths.logprobs import token_logprobs
from pipeline.maths.supervised import cross_entropy_sum

B, T, D, V = 3, 7, 8, 23


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, D, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, requires_grad=True)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, :3] = -100  # ragged: a prompt, a tail, and a row with a hole
    labels[1, 5:] = -100
    labels[2, 2] = -100
    return hidden, weight, labels


def naive(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    logprobs = distribution.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    wanted = labels != -100
    return torch.where(wanted, logprobs, 0.0), torch.where(wanted, entropy, 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_logprobs_entropy_and_gradients_equal_the_naive_formula(temperature: float, chunk: int) -> None:
    hidden, weight, labels = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, labels, temperature=temperature, chunk=chunk)
    expected_logprobs, expected_entropy = naive(hidden, weight, labels, temperature)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    assert not entropy.requires_grad
    upstream = torch.randn(B, T, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    expected = torch.autograd.grad((expected_logprobs * upstream).sum(), (hidden, weight))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 3000),
    spread=st.floats(0.1, 5.0),
    offset=st.floats(-60.0, 60.0),
    temperature=st.floats(0.01, 2.0),
    chunk=st.sampled_from([5, None]),
)
def test_accuracy_is_that_of_the_naive_formula(
    seed: int, vocab: int, spread: float, offset: float, temperature: float, chunk: int | None
) -> None:
    """Against float64 no farther than twice the naive fp32 formula; within 1e-5 of it, or for logits beyond 14 within six
    roundings of the largest one: chunks are other matrix products, which round differently.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(2, 24, 16, generator=generator), torch.randn(vocab, 16, generator=generator) * spread / 4
    hidden[..., 0], weight[:, 0] = 1.0, offset * temperature
    labels = torch.randint(0, vocab, (2, 24), generator=generator)
    labels[0, :5] = -100
    logprobs, _ = token_logprobs(hidden, weight, labels, temperature=temperature, chunk=chunk)
    plain, _ = naive(hidden, weight, labels, temperature)
    exact, _ = naive(hidden.double(), weight.double(), labels, temperature)
    eps, largest = torch.finfo(torch.float32).eps, float((hidden @ weight.T / temperature).abs().max())
    rounding = eps * float(exact.abs().max().clamp(min=1.0))  # of the result itself
    assert float((logprobs - exact).abs().max()) <= 2 * float((plain - exact).abs().max()) + rounding
    assert float((logprobs - plain).abs().max()) <= max(1e-5, 6 * eps * largest)


def test_uniform_logits_have_entropy_ln_v() -> None:
    logprobs, entropy = token_logprobs(torch.zeros(4, D), torch.ones(V, D), torch.arange(4), temperature=0.3)
    torch.testing.assert_close(entropy, torch.full((4,), math.log(V)))
    torch.testing.assert_close(logprobs, torch.full((4,), -math.log(V)))


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_entropies_carry_a_gradient_where_asked(chunk: int) -> None:
    hidden, weight, labels = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, labels, temperature=0.6, entropy_grad=True, chunk=chunk)
    expected = naive(hidden, weight, labels, 0.6)
    upstream = torch.randn(2, B, T, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad((torch.stack([logprobs, entropy]) * upstream).sum(), (hidden, weight)),
        torch.autograd.grad((torch.stack(expected) * upstream).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert not token_logprobs(hidden, weight, labels, entropy_grad=True, chunk=chunk)[1].requires_grad


def test_flat_input_and_hand_arithmetic() -> None:
    # logits (ln 1, ln 3) at temperature 1: probabilities 1/4, 3/4; at temperature 0.5 the logits double: 1/10, 9/10
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0, 1]))
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 0.75]))
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.9]))
    torch.testing.assert_close(entropy, torch.full((2,), -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))))


def test_unwanted_positions_have_no_influence_even_when_not_finite() -> None:
    hidden, weight, labels = inputs()
    spoiled = hidden.detach().clone()
    spoiled[labels == -100] = float("nan")
    spoiled.requires_grad_()
    logprobs, entropy = token_logprobs(spoiled, weight, labels)
    loss, _ = cross_entropy_sum(spoiled, weight, labels)
    torch.testing.assert_close(logprobs, token_logprobs(hidden, weight, labels)[0])
    assert torch.isfinite(entropy).all()
    grad_hidden, grad_weight = torch.autograd.grad(logprobs.sum() + loss, (spoiled, weight))
    assert torch.isfinite(grad_weight).all()
    assert (grad_hidden[labels == -100] == 0).all()


def test_impossible_tokens_leave_the_entropy_finite() -> None:
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]])
    _, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))


def test_nothing_wanted_gives_zeros_with_zero_gradients() -> None:
    hidden, weight, labels = inputs()
    nothing = torch.full_like(labels, -100)
    logprobs, entropy = token_logprobs(hidden, weight, nothing)
    loss, count = cross_entropy_sum(hidden, weight, nothing)
    assert (logprobs == 0).all() and (entropy == 0).all() and loss == 0 and count == 0
    for grad in torch.autograd.grad(logprobs.sum() + loss, (hidden, weight)):
        assert (grad == 0).all()


def test_low_precision_hidden_states_give_fp32_logprobs() -> None:
    """Hidden states, weight and logits are rounded to bf16, the softmax over them is fp32."""
    generator = torch.Generator().manual_seed(0)
    # Magnitudes in [1, 2): products of such bf16 numbers add up exactly in fp32, so no order of summation shows.
    hidden, weight = (
        torch.rand(*shape, generator=generator).add(1) * torch.randint(0, 2, shape, generator=generator).mul(2).sub(1)
        for shape in ((B, T, D), (V, D))
    )
    labels = inputs()[2]
    logprobs, entropy = token_logprobs(hidden.bfloat16(), weight, labels, temperature=0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32

    logits = (hidden.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().float()
    expected = naive(logits, torch.eye(V), labels, 0.7)
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=0)
    for exact in (hidden.bfloat16().float() @ weight.bfloat16().float().T, (hidden @ weight.T).bfloat16().float()):
        # without one of the roundings it would be something else
        assert float((naive(exact, torch.eye(V), labels, 0.7)[0] - logprobs).abs().max()) > 1e-3
    loss, _ = cross_entropy_sum(hidden.bfloat16(), weight, labels)
    torch.testing.assert_close(loss, -naive(logits, torch.eye(V), labels, 1.0)[0].sum(), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_cross_entropy_sum_equals_torch_over_all_logits(chunk: int) -> None:
    hidden, weight, labels = inputs(3)
    loss, count = cross_entropy_sum(hidden, weight, labels, chunk=chunk)
    expected = torch.nn.functional.cross_entropy(
        (hidden @ weight.T).view(-1, V), labels.view(-1), ignore_index=-100, reduction="sum"
    )
    assert int(count) == 3 * 7 - 3 - 2 - 1
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-6)
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    hidden, weight, labels = inputs()
    whole, count = cross_entropy_sum(hidden, weight, labels)
    parts = [cross_entropy_sum(hidden[b : b + 1], weight, labels[b : b + 1]) for b in range(B)]
    assert sum(int(part_count) for _, part_count in parts) == int(count)
    split = sum((loss for loss, _ in parts), torch.zeros(()))
    for a, b in zip(
        torch.autograd.grad(split / count, (hidden, weight)), torch.autograd.grad(whole / count, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


class LiveElements(TorchDispatchMode):
    """Largest tensor that any operation makes, forward and backward."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("function", [token_logprobs, cross_entropy_sum])
def test_no_tensor_is_larger_than_one_chunk_of_logits(function) -> None:  # type: ignore[no-untyped-def]
    chunk, rows, vocab = 16, 256, 512
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,))
    with LiveElements() as live:
        function(hidden, weight, labels, chunk=chunk)[0].sum().backward()
    assert chunk * vocab <= live.largest <= chunk * vocab + vocab < rows * vocab


@pytest.mark.parametrize("function", [token_logprobs, cross_entropy_sum])
def test_a_chunk_left_out_holds_the_kept_logits(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunks.KEPT_LOGITS * 4 == 64 * 2**20
    monkeypatch.setattr(chunks, "KEPT_LOGITS", 16 * 512 + 5)
    hidden, weight = torch.randn(100, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    with LiveElements() as live:
        function(hidden, weight, torch.randint(0, 512, (100,)))[0].sum().backward()
    assert live.largest == 16 * 512


class LiveBytes(TorchDispatchMode):
    """The most bytes that live at once in tensors which operations made, forward and backward; those of `inputs` not counted."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                self._count(key, tensor.untyped_storage())
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_bytes(name: str, rows: int, *, chunk: int, vocab: int, width: int) -> int:
    """Of one forward and backward over two sequences of `rows` / 2 positions, a few of them not trained."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, rows // 2, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, width, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab, (2, rows // 2), generator=generator)
    labels[0, :3] = -100
    with LiveBytes(hidden, weight, labels) as bytes_of:
        if name == "cross_entropy_sum":
            cross_entropy_sum(hidden, weight, labels, chunk=chunk)[0].backward()
        else:
            grad = name == "with entropy_grad"
            logprobs, entropy = token_logprobs(hidden, weight, labels, temperature=0.6, entropy_grad=grad, chunk=chunk)
            (logprobs + entropy if grad else logprobs).sum().backward()
    return bytes_of.peak


@pytest.mark.parametrize(("name", "tensors"), [("token_logprobs", 5), ("with entropy_grad", 5.25), ("cross_entropy_sum", 3)])
def test_the_peak_of_memory_is_as_stated(name: str, tensors: float) -> None:
    """`tensors` of [chunk, V] in fp32, two gradients of the weight, a little per position; [B, T, V] would take 64 of them."""
    shape = {"chunk": 32, "vocab": 4096, "width": 8}
    unit, weight = 32 * 4096 * 4, 4096 * 8 * 4
    per_row = 5 * 8 * 4 + 64  # copies and gradients of the hidden states; logprob, entropy, label
    peaks = {rows: peak_bytes(name, rows, **shape) for rows in (512, 1024, 2048)}
    for rows, peak in peaks.items():
        assert (tensors - 0.1) * unit < peak <= tensors * unit + 2 * weight + rows * per_row
    for rows in (512, 1024):  # where the logits alone would grow by 16 KiB a position
        assert peaks[2 * rows] - peaks[rows] <= rows * per_row


def test_only_trained_positions_reach_the_head() -> None:
    labels = torch.full((2, 64), -100)
    labels[:, 60:] = 5
    with LiveElements() as live:
        token_logprobs(torch.randn(2, 64, 4), torch.randn(512, 4), labels)
    assert live.largest == 8 * 512


def test_saved_for_backward_does_not_grow_with_the_vocabulary() -> None:
    hidden, weight = torch.randn(256, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(hidden, weight, torch.randint(0, 512, (256,)), chunk=16)
    assert max(saved, default=0) <= 512 * 4  # the head's weight, never [chunk, V] or [N, V]
