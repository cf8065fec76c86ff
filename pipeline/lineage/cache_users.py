"""Who else uses a workspace's DVC cache, as far as this machine can tell.

Another clone gets at a cache by `dvc cache dir`, by a link or by its place in a shared folder, and nothing in the cache says so.
But DVC keeps a table of file digests for every repository that it has worked in (`site_cache_dir`), by absolute path: so the
repositories are known, and what their settings say of the cache can be asked of them.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from dvc.repo import Repo


COPIES = (".runs/experiments", ".dvc/tmp/exps")
"""Where a repository has the workspaces of its experiments: ours, and those of `dvc exp run --temp` and of DVC's queue."""


def why_shared(repo: "Repo") -> str | None:
    """What makes a repository's cache somebody else's, too; None for one that only it and its experiments use.

    Raises:
        PipelineError: a table of DVC's cannot be read.
    """
    root, cache = Path(repo.root_dir).resolve(), Path(repo.cache.local_cache_dir)
    if repo.config["cache"].get("shared"):
        return f"{cache}: DVC's setting cache.shared says that others use it"
    for folder in (cache, cache / "runs", cache / "files", cache / "files" / "md5"):
        if not folder.resolve().is_relative_to(root):
            return f"{folder}: lies outside of the repository, and others may use it"
    return next((f"{cache}: {user}" for user in _users(repo, root, cache)), None)


def _users(repo: "Repo", root: Path, cache: Path) -> Iterator[str]:
    """Other workspaces of this machine whose cache is this one, or may be."""
    from dvc.dirs import site_cache_dir

    configured = repo.config["core"].get("site_cache_dir")
    places = {Path(folder) / "repo" for folder in (site_cache_dir(configured), site_cache_dir(None))}
    own, closed = Path(repo.site_cache_dir), _is_closed(cache)
    for table in sorted(path for place in places for path in place.glob("*/hashes/local/cache.db")):
        if table.is_relative_to(own) or (closed and table.stat().st_uid not in (os.getuid(), 0)):
            continue
        folders = _folders(table)
        if folders and all(folder.is_relative_to(cache) for folder in folders):
            yield f"a workspace of which {table.parents[2]} alone tells uses it, too; remove that where there is none"
        try:
            workspaces = {_workspace(folder) for folder in folders} - {root, None}
        except OSError as error:
            yield f"{error.filename} cannot be looked into, and may use it; `chmod go-x {repo.root_dir}` keeps others out"
            continue
        for workspace in filter(None, workspaces):
            if any(workspace.is_relative_to(root / folder) for folder in COPIES):
                continue
            if said := _cannot_be_cleared(workspace, cache):
                yield f"{workspace} {said}"


def _is_closed(cache: Path) -> bool:
    """Whether the file system keeps other users out."""
    return any(not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in (cache, *cache.parents) if folder.exists())


def _folders(table: Path) -> set[Path]:
    """Of the files whose digests a table holds."""
    fault = None
    for mode in ("mode=ro", "mode=ro&immutable=1"):  # the second for another user's, in whose folder SQLite may not write
        try:
            with closing(sqlite3.connect(f"{table.as_uri()}?{mode}", uri=True)) as connection:
                keys = [key for (key,) in connection.execute("SELECT key FROM Cache") if isinstance(key, str)]
                return {Path(folder) for folder in {os.path.dirname(key) for key in keys}}
        except sqlite3.Error as error:
            fault = error
    raise PipelineError(
        f"DVC's cache: left alone, because {table}, which knows who else uses it, cannot be read: {fault}; remove it where that "
        "workspace is no more"
    )


def _workspace(folder: Path) -> Path | None:
    """The DVC repository that a folder is in; None where it is no more."""
    return next((parent.resolve() for parent in (folder, *folder.parents) if (parent / ".dvc").is_dir()), None)


def _cannot_be_cleared(workspace: Path, cache: Path) -> str | None:
    """What speaks against that a workspace has another cache than this one."""
    from dvc.config import Config
    from dvc.exceptions import DvcException

    try:
        folder = Path(Config(os.fspath(workspace / ".dvc"))["cache"].get("dir") or workspace / ".dvc" / "cache")
        return "uses it, too" if folder.exists() and folder.samefile(cache) else None
    except (DvcException, OSError) as error:
        return f"may use it, too: {' '.join(str(error).split())}"
