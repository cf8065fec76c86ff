"""The load of the machine while a trainer lives, sampled with MLflow's own monitors.

`mlflow.system_metrics` has a thread that sends what it samples and ends for good when the store does not answer once. Here the
samples go to a file of the run folder first, and from there to MLflow as training metrics do: late rather than never, and once.
"""

import json
import time
from contextlib import suppress

from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

from pipeline.tracking.recorder import now_s
from pipeline.tracking.run_folder import RunFolder

EVERY_S = 10.0
PREFIX = "system/"


class SystemLoad:
    """Appends a line `{step, time_s, metrics}` to system.jsonl every `EVERY_S` seconds; a step is a second since the run began.

    Args:
        folder: the run.
        started_s: its first start, Unix time.
    """

    def __init__(self, folder: RunFolder, started_s: float) -> None:
        self._path = folder.system
        self._started_s = started_s
        self._monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor()]
        with suppress(ImportError, RuntimeError):  # no NVIDIA driver, or no library that asks it
            self._monitors.append(GPUMonitor())
        self._collect()  # the use of a CPU is measured since the question before
        self._due = time.monotonic() + EVERY_S

    def sample(self) -> None:
        """Measures when it is time. A disk that is full loses the sample."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        values = {f"{PREFIX}{name}": value for name, value in self._collect().items()}
        line = json.dumps({"step": round(now_s() - self._started_s), "time_s": now_s(), "metrics": values})
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _collect(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            found |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return found
