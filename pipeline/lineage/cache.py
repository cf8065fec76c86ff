"""What DVC's cache holds for nobody: neither for the workspace nor for any commit, tag, branch or experiment.

A cache outside of the repository may be another one's, too (as that of an isolated copy is), so nothing of it is unused.

`dvc gc` takes metrics and plots from under the run cache, because they are no cached outputs: a stage whose inputs come back
would run anew although its weights are there. Here an entry of the run cache that shares an output with what is kept is kept,
with everything that it names.
"""

import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.lineage.git import git
from pipeline.yaml_files import read_yaml

if TYPE_CHECKING:
    from dvc.repo import Repo


def unused_in_cache(root: Path, copies: Sequence[Path] = ()) -> list[Path]:
    """Files of the cache that nothing needs.

    Args:
        root: the repository.
        copies: absolute paths of further workspaces that share its cache.

    Raises:
        PipelineError: a commit cannot be read, or another DVC command is at work.
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
    from dvc.exceptions import DvcException, RevCollectionError
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
        except RevCollectionError as error:
            raise PipelineError(f"DVC's cache: left alone, because a commit cannot be read: {error}") from None
        except DvcException as error:
            raise PipelineError(f"DVC's cache: {error}") from None
        yield found


def _find(repo: "Repo", others: Sequence["Repo"]) -> Iterator[Path]:
    from dvc.scm import NoSCM

    if not Path(repo.cache.local_cache_dir).is_relative_to(repo.root_dir):
        return
    history = not isinstance(repo.scm, NoSCM)
    commits = _commits(Path(repo.root_dir)) if history else []
    logging.getLogger("dvc.output").setLevel(logging.ERROR)  # else a warning for each stage that dvc.lock of a commit lacks
    # `force`: of a folder that a commit names and this cache lacks (made in another clone, say) nothing can be kept.
    kept = [repo.used_objs(all_experiments=history, revs=commits, force=True)]
    kept += [other.used_objs(force=True) for other in others]
    values = {info.value for used in kept for infos in used.values() for info in infos}
    needed = []
    for entry in sorted(Path(repo.stage_cache.cache_dir).glob("*/*/*")):
        if values.isdisjoint(out.get("md5") for out in read_yaml(entry)["outs"]):
            yield entry
        else:
            needed.append((entry.parent.name, entry.name))
    for infos in repo.stage_cache.get_used_objs(needed).values():
        values |= {info.value for info in infos}
    for _, store in repo.cache.by_scheme():
        yield from (Path(store.oid_to_path(oid)) for oid in store.all() if oid not in values)


def _commits(root: Path) -> list[str]:
    """Commits that between them hold every state of DVC's files in history and in `git stash`, which DVC leaves out.

    Reading one takes DVC a quarter of a second, and most commits of a history change no such file.
    """
    files = ["dvc.lock", "dvc.yaml", "params.yaml", "*.dvc"]
    head = ["HEAD"] if git(root, "rev-parse", "--quiet", "--verify", "HEAD") else []  # a new repository has none
    history = ["git", "rev-list", "--all", *head, "--full-history", "--", *files]
    stashes = ["git", "stash", "list", "--format=%H"]
    outputs = [subprocess.run(each, cwd=root, capture_output=True, text=True, check=True).stdout for each in (history, stashes)]
    return [commit for output in outputs for commit in output.split()]
