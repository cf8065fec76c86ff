"""What git says of the repository."""

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """The output of a git command; nothing outside a repository, without git, or where git knows no such thing."""
    try:
        ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        return ""
    return ended.stdout if ended.returncode == 0 else ""
