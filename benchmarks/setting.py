"""What every benchmark is given."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.errors import DataError
from pipeline.training.device import Device


@dataclass(frozen=True, slots=True)
class Setting:
    """Attributes:
    device: where it runs, and in which precision.
    repeats: of every way that is timed.
    scratch: a folder that is removed afterwards.
    say: shows a line of progress.
    """

    device: Device
    repeats: int
    scratch: Path
    say: Callable[[str], None]

    @property
    def torch_device(self) -> torch.device:
        return self.device.device

    @property
    def dtype(self) -> torch.dtype:
        """In which type layers multiply."""
        return self.device.autocast_dtype or torch.float32


def needs(path: str, stage: str) -> Path:
    """A file of the lineage in this repository.

    Raises:
        DataError: it has not been made yet.
    """
    if not Path(path).exists():
        raise DataError(f"{path}: no such file; `dvc repro {stage}` makes it")
    return Path(path)
