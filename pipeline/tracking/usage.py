"""What a process uses: time, processor time, GPU time and energy."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from pipeline.tracking.run_folder import RunFolder, read_json

SECONDS = "seconds"


class Meter:
    """Measures from its making on. GPU figures are of the devices that this process can see, once it has used CUDA."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._energy_mj = _energy_mj()

    def read(self) -> dict[str, float]:
        """`seconds`, `cpu_s` with that of ended children, and where CUDA is in use `device_s` and, where reported, `energy_j`."""
        seconds, cpu = time.monotonic() - self._started, os.times()
        used = {SECONDS: seconds, "cpu_s": cpu.user + cpu.system + cpu.children_user + cpu.children_system}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            used["device_s"] = seconds * torch.cuda.device_count()
            if self._energy_mj is not None and (now := _energy_mj()) is not None:
                used["energy_j"] = (now - self._energy_mj) / 1000
        return {name: round(value, 3) for name, value in used.items()}


def total(*parts: Mapping[str, float]) -> dict[str, float]:
    """Sums by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: round(sum(part.get(name, 0.0) for part in parts), 3) for name in names}


def spent_before(folder: RunFolder) -> dict[str, float]:
    """What the earlier attempts of a run used; of one that was killed the time until its last record is all that is known."""
    about, end = read_json(folder.about, warn=False), read_json(folder.exit, warn=False)  # who opens the run reads both, too
    if not about:
        return {}
    used: dict[str, Any] = end.get("used", {})
    if not used:
        written = [path.stat().st_mtime for path in (folder.metrics, folder.samples) if path.exists()]
        used = {SECONDS: max(0.0, max(written, default=0.0) - about.get("attempt_s", about["started_s"]))}
    return total(about.get("spent", {}), used)


def _energy_mj() -> float | None:
    """Millijoules that all visible NVIDIA devices have used since their driver was loaded; None where nobody says."""
    import pynvml

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = range(pynvml.nvmlDeviceGetCount())
        chosen = [int(text) for text in visible.split(",") if text.isdecimal()] if visible is not None else every
        return float(sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(at)) for at in chosen))
    except pynvml.NVMLError:  # no driver, or a device too old to count
        return None
