"""What passes before anything useful happens: the command line's help, and a stage's way to its first step."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import Bar, Report
from benchmarks.setting import Setting, needs

POLL_S = 0.01
INPUTS = ("data", "external", "params.yaml", "dvc.yaml", "dvc.lock")


def startup(setting: Setting) -> Report:
    """New processes, as a user starts them."""
    needs("data/encoded/pretrain", "pretrain")
    root = Path.cwd()
    helps = [_seconds([sys.executable, "-m", "pipeline", "--help"], root) for _ in range(setting.repeats + 1)][1:]
    firsts = [_first_step(setting.scratch / f"start-{number}") for number in range(setting.repeats + 1)][1:]
    rows = [
        ("python -m pipeline --help", f"{statistics.median(helps):.2f}", f"{min(helps):.2f} to {max(helps):.2f}"),
        ("stage pretrain, to its first step", f"{statistics.median(firsts):.2f}", f"{min(firsts):.2f} to {max(firsts):.2f}"),
    ]
    bars = [
        Bar("0.5 s over the seconds of --help", 0.5 / statistics.median(helps), 1.0),
        Bar("6 s over the seconds to a first step", 6 / statistics.median(firsts), 1.0),
    ]
    return Report(
        "start-up",
        "Each in a process of its own; the stage in a fresh folder with the same inputs.",
        ("", "seconds", "range"),
        rows,
        bars,
    )


def _seconds(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _first_step(folder: Path) -> float:
    """Seconds until pretrain has logged its first step; the process is stopped then."""
    folder.mkdir()
    for name in INPUTS:
        (folder / name).symlink_to(Path.cwd() / name)
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    with (folder / "output").open("w") as output:
        stage = subprocess.Popen(
            [sys.executable, Path.cwd() / "stages/pretrain.py"], cwd=folder, stdout=output, stderr=output, env=environment
        )
        while not any('"train/loss"' in path.read_text() for path in folder.glob(".runs/pretrain/*/*/metrics.jsonl")):
            if stage.poll() is not None:
                raise RuntimeError((folder / "output").read_text())
            time.sleep(POLL_S)
        seconds = time.perf_counter() - started
        stage.terminate()
        stage.wait()
    return seconds
