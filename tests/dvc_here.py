"""DVC in this process: what `dvc init`, `repro`, `checkout` and `status` do, without a process to start for each."""

from contextlib import chdir
from pathlib import Path
from typing import Any

from dvc.repo import Repo


def init(folder: Path, *, no_scm: bool = True) -> None:
    with chdir(folder):
        Repo.init(no_scm=no_scm).close()


def reproduce(folder: Path, *targets: str, **options: Any) -> None:
    """`options` are those of `Repo.reproduce`: `single_item`, `run_cache`."""
    with chdir(folder), Repo() as repo:
        repo.reproduce(list(targets) or None, **options)


def checkout(folder: Path) -> None:
    with chdir(folder), Repo() as repo:
        repo.checkout()


def status(folder: Path) -> dict[str, Any]:
    with chdir(folder), Repo() as repo:  # DVC names stages as they are seen from where it is
        found: dict[str, Any] = repo.status()
    return found
