"""Which rebuild a run belongs to: `dvc repro` has no hook, so every trainer notes the process that it works for."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import psutil

from pipeline.supervise.ancestry import Ancestor, inherited

FLOW_RUN = "PREFECT__FLOW_RUN_ID"
EXPERIMENT = "DVC_EXP_NAME"
_COMMAND_WORDS = 4  # `dvc` is one of the first: after an interpreter and `-m`, or behind a launcher such as `uv run`


@dataclass(frozen=True, slots=True)
class Rebuild:
    """One `dvc repro`, `dvc exp run` or flow run: what executes stages until everything asked for is up to date.

    Attributes:
        key: the flow run's id, or host and process; with the experiment's name where several share a process.
        host: where `pid` counts.
        pid: of the outermost process.
        started_s: its start, Unix time.
        began: its start as `Ancestor` has it, which no step of the clock moves; 0 where that was not noted, which no process has.
    """

    key: str
    host: str
    pid: int
    started_s: float
    began: float = 0.0

    @classmethod
    def current(cls) -> Self | None:
        """The rebuild above this process; None for a script that was started by itself."""
        owner = next(iter(inherited()), None) or _outermost_dvc()
        if owner is None:
            return None
        host = socket.gethostname()
        key = os.environ.get(FLOW_RUN) or f"{host}/{owner.pid}/{owner.began:.2f}"
        experiment = quote(os.environ.get(EXPERIMENT, ""), safe="")  # with an apostrophe MLflow could not look for it
        try:
            started_s = psutil.Process(owner.pid).create_time()
        except psutil.NoSuchProcess:  # it has just ended
            started_s = time.time()
        return cls("/".join(filter(None, [key, experiment])), host, owner.pid, started_s, owner.began)

    @classmethod
    def of(cls, noted: Mapping[str, Any] | None) -> Self | None:
        """From what `note` left."""
        return cls(**noted) if noted else None

    def note(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs; of another host's nothing is known, which counts as no."""
        return self.host == socket.gethostname() and Ancestor(self.pid, self.began).is_alive


def _outermost_dvc() -> Ancestor | None:
    found = [process for process in psutil.Process().parents() if _is_dvc(process)]
    return Ancestor.of(found[-1].pid) if found else None


def _is_dvc(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:_COMMAND_WORDS]
    except psutil.Error:  # it ended, or is another user's
        return False
    return any(Path(word).name == "dvc" for word in words)
