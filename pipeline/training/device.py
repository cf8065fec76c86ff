"""Where and in which precision a stage computes. Execution only: nothing here may change what is learned."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor

from pipeline.errors import ParamsError
from pipeline.model.transformer import Backbone
from pipeline.params.schema import Runtime
from pipeline.training.ranks import ALONE, Ranks, join_ranks, launched_ranks

Model = TypeVar("Model", bound=Backbone)
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device with the autocast dtype of its forward passes (None: full fp32), and the ranks that share the work."""

    device: torch.device
    autocast_dtype: torch.dtype | None
    gradient_checkpointing: bool
    ranks: Ranks = ALONE
    compile: bool = False

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Mixed precision for forward passes; a no-op in fp32."""
        if self.autocast_dtype is None:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.autocast_dtype):
            yield

    def prepare(self, model: Model) -> Model:
        """Moves a model here, with gradient checkpointing and compilation as `runtime` wants them."""
        model.gradient_checkpointing = self.gradient_checkpointing
        model.compiled = self.compile
        return model.to(self.device)

    def upload(self, tensor: MaybeTensor) -> MaybeTensor:
        """A tensor of the CPU on this device, which is not waited for; None stays None."""
        if tensor is None or self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def peak_memory_bytes(self) -> int:
        """Peak device memory on CUDA, peak resident memory of the process on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def open_device(runtime: Runtime) -> Device:
    """The device that `runtime` asks for, with its number of threads set and the other ranks joined where a launcher named them.

    On CUDA, cuDNN does not time its kernels against each other, and in float32 matrices are not multiplied in TF32. Kernels
    whose sums depend on the order of threads stay in use: two runs on a GPU agree up to rounding.

    Each rank has a GPU of its own, number LOCAL_RANK. Objects travel by gloo, gradients on GPUs by nccl.

    Raises:
        ParamsError: CUDA is asked for and absent, has fewer GPUs than ranks, or bfloat16 is asked for on a GPU without it.
    """
    ranks = launched_ranks()
    if runtime.threads or ranks.size > 1:  # ranks that each took all cores would wait for one another
        torch.set_num_threads(runtime.threads or max(1, torch.get_num_threads() // ranks.size))
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise ParamsError("runtime.device='cuda': no CUDA device is visible; use 'auto' or 'cpu'")
    cuda = runtime.device != "cpu" and torch.cuda.is_available()
    device = own_gpu(ranks) if cuda else torch.device("cpu")
    join_ranks(ranks, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    if cuda:
        torch.backends.cudnn.benchmark = False
    dtype = {"auto": torch.bfloat16 if cuda else None, "float32": None, "bfloat16": torch.bfloat16}[runtime.dtype]
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = dtype is not None  # float32 means float32
    if dtype is not None and cuda and not torch.cuda.is_bf16_supported():
        raise ParamsError("runtime.dtype='bfloat16': this GPU has no bfloat16; use 'float32'")
    return Device(device, dtype, runtime.gradient_checkpointing, ranks, runtime.compile)


def own_gpu(ranks: Ranks) -> torch.device:
    """The GPU of this rank, made the current one; the current one where there is a single rank."""
    if ranks.size == 1:
        return torch.device("cuda")
    number, visible = int(os.environ.get("LOCAL_RANK", ranks.rank)), torch.cuda.device_count()
    if number >= visible:
        raise ParamsError(
            f"rank {ranks.rank} of {ranks.size} needs a GPU of its own and {visible} are visible; start fewer ranks"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
