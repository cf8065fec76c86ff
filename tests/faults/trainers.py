"""Stage scripts in processes that start within milliseconds: forked from one that has imported everything.

The parent is multiprocessing's fork server, which preloads this module and never computes, so it has one thread to fork.
"""

import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas  # noqa: F401  what stages import late, and what costs every process a second
import psutil
import pytest
import torch._dynamo  # noqa: F401
from lineage.project import ROOT, Project, copy_repository

from pipeline.lineage.code_hash import write_code_hashes

TRAINING = ("pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent")
SCRIPTS = {name: importlib.import_module(f"stages.{name}") for name in ("data", "tokenizer", "encode", *TRAINING)}

PARENTS = {
    "tokenizer": ("data@pretrain", "data@full_sft"),
    "pretrain": ("encode@pretrain",),
    "full_sft": ("encode@full_sft", "pretrain"),
    "lora": ("data@lora", "encode@lora", "full_sft"),
    "dpo": ("encode@dpo", "full_sft"),
    "reward": ("encode@dpo", "full_sft"),
    "ppo": ("data@rlaif", "reward"),
    "grpo": ("data@rlaif", "reward"),
    "agent": ("data@agent", "reward"),
}
PATIENCE_S = 120.0


class Moment(NamedTuple):
    """A point in a process's life: before or after call number `call`, from 1, of a function (`module:qualified.name`)."""

    function: str
    call: int
    after: bool = False
    fault: Literal["die", "fill the disk", "take the memory", "pause"] = "die"


@dataclass(frozen=True)
class Trainer:
    """A running stage and the file with what it prints."""

    process: ForkServerProcess
    log: Path

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, negative for a signal."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout_s} s: {self.said()}"
        return code

    def signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")


def start(root: Path, stage: str, *, at: Moment | None = None, count: Sequence[str] = ()) -> Trainer:
    """Starts a stage of the project at `root`.

    Args:
        stage: as DVC calls it (`data@pretrain`).
        at: when a fault is to happen: the process kills itself, fills the project's disk with the file `filler`, may take no
            more memory than it has, or makes the file `paused` and waits until that is gone.
        count: functions whose calls are counted in `calls.json`, if the process ends by itself.
    """
    log = root.parent / f"{root.name}-{stage}.log"  # where a full disk of the project cannot cut it
    log.write_text("")
    process = _server().Process(target=_main, args=(root, stage, log, at, count))
    process.start()
    return Trainer(process, log)


@cache
def _server() -> ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")  # else Arrow's allocator has a thread of its own
        forkserver.ensure_running()
    return server


def _main(root: Path, stage: str, log: Path, at: Moment | None, count: Sequence[str]) -> None:
    output = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(root)
    for variable in ("MLFLOW_TRACKING_URI", "DVC_STAGE", "RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    name, _, item = stage.partition("@")
    calls = Counter[str]()
    for function in {*count, *([at.function] if at else [])}:
        _watch(function, calls, at if at and at.function == function else None)
    try:
        if name == "code":
            write_code_hashes(root, root / "data/code")
        else:
            SCRIPTS[name].main(*([item] if item else []))
    finally:
        if count:
            Path("calls.json").write_text(json.dumps(calls))


def _watch(name: str, calls: Counter[str], at: Moment | None) -> None:
    """Counts the calls of a function, and has the fault happen at the chosen one, without a word to anybody."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    function: Callable[..., Any] = getattr(owner, last)

    @wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        now = at if at is not None and calls[name] == at.call else None
        if now and not now.after:
            _happen(now)
        value = function(*args, **options)
        if now and now.after:
            _happen(now)
        return value

    setattr(owner, last, watched)


def _happen(moment: Moment) -> None:
    match moment.fault:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fill the disk":
            fill_disk(Path.cwd())
        case "take the memory":
            taken = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (taken, resource.RLIM_INFINITY))
        case "pause":
            Path("paused").touch()
            wait_for(lambda: not Path("paused").exists(), "the end of the pause")


def fill_disk(folder: Path, *, leave: int = 0) -> None:
    """Fills the disk with the file `filler` in `folder`, but for `leave` bytes."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    os.truncate(folder / "filler", max(0, (folder / "filler").stat().st_size - leave))


class Lineage:
    """A tiny project whose stages are run when something needs them."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.project: Project = copy_repository(folder)
        self.project.set_params({"runtime.mlflow": False, "runtime.progress": "off", **changes})
        self._done: set[str] = set()
        self._run("code")

    def bring_up(self, stage: str) -> None:
        """Runs the stages before `stage`."""
        name, _, item = stage.partition("@")
        before = ("tokenizer", f"data@{item}") if name == "encode" else PARENTS.get(name, ())
        for parent in before:
            if parent not in self._done:
                self.bring_up(parent)
                self._run(parent)

    def _run(self, stage: str) -> None:
        trainer = start(self.project.root, stage)
        code = trainer.wait()
        assert code == 0, f"{stage}: exit {code}\n{trainer.said()}"
        self._done.add(stage)

    def copy_for(self, stage: str, folder: Path, changes: dict[str, Any]) -> Project:
        """A project in which `stage` has not run, and all that it needs has."""
        self.bring_up(stage)
        ignored = shutil.ignore_patterns(".git", ".runs", f"{stage}.pth", "mlflow.db*")
        shutil.copytree(self.project.root, folder, ignore=ignored, dirs_exist_ok=True)
        (folder / "checkpoints" / f"{stage}.json").unlink(missing_ok=True)
        project = Project(folder, folder.parent / "attempts.txt")
        project.set_params(changes)
        return project


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory, where the system has one: thousands of syncs to a disk would only cost time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def running(root: Path, stage: str) -> Iterator[Trainer]:
    """A stage that is killed at the end of the block, if it still runs."""
    trainer = start(root, stage)
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.join()


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Polls until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.002)


def run_folders(root: Path, stage: str) -> list[Path]:
    """The stage's run folders, oldest first."""
    folders = [about.parent for about in (root / ".runs" / stage).glob("*/*/run.json")]
    return sorted(folders, key=lambda folder: json.loads((folder / "run.json").read_text())["started_s"])
