"""What git says of the repository."""

import os
import subprocess
from pathlib import Path

from pipeline.errors import PipelineError


def git(root: Path, *arguments: str) -> str:
    """The output of a git command; nothing outside a repository, without git, or where git knows no such thing."""
    try:
        ended = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except FileNotFoundError:
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def output_of(root: Path, *command: str, allow_failure: bool = False) -> str:
    """What a command says in `root`, git's own or another one, without it touching the index on the side.

    Raises:
        PipelineError: it fails, and may not.
    """
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode and not allow_failure:
        said = " ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}"
        raise PipelineError(f"{root}: `{' '.join(command[:4])}` failed, which an experiment needs: {said}")
    return os.fsdecode(done.stdout).strip("\n")  # names of files are in no encoding
