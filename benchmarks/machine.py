"""The machine that was measured: its name, and the limits of its matrix products and its memory."""

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.measure import timed
from pipeline.model.config import ModelConfig

COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
BEST_OF = 5

Shape = tuple[int, int, int]
"""[rows, inner] times [inner, columns]."""


def machine_name(device: torch.device) -> str:
    """The processor (or GPU) with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.is_file() else []
    return f"{models[0] if models else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def file_name(device: torch.device) -> str:
    """`machine_name` as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", machine_name(device).lower()).strip("-")


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large square matrix product."""
    size = PRODUCT_SIZE[device.type]
    return 2 * size**3 / product_seconds([(size, size, size)], device, dtype)


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy within memory; one byte read and written counts once."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> float:
        target.copy_(source)
        return 1.0

    return len(source) / min(timed(copy, device)[1] for _ in range(BEST_OF))


def product_seconds(shapes: Iterable[Shape], device: torch.device, dtype: torch.dtype, *, repeats: int = BEST_OF) -> float:
    """Seconds of one `torch.mm` of each shape, one after another: each has operands of its own, as layers have."""
    operands = [
        (torch.randn(rows, inner, device=device, dtype=dtype), torch.randn(columns, inner, device=device, dtype=dtype).T)
        for rows, inner, columns in shapes
    ]
    results = {(len(a), b.shape[1]): torch.empty(len(a), b.shape[1], device=device, dtype=dtype) for a, b in operands}

    def multiply() -> float:
        for a, b in operands:
            torch.mm(a, b, out=results[len(a), b.shape[1]])
        return 1.0

    return min(timed(multiply, device)[1] for _ in range(repeats + 1))


def layer_products(config: ModelConfig, rows: int) -> list[Shape]:
    """The matrix products of all layers of a dense model for `rows` tokens; attention and head are none of them."""
    width, queries, keys = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    layer = [(width, queries), (width, keys), (width, keys), (queries, width)]
    layer += [(width, config.intermediate_size)] * 2 + [(config.intermediate_size, width)]
    return [(rows, inner, columns) for inner, columns in layer] * config.num_hidden_layers


def head_product(config: ModelConfig, rows: int) -> Shape:
    """The product that makes the logits of `rows` positions."""
    return rows, config.hidden_size, config.vocab_size


def training_products(products: Iterable[Shape]) -> list[Shape]:
    """With each product forwards, the two of its backward pass: the gradients of its input and of its matrix."""
    return [
        shape
        for rows, inner, columns in products
        for shape in ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns))
    ]
