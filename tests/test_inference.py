"""The model that samples computes what the one that is trained does, from weights that are its own."""

import pytest
import torch
from test_rollout import make_model
from test_static_decode import MODELS as DENSE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.model.inference import InferenceModel
from pipeline.model.kv_block import KVBlock
from pipeline.model.kv_cache import KVCache

MODELS = DENSE | {"experts": make_model(use_moe=True), "one_expert": make_model(use_moe=True, num_experts_per_tok=1)}
IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 30, 1]])
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def logits(model: InferenceModel) -> Tensor:
    """Of IDS, read in two parts, [2, 4, V]."""
    cache = KVCache([KVBlock.allocate(model, 2, 4)])
    first = model.hidden(IDS[:, :3], cache)
    cache.advance(3)
    return model.head(torch.cat((first, model.hidden(IDS[:, 3:], cache)), dim=1))


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_it_computes_what_its_source_does_now(name: str, dtype: torch.dtype) -> None:
    source = MODELS[name]
    copy = InferenceModel(source, dtype)
    kept = {key: tensor.clone() for key, tensor in source.state_dict().items()}
    seen = []
    try:
        for factor in (1.0, 1.05, 1 / 1.05):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter *= factor
            copy.refresh()
            with torch.inference_mode(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                expected = source(IDS)
            with torch.inference_mode():
                seen.append(logits(copy))
            scale = float(expected.abs().max())
            torch.testing.assert_close(seen[-1] / scale, expected / scale, atol=CLOSE[dtype], rtol=0)
    finally:
        source.load_state_dict(kept)
    assert not torch.equal(seen[0], seen[1])


def test_it_is_a_copy_that_stays_in_place() -> None:
    source = make_model()
    copy = InferenceModel(source, torch.bfloat16)
    addresses = [tensor.data_ptr() for tensor in copy._copies]
    assert not {tensor.data_ptr() for tensor in source.state_dict().values()} & set(addresses)
    with torch.inference_mode():
        before = logits(copy)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.zero_()
        torch.testing.assert_close(logits(copy), before, atol=0, rtol=0)
        copy.refresh()  # within inference mode and without
        assert float(logits(copy).abs().max()) == 0
    copy.refresh()
    assert addresses == [tensor.data_ptr() for tensor in copy._copies]


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
        return func(*args, **(kwargs or {}))


def test_a_layer_is_four_products_adapted_or_not() -> None:
    for name in ("dense", "adapted"):
        copy = InferenceModel(MODELS[name])
        cache = KVCache([KVBlock.allocate(copy, 2, 4)])
        with torch.no_grad(), Counting() as counting:
            copy.head(copy.hidden(IDS, cache))
        assert counting.products == 4 * copy.config.num_hidden_layers + 1
