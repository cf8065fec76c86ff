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


def pull_options(root: Path) -> list[str]:
    """For `dvc repro`: what makes it look in the remote, which becomes this workspace's default (`.dvc/config.local`).

    Raises:
        PipelineError: DVC does not take it.
    """
    url = os.environ.get(VARIABLE)
    if not url:
        return []
    _dvc(root, "remote", "add", "--quiet", "--local", "--force", "--default", NAME, url)
    return ["--pull"]


def push_shared(root: Path, stage: str) -> None:
    """Sends a stage's outputs, and the run cache with which another workspace finds them.

    Raises:
        PipelineError: not all of it has arrived.
    """
    if os.environ.get(VARIABLE):
        _dvc(root, "push", "--quiet", "--run-cache", stage)


def _dvc(root: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()
        raise PipelineError(f"`dvc {' '.join(arguments[:2])}` failed ({VARIABLE}={os.environ.get(VARIABLE)}): {said[0]}")
