"""Whether this machine can do what `params.yaml` asks for: Python, libraries, device, disk. A line each."""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from pipeline.diagnosis.findings import Severity
from pipeline.lineage.housekeeping import shown
from pipeline.params import Params
from pipeline.params.needs import needs
from pipeline.params.schema import Runtime
from pipeline.reading.lines import Line, listed
from pipeline.tracking.outlook import expected, heavy
from pipeline.tracking.space import COPIES_OF_OUTPUT


def check_python(root: Path) -> Line:
    """The interpreter against `requires-python`."""
    with (root / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["requires-python"]
    running = platform.python_version()
    if running not in SpecifierSet(wanted):
        return Line(
            "python", Severity.PROBLEM, f"{running}, and {wanted} is needed; `rm -r .venv && make setup` takes another one"
        )
    return Line("python", Severity.OK, f"{running} ({sys.prefix})")


def check_libraries(root: Path) -> Line:
    """What is installed against requirements.lock. Builds of the same version (`2.13.0+cpu`) count as it."""
    pins = [line.strip().partition("==") for line in (root / "requirements.lock").read_text(encoding="utf-8").splitlines()]
    wanted = {name: pinned for name, separator, pinned in pins if separator and not name.startswith("#")}
    differing = []
    for name, pinned in wanted.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            differing.append(f"{name} is missing")
            continue
        if installed.partition("+")[0] != pinned.partition("+")[0]:
            differing.append(f"{name} {installed} instead of {pinned}")
    if differing:
        advice = "results may differ from recorded ones; `make setup` installs requirements.lock"
        return Line("libraries", Severity.WARN, f"{listed(differing)}; {advice}")
    return Line("libraries", Severity.OK, f"{len(wanted)} as in requirements.lock")


def check_device(runtime: Runtime) -> Line:
    """The GPUs that torch sees, with driver and free memory, or the CPU."""
    import torch  # seconds

    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        if runtime.device == "cuda":
            text = f"runtime.device is cuda and torch {torch.__version__} sees no GPU; install its CUDA build, or set auto"
            return Line("device", Severity.PROBLEM, text)
        return Line("device", Severity.OK, f"CPU, {cores} cores, torch {torch.__version__}; no CUDA device is visible")
    gpus = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(f"{torch.cuda.get_device_name(number)} ({shown(free)} of {shown(total)} free)")
    text = f"{', '.join(gpus)}; driver {_driver()}, torch {torch.__version__}"
    if runtime.device == "cpu":
        return Line("device", Severity.WARN, f"runtime.device is cpu although there is {text}; auto takes it")
    if runtime.ranks > len(gpus):
        return Line(
            "device", Severity.PROBLEM, f"runtime.ranks is {runtime.ranks}, each needs a GPU of its own, and there is {text}"
        )
    return Line("device", Severity.OK, text)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0] if said else "unknown"


def check_disk(root: Path, home: Path, params: Params) -> Line:
    """Free space against what a rebuild may take: saves of all stages at once, outputs, and their copies in the cache."""
    used = f".runs holds {shown(size_of([home / '.runs']))}, DVC's cache {shown(size_of([root / '.dvc/cache']))}"
    stages = list(needs(params))
    needed: defaultdict[int, int] = defaultdict(int)
    least: defaultdict[int, int] = defaultdict(int)  # of the largest stage alone
    free: dict[int, int] = {}
    for place, costs in (
        (home, [(params.runtime.keep_saves + 1) * stage.save for stage in stages]),
        (root, [COPIES_OF_OUTPUT * stage.output for stage in stages]),
    ):
        device = place.stat().st_dev
        needed[device] += sum(costs)
        least[device] += max(costs)
        free[device] = shutil.disk_usage(place).free
    tightest = min(needed, key=lambda device: free[device] - needed[device])
    text = f"{shown(free[tightest])} free; {used}; a rebuild of everything may take {shown(needed[tightest])}"
    if free[tightest] >= needed[tightest]:
        return Line("disk", Severity.OK, text)
    severity = Severity.WARN if free[tightest] >= least[tightest] else Severity.PROBLEM
    return Line("disk", severity, f"{text}; `python -m pipeline gc` says what may go, runtime.keep_saves may be lower")


def check_steps(params: Params) -> Iterator[Line]:
    """Memory and time of the heaviest optimizer steps on this machine."""
    steps = expected(params)
    largest = max(steps, key=lambda step: step.memory)
    for step in steps:
        if (line := heavy(step)) is not None:
            yield Line("step", Severity.WARN, f"{step.stage}: {line}")
    slowest = max(steps, key=lambda step: step.seconds)
    time = f", about {slowest.seconds:.0f} s ({slowest.stage})" if slowest.seconds >= 1 else ""
    size = f"up to {shown(largest.memory)} of {shown(largest.free)} of free memory ({largest.stage})"
    yield Line("step", Severity.OK, f"{size}{time}, where rows are as long as they may be")


def size_of(places: Iterable[Path]) -> int:
    """Bytes of all files below; those that go away meanwhile count as none."""
    return sum(_sizes(places))


def _sizes(places: Iterable[Path]) -> Iterator[int]:
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                with suppress(OSError):
                    yield os.lstat(os.path.join(folder, name)).st_size
