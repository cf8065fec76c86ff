"""A packed matrix multiplies as a plain one does, and follows what is written to its weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.model.matrix import PACKED_FROM, Matrix


class Called(TorchDispatchMode):
    """Which operations were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def expected(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


@settings(deadline=None)  # the first product takes its time
@given(
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 300),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_it_multiplies(outputs: int, inputs: int, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(*shape, inputs, generator=generator)
    with torch.inference_mode():
        product = Matrix(weight)(x)
    assert product.shape == (*shape, outputs)
    torch.testing.assert_close(product, expected(x, weight), atol=1e-5 * inputs**0.5, rtol=1e-5)


def test_rows_may_lie_apart() -> None:
    weight, x = torch.randn(512, 512), torch.randn(8, 3, 512)
    with torch.inference_mode():
        torch.testing.assert_close(Matrix(weight)(x[:, -1]), expected(x[:, -1], weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
def test_it_follows_its_weight_when_told(rows: int) -> None:
    weight, x = torch.randn(512, 512), torch.randn(rows, 512)
    matrix = Matrix(weight)
    with torch.inference_mode():
        before = matrix(x)
        weight *= 2
        matrix.pack()
        torch.testing.assert_close(matrix(x), 2 * before, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize(
    ("dtype", "rows", "packed"), [(torch.float32, 4, True), (torch.float32, 1, False), (torch.bfloat16, 4, False)]
)
def test_it_packs_what_is_large_enough(dtype: torch.dtype, rows: int, packed: bool) -> None:
    matrix = Matrix(torch.randn(512, 512).to(dtype))
    assert (rows * 512 * 512 >= PACKED_FROM) == (rows == 4)
    with torch.inference_mode(), Called() as called:
        matrix(torch.randn(rows, 512).to(dtype))
    assert ("mkldnn::_linear_pointwise" in called.names) == packed


def test_it_works_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(512, 512), torch.randn(8, 512)
    matrix = Matrix(weight)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with torch.inference_mode(), Called() as called:
        weight *= 2
        matrix.pack()
        torch.testing.assert_close(matrix(x), expected(x, weight), atol=1e-4, rtol=1e-4)
    assert "mkldnn::_linear_pointwise" not in called.names
