"""What DVC's cache holds for nobody: neither for a workspace nor for anything that git can still reach, its reflogs included.

A cache that others use, too, holds for them what cannot be known here, so nothing of it is unused. DVC keeps no list of a
cache's users; but on every machine it keeps a table of the files that it has hashed for each repository, and where these lie says
which repositories there are (`pipeline.lineage.cache_users`).

`dvc gc` takes metrics and plots from under the run cache, because they are no cached outputs: a stage whose inputs come back
would run anew although its weights are there. Here an entry of the run cache whose outputs are all kept is kept, with everything
that it names. One of its outputs is not enough: models of one shape share the file that describes them.
"""

import json
import os
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.lineage.cache_users import why_shared
from pipeline.lineage.git import git

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc_data.hashfile.db import HashFileDB

_DIGEST = re.compile(r"\bmd5: '?([0-9a-f]{32}(?:\.dir)?)")
_MISSING = re.compile(r"^[0-9a-f]{40,64} missing$", re.MULTILINE)
_NOT_DVCS = {".git", ".dvc", ".runs", ".venv", "node_modules"}
DVCS_FILES = (":(top,glob)**/dvc.lock", ":(top,glob)**/*.dvc")
REMOVED = "removed"
"""Folder of the cache for entries of the run cache on their way out."""


def unused_in_cache(root: Path, copies: Sequence[Path] = ()) -> list[Path]:
    """What nothing needs: files of the cache, and folders of its run cache that an interrupted removal has left.

    Args:
        root: the repository.
        copies: absolute paths of further workspaces that share its cache.

    Raises:
        PipelineError: what is needed cannot be read, git fails, or another DVC command is at work.
    """
    with _unused(root, copies) as (paths, _):
        return paths


def remove_unused(root: Path, copies: Sequence[Path] = ()) -> None:
    """Removes what `unused_in_cache` finds now, before another DVC command can come to need it."""
    with _unused(root, copies) as (paths, cache):
        runs = cache / "runs"
        folders = {path for path in paths if path.is_dir()}
        folders |= _emptied(path for path in paths if path.is_relative_to(runs) and path not in folders)
        for folder in folders:
            # DVC cannot bear a recipe without entries: it goes as a whole, whenever this process ends.
            gone = cache / REMOVED / uuid.uuid4().hex
            gone.parent.mkdir(exist_ok=True)
            folder.rename(gone)
            shutil.rmtree(gone)
        for path in paths:
            path.unlink(missing_ok=True)


def why_left_alone(root: Path) -> str | None:
    """What makes the cache somebody else's, too; None for one that nobody else uses but experiments of this workspace."""
    with _opened(root, []) as (repo,):
        return why_shared(repo)


def _emptied(entries: Iterable[Path]) -> set[Path]:
    """The folders of a run cache of which all is among these."""
    going: dict[Path, set[Path]] = defaultdict(set)
    for entry in entries:
        going[entry.parent].add(entry)
    return {folder for folder, paths in going.items() if paths >= set(folder.iterdir())}


@contextmanager
def _opened(root: Path, copies: Sequence[Path]) -> Iterator[list["Repo"]]:
    """The repositories, locked: `root` first."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    with ExitStack() as stack:
        try:
            stack.enter_context(chdir(root))  # DVC reads commits rightly from inside the repository alone
            repos = [stack.enter_context(Repo(os.fspath(path))) for path in (Path(), *copies)]
            for each in repos:
                stack.enter_context(each.lock)
        except LockError:
            raise PipelineError("DVC's cache: another DVC command is at work; try again when it has ended") from None
        except DvcException as error:
            raise PipelineError(f"DVC's cache: {error}") from None
        yield repos


@contextmanager
def _unused(root: Path, copies: Sequence[Path]) -> Iterator[tuple[list[Path], Path]]:
    """What nothing needs, and the cache, under DVC's locks."""
    with _opened(root, copies) as (repo, *others):
        cache = Path(repo.cache.local_cache_dir)
        try:
            found = [] if why_shared(repo) else list(_find(repo, others))
        except OSError as error:
            raise PipelineError(f"DVC's cache: left alone, {error.filename} cannot be read: {error.strerror}") from None
        yield found, cache


