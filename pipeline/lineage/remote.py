"""Results shared through a DVC remote that the environment names, so that a workspace may start empty, as in a container.

With MINIMIND_DVC_REMOTE every stage that has ended is pushed with DVC's run cache, and what any workspace has pushed is taken
from there instead of being made again. Without it nothing here does anything.
"""

import os
import subprocess
import sys
from pathlib import Path

from pipeline.errors import PipelineError

VARIABLE = "MINIMIND_DVC_REMOTE"
NAME = "environment"
# The address is read by DVC's process itself: it may have a password, and other users may read a command line.
_ADD = """
import os, sys
from dvc.cli import main
variable, name = sys.argv[1:]
sys.exit(main(["remote", "add", "--quiet", "--local", "--force", "--default", name, os.environ[variable]]))
"""


def pull_options(root: Path) -> list[str]:
    """For `dvc repro`: what makes it look in the remote, which becomes this workspace's default (`.dvc/config.local`).

    Raises:
        PipelineError: DVC does not take it.
    """
    url = os.environ.get(VARIABLE)
    if not url:
        return []
    _run(root, "remote add", [sys.executable, "-c", _ADD, VARIABLE, NAME])
    (root / ".dvc" / "config.local").chmod(0o600)
    return ["--pull"]


def push_shared(root: Path, stage: str) -> None:
    """Sends a stage's outputs, and the run cache with which another workspace finds them.

    Raises:
        PipelineError: not all of it has arrived.
    """
    if os.environ.get(VARIABLE):
        _run(root, "push", [sys.executable, "-m", "dvc", "push", "--run-cache", stage])


def _run(root: Path, what: str, command: list[str]) -> None:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()
        reason = next((line for line in said if line.startswith("ERROR")), said[0])
        raise PipelineError(f"`dvc {what}` failed ({VARIABLE}={os.environ.get(VARIABLE)}): {reason}")
