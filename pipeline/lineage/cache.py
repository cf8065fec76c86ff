"""What DVC's cache holds for nobody: neither for the workspace nor for any commit, tag, branch or experiment.

A cache outside of the repository may be another one's, too (as that of an isolated copy is), so nothing of it is unused.

`dvc gc` takes metrics and plots from under the run cache, because they are no cached outputs: a stage whose inputs come back
would run anew although its weights are there. Here an entry of the run cache whose outputs are all kept is kept, with everything
that it names. One of its outputs is not enough: models of one shape share the file that describes them.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.lineage.git import git

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc_data.hashfile.db import HashFileDB

_DIGEST = re.compile(r"\bmd5: '?([0-9a-f]{32}(?:\.dir)?)")


def unused_in_cache(root: Path, copies: Sequence[Path] = ()) -> list[Path]:
    """Files of the cache that nothing needs.

    Args:
        root: the repository.
        copies: absolute paths of further workspaces that share its cache.

    Raises:
        PipelineError: git fails, or another DVC command is at work.
    """
    with _unused(root, copies) as paths:
        return paths


def remove_unused(root: Path, copies: Sequence[Path] = ()) -> None:
    """Removes what `unused_in_cache` finds now, before another DVC command can come to need it."""
    with _unused(root, copies) as paths:
        for path in paths:
            path.unlink(missing_ok=True)


@contextmanager
def _unused(root: Path, copies: Sequence[Path]) -> Iterator[list[Path]]:
    """The files, under DVC's lock."""
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo

    with ExitStack() as stack:
        try:
            stack.enter_context(chdir(root))  # DVC reads commits rightly from inside the repository alone
            repo, *others = (stack.enter_context(Repo(os.fspath(path))) for path in (Path(), *copies))
            for each in (repo, *others):
                stack.enter_context(each.lock)
            found = list(_find(repo, others))
        except LockError:
            raise PipelineError("DVC's cache: another DVC command is at work; try again when it has ended") from None
        except DvcException as error:
            raise PipelineError(f"DVC's cache: {error}") from None
        yield found


def _find(repo: "Repo", others: Sequence["Repo"]) -> Iterator[Path]:
    """Digests are read as text: DVC would take a quarter of a second for every version of its files."""
    root, store = Path(repo.root_dir), repo.cache.local
    if not Path(repo.cache.local_cache_dir).is_relative_to(root):
        return
    texts = [*_in_folder(root), *_in_git(root), *(text for other in others for text in _in_folder(Path(other.root_dir)))]
    named = _digests(texts, store)
    needed = []
    for entry in sorted(Path(repo.stage_cache.cache_dir).glob("*/*/*")):
        text = entry.read_text(encoding="utf-8")
        outs = set(_DIGEST.findall(text.partition("\nouts:")[2]))
        if outs and outs <= named:
            needed.append(text)
        else:
            yield entry
    named |= _digests(needed, store)
    for _, each in repo.cache.by_scheme():
        yield from (Path(each.oid_to_path(oid)) for oid in each.all() if oid not in named)


def _digests(texts: Iterable[str], store: "HashFileDB") -> set[str]:
    """All digests that DVC's files name, those of the files in folders included as far as the cache knows the folder."""
    found = {digest for text in texts for digest in _DIGEST.findall(text)}
    for digest in [each for each in found if each.endswith(".dir")]:
        with suppress(OSError, ValueError):  # of a folder that this cache lacks (another clone's, say) nothing can be kept
            listing = json.loads(Path(store.oid_to_path(digest)).read_text(encoding="utf-8"))
            found |= {entry["md5"] for entry in listing}
    return found


def _in_folder(root: Path) -> Iterator[str]:
    """DVC's files of a workspace."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".") and name != "node_modules"]
        yield from (Path(folder, name).read_text(encoding="utf-8") for name in names if _is_dvcs(name))


def _in_git(root: Path) -> Iterator[str]:
    """Every version of DVC's files in history, experiments and `git stash`, each once; none outside a git repository.

    Raises:
        PipelineError: git fails.
    """
    if not git(root, "rev-parse", "--git-dir"):
        return
    head = ["HEAD"] if git(root, "rev-parse", "--quiet", "--verify", "HEAD") else []  # a new repository has none
    changed = ["--full-history", "--", ":(glob)**/dvc.lock", ":(glob)**/*.dvc"]
    commits = [*_git(root, "rev-list", "--all", *head, *changed).split(), *_git(root, "stash", "list", "--format=%H").split()]
    blobs = set()
    for commit in commits:
        for line in _git(root, "ls-tree", "-r", "-z", commit).split("\0"):
            about, _, path = line.partition("\t")
            if _is_dvcs(path):
                blobs.add(about.split()[2])
    if blobs:
        yield _git(root, "cat-file", "--batch", read="\n".join(blobs))


def _is_dvcs(path: str) -> bool:
    return Path(path).name == "dvc.lock" or path.endswith(".dvc")


def _git(root: Path, *arguments: str, read: str = "") -> str:
    """What git says; unlike `git`, which takes a failure for an empty answer: here that would cost files."""
    ended = subprocess.run(["git", *arguments], cwd=root, input=read, capture_output=True, encoding="utf-8", errors="replace")
    if ended.returncode:
        raise PipelineError(f"DVC's cache: left alone, because git fails: {' '.join(ended.stderr.split())}")
    return ended.stdout
