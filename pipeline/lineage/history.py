"""Where bytes came from: every version of dvc.lock that the repository knows, the workspace's first.

A lock file says for every stage which digests it read and which it wrote. So a file's digest is enough to find the stage that
wrote it, and from there, through what that stage read, everything before it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import DataError
from pipeline.lineage.git import git, text_at

LOCK = "dvc.lock"
CODE = "data/code/"
"""Hashes of code, which the commit says better."""
PLACEHOLDER = "external/None"
"""What a stage reads where params.yaml names no external file."""


@dataclass(frozen=True, slots=True)
class Made:
    """One execution of a stage, as a lock file records it.

    Attributes:
        stage: its name, such as `encode@dpo`.
        params: its parameters by full key.
        deps: digest by path of the data that it read.
        outs: digest by path of what it wrote.
        sizes: bytes by path of what it read.
        code: the hash of its code; None where it does not depend on one.
        code_file: the path of the file that was hashed for it.
    """

    stage: str
    params: dict[str, Any]
    deps: dict[str, str]
    outs: dict[str, str]
    sizes: dict[str, int]
    code: str | None = None
    code_file: str | None = None

    @property
    def inputs(self) -> dict[str, str]:
        """Digest by path of what it read, the hash of its code included, as its run has noted it."""
        return self.deps | ({self.code_file: self.code} if self.code_file and self.code else {})


@dataclass(frozen=True)
class Lock:
    """One version of dvc.lock.

    Attributes:
        commit: the commit that brought it, or None for the workspace's.
        time: that commit's time (ISO 8601), or None.
        stages: what it records, by stage.
    """

    commit: str | None
    time: str | None
    stages: dict[str, Made]

    @cached_property
    def _makers(self) -> dict[tuple[str, str], Made]:
        return {out: made for made in self.stages.values() for out in made.outs.items()}

    def writers(self, digest: str) -> dict[str, Made]:
        """By path the stages that wrote this digest: several where they wrote equal bytes, none where they only read it."""
        return {path: made for (path, known), made in self._makers.items() if known == digest}

    def readers(self, digest: str) -> list[Made]:
        """The stages that read this digest."""
        return [made for made in self.stages.values() if digest in made.deps.values()]

    def behind(self, stages: Iterable[Made]) -> list[Made]:
        """Every stage that reads what `stages` wrote, or what a stage behind them wrote."""
        found: dict[str, Made] = {}
        waiting = list(stages)
        while waiting:
            outs = waiting.pop().outs.items()
            new = [made for made in self.stages.values() if made.stage not in found and outs & made.deps.items()]
            found |= {made.stage: made for made in new}
            waiting += new
        return [made for made in self.stages.values() if made.stage in found]

    def ancestry(self, made: Made) -> list[Made]:
        """`made` and every stage before it, parents first; versions of an input that this lock does not have are left out."""
        ordered: dict[str, Made] = {}
        for dep in made.deps.items():
            if dep in self._makers:
                ordered |= {each.stage: each for each in self.ancestry(self._makers[dep])}
        return list((ordered | {made.stage: made}).values())

    def sources(self, made: Made) -> dict[str, str]:
        """Digest by path of what `made` and the stages before it read and none of them wrote: where everything came from."""
        read = {dep for each in self.ancestry(made) for dep in each.deps.items()}
        return dict(sorted(read - self._makers.keys()))


def locks_with(root: Path, digest: str, *, read: bool = False) -> Iterator[Lock]:
    """The versions of dvc.lock in which a stage wrote a digest: the workspace's, then the commits that brought it, newest first.

    Branches, tags and DVC's experiments count, stashes, and what a reflog still has. Outside git there is the workspace's alone.
    Commits in which the file is damaged are left out.

    Args:
        root: the repository.
        digest: as in dvc.lock; a folder's ends in `.dir`.
        read: those in which a stage read it instead.
    """
    if digest in (file_at(root, None, LOCK) or ""):
        yield from _if_named(Lock(None, None, _stages(file_at(root, None, LOCK) or "", str(root / LOCK))), digest, read)
    # -S: the commits in which the number of occurrences changes, so those that bring a digest and those that drop it. Without
    # --full-history a merge hides the side that it did not take. With -m a merge has a line per parent from which it differs;
    # in one that differs from all of them, as a stash does, the digest is new.
    search = ("log", "--all", "--reflog", "--full-history", "-m", "--no-patch", "--format=%H %cI %P", f"-S{digest}", "--", LOCK)
    for line, times in Counter(git(root, *search).splitlines()).items():
        commit, time, *parents = line.split()
        text = (text_at(root, commit, LOCK) or "") if times >= len(parents) else ""
        if digest in text:
            with suppress(DataError):  # somebody committed a conflict: other commits may know, too
                yield from _if_named(Lock(commit, time, _stages(text, commit)), digest, read)


def _if_named(lock: Lock, digest: str, read: bool) -> Iterator[Lock]:
    if any(digest in (made.deps if read else made.outs).values() for made in lock.stages.values()):
        yield lock


def lock_at(root: Path, commit: str | None) -> Lock | None:
    """The lock file of a commit (None: the workspace's); None where there is none.

    Raises:
        DataError: it is not as DVC writes it.
    """
    text = file_at(root, commit, LOCK)
    if text is None:
        return None
    time = git(root, "show", "--no-patch", "--format=%cI", commit).strip() if commit else None
    return Lock(commit, time, _stages(text, f"{commit}:{LOCK}" if commit else str(root / LOCK)))


def commits_with_lock(root: Path) -> list[str]:
    """The commits of branches and tags that changed dvc.lock, newest first; experiments are not among them."""
    return git(root, "log", "--branches", "--tags", "--full-history", "--format=%H", "--", LOCK).split()


def experiment_commit(root: Path, name: str) -> str | None:
    """The commit that holds the DVC experiment of this name, the newest where several baselines have one; None without any."""
    for line in git(root, "for-each-ref", "--sort=-committerdate", "--format=%(objectname) %(refname)", "refs/exps").splitlines():
        commit, _, ref = line.partition(" ")
        if ref.split("/")[4:] == [name]:  # refs/exps/<2 digits>/<38 digits>/<name>
            return commit
    return None


def entry_in(lock: str, stage: str) -> str:
    """The lines of a lock file's text that are about one stage; reading all of it as YAML takes a tenth of a second."""
    found = re.search(rf"^  {re.escape(stage)}:\n(?:    .*\n)+", lock, flags=re.MULTILINE)
    return found[0] if found else ""


def file_at(root: Path, commit: str | None, path: str) -> str | None:
    """A tracked file's text in a commit (None: in the workspace); None where there is no such file."""
    if commit is None:
        return (root / path).read_text(encoding="utf-8", errors="replace") if (root / path).is_file() else None
    return text_at(root, commit, path)


def _stages(lock: str, source: str) -> dict[str, Made]:
    try:
        tree = YAML(typ="safe", pure=True).load(lock)
        return {name: _made(name, entry) for name, entry in (tree or {}).get("stages", {}).items()}
    except (YAMLError, ValueError, LookupError, OverflowError, RecursionError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"{source}: not as DVC writes it ({said}); `git checkout dvc.lock` brings the committed one back"
        ) from None


def _made(name: str, entry: dict[str, Any]) -> Made:
    params = {key: value for keys in entry.get("params", {}).values() for key, value in keys.items()}
    deps, outs = ({each["path"]: each["md5"] for each in entry.get(kind, [])} for kind in ("deps", "outs"))
    data = {path: md5 for path, md5 in deps.items() if not path.startswith(CODE) and path != PLACEHOLDER}
    sizes = {each["path"]: each["size"] for each in entry.get("deps", []) if "size" in each}
    code_file, code = next(((path, md5) for path, md5 in deps.items() if path.startswith(CODE)), (None, None))
    return Made(name, dict(flat_params(params)), data, outs, sizes, code, code_file)


def flat_params(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full key and value, such as `("grpo.lr", 0.0001)`, of nested parameters."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flat_params(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
