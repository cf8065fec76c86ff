"""Weights on disk: `<name>.pth`, a flat state dict in fp32, and `<name>.json` beside it, what the shapes cannot tell.

Equal weights give equal bytes, whatever the file is called; files appear whole or not at all; loading is strict.
"""

import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from pipeline.errors import DataError, NumericsError
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import CausalLM

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MAX_NAMES = 3  # of wrong tensors in one error line
# What the readers of zip and pickle raise on damaged files (measured by flipping every byte of one).
UNREADABLE = (
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    OSError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


def model_meta(kind: str, config: ModelConfig, tokenizer_digest: str, **extra: Any) -> dict[str, Any]:
    """What `save_model` writes beside the weights of a `causal_lm`, `reward` or `lora` checkpoint."""
    return {"kind": kind, "model": config.to_dict(), "tokenizer": tokenizer_digest, **extra}


def save_model(path: Path, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Writes `path` (fp32, keys sorted, tied tensors stored once) and its `.json` (keys sorted).

    Args:
        path: ends in `.pth`.
        state: names to tensors on any device; adapters alone make a LoRA checkpoint.
        meta: plain values, see `model_meta`.

    Raises:
        NumericsError: a weight is not finite; nothing is written.
    """
    if broken := broken_tensors(state):
        raise NumericsError(f"{path}: not written, {broken}; training has diverged: lower the learning rate")
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = _plain(state)
    write_atomically(path, lambda file: torch.save(plain, file))
    text = json.dumps(meta, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path.with_suffix(".json"), lambda file: file.write(text.encode("utf-8")))


def load_model(path: Path, *, tokenizer_digest: str | None = None) -> CausalLM:
    """The language model that `save_model` wrote, on the CPU, in evaluation mode.

    Args:
        path: ends in `.pth`; the `.json` must lie beside it.
        tokenizer_digest: where given, the checkpoint must have been trained with this tokenizer.

    Raises:
        DataError: a file is missing or damaged, is of another kind, belongs to another tokenizer, or tensors do not fit.
    """
    meta = load_meta(path, "causal_lm", tokenizer_digest)
    model = CausalLM(meta["model"])
    load_strictly(model, load_state(path), path)
    return model.eval()


def load_state(path: Path) -> dict[str, Tensor]:
    """The flat state dict of floating-point weights in a `.pth` file, on the CPU; nothing but tensors is unpickled.

    Raises:
        DataError: the file is missing, damaged, or holds something else, or a value that is not finite.
    """
    try:
        _check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0][:120]
        raise DataError(f"{path}: not a readable PyTorch file of tensors ({reason})") from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        held = ", ".join(map(str, list(state)[:MAX_NAMES])) if isinstance(state, dict) else type(state).__name__
        raise DataError(f"{path}: must be a flat state dict, name to tensor; it holds {held}")
    check_weights(path, state)
    return state


def check_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Raises a DataError with the names of what `path` holds and no model can have as a weight."""
    if odd := [name for name, tensor in state.items() if not _holds_weights(tensor)]:
        raise DataError(f"{path}: must hold dense floating-point tensors; not so: {_shortened(odd)}")
    refuse_broken(state, path)


def _holds_weights(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.is_floating_point()


def refuse_broken(state: Mapping[str, Tensor], path: Path) -> None:
    """Raises a `DataError` that names the file, and the stage that made it, where a weight is not finite."""
    if broken := broken_tensors(state):
        stage = path.stem if path.parent.name == "checkpoints" else None
        remedy = (
            f"stage {stage} made it: lower {stage}.lr and run it again" if stage else "its training has diverged; use another"
        )
        raise DataError(f"{path}: {broken}; {remedy}")


def broken_tensors(state: Mapping[str, Tensor]) -> str | None:
    """Which weights are NaN or infinite, in words; None when all are finite."""
    # float: isfinite does not know all 8-bit types
    broken = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor.detach().float()).all())]
    return f"{len(broken)} of {len(state)} tensors are not finite ({_shortened(broken)})" if broken else None


def load_meta(path: Path, kind: str, tokenizer_digest: str | None = None) -> dict[str, Any]:
    """What the `.json` beside a checkpoint says, with `model` as a `ModelConfig`. Errors as `load_model`."""
    beside = path.with_suffix(".json")
    try:
        meta = json.loads(beside.read_text(encoding="utf-8"))
        found, digest = meta["kind"], meta["tokenizer"]
        meta["model"] = ModelConfig.from_dict(meta["model"])
    except FileNotFoundError as error:
        raise DataError(f"{beside}: no such file; a checkpoint is a .pth and the .json beside it") from error
    except OSError as error:
        raise DataError(f"{beside}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{beside}: not the description of a checkpoint ({reason})") from error
    if found != kind:
        raise DataError(f"{beside}: kind {found!r}; expected {kind!r}")
    if tokenizer_digest is not None and digest != tokenizer_digest:
        raise DataError(f"{path}: trained with tokenizer {digest[:12]}, but the tokenizer in use is {tokenizer_digest[:12]}")
    return meta


def load_strictly(model: nn.Module, state: Mapping[str, Tensor], path: Path, advice: str = "") -> None:
    """Copies `state` into the model, if its names and shapes are exactly the model's.

    Raises:
        DataError: in one line, what is missing, unexpected, of another shape, or tied in the model but not in the file.
    """
    own = model.state_dict()
    shapes = [
        f"{name} (file {list(state[name].shape)}, model {list(own[name].shape)})"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    faults = {
        "wrong shape": shapes,
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
    }
    if not any(faults.values()) and HEAD in own and not torch.equal(state[HEAD], state[EMBEDDING]):
        faults["different, although the model ties them"] = [f"{EMBEDDING} and {HEAD}"]
    if any(faults.values()):
        text = "; ".join(f"{what}: {_shortened(names)}" for what, names in faults.items() if names)
        raise DataError(f"{path}: does not fit the model; {text}{advice}")
    model.load_state_dict(state)


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Lets `write` fill a temporary file beside `path`, syncs it to disk, and renames it to `path`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are private
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _check_sums(path: Path) -> None:
    """Raises on a flipped bit: `torch.load` does not look at the checksums that `torch.save` writes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sorted fp32 CPU copies without slack; names that share memory go on sharing it."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    plain = {}
    for name in sorted(state):
        tensor = state[name].detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            # A clone, because a view would drag its whole storage into the file.
            copies[key] = tensor.to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)
        plain[name] = copies[key]
    return plain


def _shortened(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
