"""params.yaml as a plan reads it: with values in place of its own, and parsed once."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeGuard

from pipeline.lineage.overrides import write_overrides

if TYPE_CHECKING:
    from dvc.dependency.param import ParamsDependency
    from dvc.output import Output
    from dvc.repo import Repo


@contextmanager
def overridden(repo: "Repo", root: Path, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Lets `repo` read a changed copy in place of params.yaml, in parameters and in the paths that dvc.yaml makes of them."""
    if not overrides:
        yield
        return
    from dvc.fs import LocalFileSystem

    path = os.fspath(root / "params.yaml")
    with TemporaryDirectory() as folder:
        changed = Path(folder) / "params.yaml"
        changed.write_text((root / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
        write_overrides(changed, overrides)

        class Overlay(LocalFileSystem):
            def open(self, name: str, *args: Any, **options: Any) -> Any:
                return super().open(os.fspath(changed) if os.path.abspath(name) == path else name, *args, **options)

        repo.fs = Overlay(url=repo.root_dir)
        yield


def is_params(dep: "Output") -> TypeGuard["ParamsDependency"]:
    """Whether a dependency is the parameters of a stage, not a file."""
    from dvc.dependency.param import ParamsDependency

    return isinstance(dep, ParamsDependency)


class ParamsReader:
    """What `ParamsDependency.read_params` says, which parses the whole file for every stage."""

    def __init__(self, repo: "Repo") -> None:
        self._repo = repo
        self._trees: dict[str, Any] = {}

    def read(self, dep: "ParamsDependency") -> dict[str, Any]:
        """Values by key of the parameters that a stage names; those that the file lacks are left out.

        Raises:
            DvcException: the file is not readable.
        """
        from dvc.dependency.param import read_param_file

        if dep.fs_path not in self._trees:
            self._trees[dep.fs_path] = read_param_file(self._repo.fs, dep.fs_path) if dep.exists else {}
        found = {}
        for key in dep.params:
            with suppress(KeyError, TypeError):
                found[key] = reduce(getitem, key.split("."), self._trees[dep.fs_path])
        return found