def _find(repo: "Repo", others: Sequence["Repo"]) -> Iterator[Path]:
    """Digests are read as text: DVC would take a quarter of a second for every version of its files."""
    root, store, cache = Path(repo.root_dir), repo.cache.local, Path(repo.cache.local_cache_dir)
    texts = [*_in_folder(root), *_in_git(root), *(text for other in others for text in _in_folder(Path(other.root_dir)))]
    named = _digests(texts, store)
    needed = []
    for recipe in sorted(path for folder in _entries(cache / "runs") for path in _entries(folder) if path.is_dir()):
        entries = sorted(_entries(recipe))
        if not entries:
            yield recipe  # DVC ends with a TypeError at it
        for entry in entries:
            text = entry.read_text(encoding="utf-8", errors="replace")
            outs = set(_DIGEST.findall(text.partition("\nouts:")[2]))
            if outs and outs <= named:
                needed.append(text)
            else:
                yield entry
    yield from _entries(cache / REMOVED)
    named |= _digests(needed, store)
    for each in {odb.path: odb for _, odb in repo.cache.by_scheme() if odb is not None and odb.fs.protocol == "local"}.values():
        yield from (Path(each.oid_to_path(oid)) for oid in each.all() if oid not in named)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _digests(texts: Iterable[str], store: "HashFileDB") -> set[str]:
    """All digests that DVC's files name, those of the files in folders included as far as the cache knows the folder.

    Raises:
        PipelineError: a folder's list of files is damaged, so what is in it is not known.
    """
    found = {digest for text in texts for digest in _DIGEST.findall(text)}
    for digest in [each for each in found if each.endswith(".dir")]:
        path = Path(store.oid_to_path(digest))
        try:
            found |= {entry["md5"] for entry in json.loads(path.read_text(encoding="utf-8"))}
        except FileNotFoundError:  # of a folder that this cache lacks (another clone's, say) nothing can be kept
            continue
        except (ValueError, LookupError, TypeError):
            raise PipelineError(
                f"{path}: damaged, and it says which files of a folder are needed; remove it, then `dvc fetch` or "
                "`dvc commit` writes it again where a remote or the workspace has the folder"
            ) from None
    return found


def _in_folder(root: Path) -> Iterator[str]:
    """DVC's files of a workspace."""
    for folder, below, names in os.walk(root, onerror=_refuse):
        below[:] = [name for name in below if name not in _NOT_DVCS]
        for name in names:
            if name == "dvc.lock" or name.endswith(".dvc"):
                yield Path(folder, name).read_text(encoding="utf-8", errors="replace")


def _refuse(error: OSError) -> None:
    raise error


def _in_git(root: Path) -> Iterator[str]:
    """Every version of DVC's files that git can reach, each once: commits, experiments, stashes, what a reflog still has of
    branches that were deleted or rewritten, and what is staged, of all worktrees. Nothing outside a git repository.

    Raises:
        PipelineError: git fails.
    """
    walk = ("rev-list", "--objects", "--full-history", "--all", "--reflog", "--", *DVCS_FILES)
    blobs = {line.partition(" ")[0] for line in git(root, *walk).splitlines()}
    staged = git(root, "ls-files", "--stage", "-z", "--", *DVCS_FILES)
    blobs |= {line.split()[1] for line in staged.split("\0") if line}
    if not blobs:
        return
    text = git(root, "cat-file", "--batch", read="\n".join(sorted(blobs)))
    if lost := _MISSING.search(text):
        raise PipelineError(f"{root}: git lacks the object {lost[0].split()[0]} of its own history; `git fsck` says more")
    yield text
