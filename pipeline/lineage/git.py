"""What git says of the repository. A failure is never an empty answer: who takes it for one deletes or denies what is there."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import PipelineError

NO = 1
"""How git ends when its answer is "there is none"; every other code but 0 is a failure."""


def git(root: Path, *arguments: str, read: str = "", allow_no: bool = False, timeout_s: float | None = None) -> str:
    """The output of a git command, empty outside of any repository.

    Args:
        root: where it is given.
        arguments: of the command.
        read: its standard input.
        allow_no: whether it may end with `NO`.
        timeout_s: how long it may take.

    Raises:
        PipelineError: there is a repository, and git is not there or fails: it is another user's, say.
    """
    return _git(root, arguments, read, allow_no, timeout_s).decode(errors="replace")


def bytes_at(root: Path, commit: str, path: str) -> bytes | None:
    """A file in a commit; None where the commit has no such file, or the repository no such commit.

    Raises:
        PipelineError: as `git`.
    """
    about, _, content = _git(root, ("cat-file", "--batch"), f"{commit}:./{path}\n").partition(b"\n")
    return content.removesuffix(b"\n") if about.split(b" ")[1:2] == [b"blob"] else None


def text_at(root: Path, commit: str, path: str) -> str | None:
    """`bytes_at` as text."""
    content = bytes_at(root, commit, path)
    return None if content is None else content.decode(errors="replace")


def output_of(root: Path, *command: str, allow_no: bool = False) -> str:
    """What a command says in `root`, git's own or another one, without it touching the index on the side.

    Args:
        root: where it is given.
        command: the program and its arguments.
        allow_no: whether it may end with `NO`.

    Raises:
        PipelineError: it fails, or is not there.
    """
    done = _run(root, command)
    if done.returncode and not (allow_no and done.returncode == NO):
        raise PipelineError(f"{root}: `{' '.join(command[:4])}` failed, which an experiment needs: {_said(done)}")
    return os.fsdecode(done.stdout).strip("\n")  # names of files are in no encoding


def _git(root: Path, arguments: Sequence[str], read: str, allow_no: bool = False, timeout_s: float | None = None) -> bytes:
    if not _in_repository(root):
        return b""
    ended = _run(root, ("git", *arguments), read.encode(), timeout_s)
    if ended.returncode and not (allow_no and ended.returncode == NO):
        raise PipelineError(f"{root}: `{' '.join(('git', *arguments[:2]))}` failed: {_said(ended)}")
    return ended.stdout


def _in_repository(root: Path) -> bool:
    """Whether there should be an answer, which git alone cannot tell: to it a damaged repository is none."""
    try:
        return "GIT_DIR" in os.environ or any((folder / ".git").exists() for folder in (root, *root.resolve().parents))
    except OSError as error:
        raise PipelineError(f"{error.filename}: {error.strerror}, so whether this is a git repository is unknown") from None


def _run(
    root: Path, command: tuple[str, ...], read: bytes | None = None, timeout_s: float | None = None
) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(
            command, cwd=root, env=environment, input=read or b"", capture_output=True, check=False, timeout=timeout_s
        )
    except OSError as error:
        raise PipelineError(f"{root}: `{command[0]}` cannot be started: {error.strerror}; install it, or mend PATH") from None
    except subprocess.TimeoutExpired:
        raise PipelineError(f"{root}: `{' '.join(command[:3])}` gave no answer within {timeout_s:g} s") from None


def _said(ended: "subprocess.CompletedProcess[bytes]") -> str:
    return " ".join(ended.stderr.decode(errors="replace").split()) or f"exit code {ended.returncode}"
