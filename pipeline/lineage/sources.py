"""Sources: what stages read and no stage writes. Those that git ignores go into an experiment's copy, and into its name."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.lineage.git import output_of
from pipeline.lineage.plan import IN_PROCESS, faults_of_dvc
from pipeline.lineage.plan_params import overridden

if TYPE_CHECKING:
    from dvc.repo import Repo

_REFERENCE = re.compile(r"\$\{([\w.]+)")


def source_digests(root: Path) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """A function from overrides to the digest of each source that git does not know, by path; absent ones are left out.

    DVC says which sources there are. It is asked anew only for overrides that decide paths in dvc.yaml, because it takes a while.

    Raises:
        PipelineError: dvc.yaml cannot be read (of the function, too).
    """
    dvc_file = root / "dvc.yaml"
    references = _REFERENCE.findall(dvc_file.read_text(encoding="utf-8")) if dvc_file.exists() else []
    known: dict[str, dict[str, str]] = {}

    def digests_with(overrides: Mapping[str, Any]) -> dict[str, str]:
        deciding = {key: value for key, value in overrides.items() if any(_meet(key, reference) for reference in references)}
        if repr(deciding) not in known:
            known[repr(deciding)] = _digests(root, deciding)
        return known[repr(deciding)]

    return digests_with


def _meet(key: str, reference: str) -> bool:
    """Whether they are the same, or one lies below the other."""
    return f"{key}.".startswith(f"{reference}.") or f"{reference}.".startswith(f"{key}.")


def _digests(root: Path, overrides: Mapping[str, Any]) -> dict[str, str]:
    """DVC's, which remembers those of files that have not changed: sources may have gigabytes."""
    from dvc.repo import Repo
    from dvc_data.hashfile.hash import hash_file

    with faults_of_dvc(root), IN_PROCESS, Repo(os.fspath(root)) as repo, overridden(repo, root, overrides):
        outside = [path for _, path in _sources(repo) if path.startswith("..") and (root / path).is_file()]
        paths = {*_ignored_sources(root, repo), *outside}
        found = {path: hash_file(os.fspath(root / path), repo.fs, "md5", state=repo.state)[1].value for path in sorted(paths)}
    return {path: value for path, value in found.items() if value}


def link_sources(root: Path, copy: Path) -> None:
    """Shares DVC's cache and settings with the copy, and links what stages read and git ignores."""
    from dvc.repo import Repo

    with faults_of_dvc(root), IN_PROCESS, Repo(os.fspath(root)) as original, Repo(os.fspath(copy)) as repo:
        with repo.config.edit("local") as config:
            for section, values in original.config.read("local").items():
                config.setdefault(section, {}).update(values)
            config.setdefault("cache", {})["dir"] = original.cache.local_cache_dir
            config["cache"].setdefault("type", "reflink,hardlink,copy")
            config.setdefault("core", {})["site_cache_dir"] = os.fspath(copy / ".dvc" / "tmp" / "site")
        for path in _ignored_sources(root, repo):
            _link(root / path, copy / path)


def absent_sources(copy: Path) -> list[tuple[str, str]]:
    """Stage and path of every source that is not there."""
    from dvc.repo import Repo

    with faults_of_dvc(copy), IN_PROCESS, Repo(os.fspath(copy)) as repo:
        return [(stage, path) for stage, path in _sources(repo) if not (copy / path).exists()]


def _ignored_sources(root: Path, repo: "Repo") -> list[str]:
    """Files of `root` that git ignores and DVC does not, and that stages of `repo`, which may be a copy of it, read."""
    sources = sorted({each for _, path in _sources(repo) if not path.startswith("..") for each in _with_description(path)})
    command = ("git", "ls-files", "--others", "--ignored", "--exclude-standard", "-z", "--")
    listed = [path for path in output_of(root, *command, *sources).split("\0") if path] if sources else []
    found = [os.path.relpath(file, root) for path in listed for file in _files(root / path)]
    return [path for path in found if not repo.dvcignore.is_ignored(repo.fs, os.path.join(repo.root_dir, path))]


def _with_description(path: str) -> Iterator[str]:
    """A source, and what a stage looks at beside it without being decided by it: the config.json of weights."""
    yield path
    if path.endswith(".safetensors"):
        yield os.path.join(os.path.dirname(path), "config.json")


def _files(path: Path) -> Iterator[Path]:
    """A file, or those of what git lists without looking in: a link to a folder, or another repository."""
    if path.is_dir():
        for entry in path.iterdir():
            if entry.name != ".git":
                yield from _files(entry)
    elif path.exists():
        yield path


def _sources(repo: "Repo") -> Iterator[tuple[str, str]]:
    """Stage and path, relative to the repository, of every file or folder that is read and that no stage writes."""
    outs = {Path(out.fs_path) for out in repo.index.outs}
    for stage in repo.index.stages:
        for dep in stage.deps:
            path = Path(dep.fs_path)
            if not outs.intersection([path, *path.parents]):
                yield stage.name, os.path.relpath(path, repo.root_dir)


def _link(source: Path, target: Path) -> None:
    """Hard links, which cost no space and outlive a renamed original; copies where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
