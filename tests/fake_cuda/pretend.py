"""A device "cuda" that computes on the CPU: tensors that say they lie there, and complain where the two halves meet.

A `Pretended` tensor tells autograd, autocast and the code under test that it is of a CUDA device; what it holds is a tensor of
the CPU. Values are real, so whole loops run. An operation on tensors of both devices raises, as CUDA's would, but for what CUDA
allows: copies from one to the other, numbers (0-d tensors) in element-wise operations, and CPU indices into a CUDA tensor.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
MOVES = {aten._to_copy, aten.copy_, aten._copy_from}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put}


class Apart(RuntimeError):
    """Tensors of two devices in one operation."""


class Pretended(Tensor):
    """A tensor "of CUDA"; `held` has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CUDA,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return compute(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)  # a file is read to the CPU

    def __repr__(self, **kwargs: Any) -> str:
        return f"Pretended({self.held!r})"


class Pretending(TorchDispatchMode):
    """Makes tensors that are asked for on CUDA pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return compute(func, args, kwargs or {})


class Uploading(TorchFunctionMode):
    """`torch.tensor(list, device="cuda")` and lists as indices in two steps, because PyTorch asks CUDA for memory there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        return func(*args, **kwargs)


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the operation gives on the CPU, on the device where CUDA would leave it.

    Raises:
        Apart: it takes tensors of both devices and CUDA would not.
    """
    packet = func.overloadpacket
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, Pretended) for tensor in tensors)
    if there and packet not in MOVES:
        _check(func, packet, args, tensors)
    if packet is aten._fused_sdp_choice:
        return 0  # attention of plain operations: a CPU has no other one under CUDA's names
    device = kwargs.get("device")
    result = func(*tree_map(_held, args), **{key: _held(value) for key, value in kwargs.items() if key != "pin_memory"})
    if func._schema.is_mutable and func._schema.arguments[0].alias_info is not None and isinstance(args[0], Tensor):
        if there and torch.Tag.inplace_view in func.tags:  # as squeeze_: what is held has its new shape, who holds it not
            with no_dispatch():
                func(*args, **kwargs)
        return args[0]
    if there if device is None else torch.device(device).type == "cuda":
        return tree_map(_wrapped, result)
    return result


def _wrapped(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(value.is_inference()):  # a view of a tensor from outside of inference mode is none of it either
        return Pretended(value)


def _check(func: Any, packet: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    if packet in INDEXED:
        values = [*args[2:3]] if len(args) > 2 else []
        meeting = [args[0], *(value for value in values if value.dim())]
        if not isinstance(args[0], Pretended):
            meeting = tensors
    elif torch.Tag.pointwise in func.tags or packet in (aten.fill, aten.fill_):
        meeting = [tensor for tensor in tensors if tensor.dim()]
    else:
        meeting = list(tensors)
    if len({isinstance(tensor, Pretended) for tensor in meeting}) > 1:
        where = ", ".join(f"{tuple(t.shape)} on {'cuda' if isinstance(t, Pretended) else 'cpu'}" for t in meeting)
        raise Apart(f"{func}: {where}")


def _held(value: Any) -> Any:
    if isinstance(value, Pretended):
        return value.held
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return value


def _moved(module: nn.Module, device: Any) -> nn.Module:
    """`Module.to`, with tied parameters still tied."""
    known: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    moved = tensor.detach().to(device)
                    known[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if tensors is part._parameters else moved
                    known[id(known[id(tensor)])] = known[id(tensor)]
                tensors[name] = known[id(tensor)]
    return module


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Within, `torch.device("cuda")` is a pretended device; guard.cpp must have been loaded before any backward pass."""
    with contextlib.ExitStack() as stack:
        for target, replacement in {
            "torch.cuda._lazy_init": lambda: None,
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
            "torch.cuda.max_memory_allocated": lambda *args: 0,
            "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
            "torch.Tensor.pin_memory": lambda self: self,
            "torch.Tensor.tolist": lambda self, own=Tensor.tolist: own(_held(self)),
            "torch.nn.Module.to": _moved,
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        stack.enter_context(Pretending())
        stack.enter_context(Uploading())
        yield
