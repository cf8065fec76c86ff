"""What runs used: attempts summed, killed ones as far as they are known, energy where a device reports it."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder, write_json
from pipeline.tracking.usage import Meter, spent_before, total


def folder_at(root: Path) -> RunFolder:
    folder = RunFolder(root / ".runs/grpo/abc/1")
    folder.path.mkdir(parents=True)
    return folder


def test_totals_are_by_name() -> None:
    assert total() == {}
    assert total({"seconds": 1.5}, {"seconds": 2.0, "energy_j": 3.0}, {}) == {"seconds": 3.5, "energy_j": 3.0}


def test_attempts_add_up_and_pauses_do_not(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    assert spent_before(folder) == {}
    write_json(folder.about, {"started_s": 100.0, "attempt_s": 100.0, "spent": {}})
    write_json(folder.exit, {"code": 143, "time_s": 130.0, "used": {"seconds": 30.0, "cpu_s": 50.0}})
    first = spent_before(folder)
    assert first == {"seconds": 30.0, "cpu_s": 50.0}
    write_json(folder.about, {"started_s": 100.0, "attempt_s": 1000.0, "spent": first})
    write_json(folder.exit, {"code": 0, "time_s": 1012.0, "used": {"seconds": 12.0, "cpu_s": 20.0}})
    assert Record(folder).used == {"seconds": 42.0, "cpu_s": 70.0} and Record(folder).seconds == 42.0


def test_a_killed_attempt_lasted_until_its_last_record(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    write_json(folder.about, {"started_s": 100.0, "attempt_s": 200.0, "spent": {"seconds": 5.0}})
    folder.metrics.write_text(json.dumps({"step": 1, "time_s": 230.0, "metrics": {}}))
    os.utime(folder.metrics, (230.0, 230.0))
    assert spent_before(folder) == {"seconds": 35.0}
    folder.metrics.unlink()
    assert spent_before(folder) == {"seconds": 5.0}  # it left nothing


class Device:
    """NVML as far as it is asked: two devices that use 250 J between two readings."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.readings = 0

    def nvmlInit(self) -> None:
        self.readings += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:
        return at

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 1_000_000 * (handle + 1) + 250_000 * self.readings


@pytest.mark.parametrize(("visible", "joules"), [(None, 500.0), ("1", 250.0), ("", 0.0)])
def test_energy_is_that_of_the_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str | None, joules: float) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "pynvml", Device())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = Meter()
    time.sleep(0.01)
    used = meter.read()
    assert used["energy_j"] == joules and used["device_s"] == pytest.approx(2 * used["seconds"], abs=2e-3)


def test_without_a_device_there_is_time_alone() -> None:
    assert set(Meter().read()) == {"seconds", "cpu_s"}
