"""Experiments: changed parameters in an isolated copy of the workspace, kept as a DVC experiment, the workspace left alone.

A copy lies in `.runs/experiments/<name>/workspace`: a git clone with the workspace's uncommitted edits, DVC's cache shared.
Outputs are linked to the cache where the file system can; DVC removes them before a stage runs, so nothing writes through a link.
What a copy trains, measures and caches is kept in the workspace's `.runs` and MLflow store (`pipeline.tracking.home`), so a run
resumes whichever copy asks for it. A copy whose stages failed stays and is gone on with; a finished one is removed.
"""

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.digests import digest
from pipeline.errors import DataError, PipelineError
from pipeline.lineage.git import output_of
from pipeline.lineage.overrides import overrides_check, parse_overrides, shown, slug, write_overrides
from pipeline.lineage.plan import read_plan
from pipeline.lineage.sources import absent_sources, link_sources, source_digests
from pipeline.supervise import hold_unless
from pipeline.tracking import home

RECORDS = ("dvc.lock", "metrics", "plots")
"""What stages write in tracked files: it follows from the rest, so it is no part of an experiment's identity."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Overrides of one state of the workspace.

    Attributes:
        name: what `dvc exp apply` takes: the overrides in short and a digest of what is run.
        root: the workspace.
        stage: what is brought up to date; `all` for every stage.
        overrides: key of params.yaml to value.
        baseline: the commit that the workspace has checked out.
    """

    name: str
    root: Path
    stage: str
    overrides: Mapping[str, Any]
    baseline: str

    @property
    def folder(self) -> Path:
        """Of the copy and, when it has finished, of what its stages said."""
        return self.root / ".runs" / "experiments" / self.name

    @property
    def workspace(self) -> Path:
        """The copy."""
        return self.folder / "workspace"

    @property
    def targets(self) -> tuple[str, ...]:
        """For `read_plan`."""
        return () if self.stage == "all" else (self.stage,)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that run in the copy."""
        return {home.VARIABLE: str(home.home(self.root)), "DVC_EXP_NAME": self.name}

    @property
    def ref(self) -> str:
        """Where git has the result, once it has finished."""
        from dvc.repo.experiments.refs import ExpRefInfo

        return str(ExpRefInfo(self.baseline, self.name))

    def __str__(self) -> str:
        return " ".join(f"{key}={shown(value)}" for key, value in self.overrides.items())

    def save(self) -> None:
        """Makes the copy's state a DVC experiment of the workspace, over one of the same name.

        `dvc exp save` is not used: it commits every stage as if it were up to date, and a file of its own.
        """
        _git(self.workspace, "add", "--all")
        tree = _git(self.workspace, "write-tree")
        if tree == _git(self.root, "rev-parse", "--quiet", "--verify", f"{self.ref}^{{tree}}", allow_no=True):
            return
        author: list[str] = []
        for key, nobody in (("user.name", "minimind"), ("user.email", "minimind@localhost")):
            author += ["-c", f"{key}={_git(self.root, 'config', key, allow_no=True) or nobody}"]
        message = f"experiment {self.name}: {self}"
        commit = _git(self.workspace, *author, "commit-tree", tree, "-p", self.baseline, "-m", message)
        _git(self.workspace, "update-ref", self.ref, commit)
        quiet = ("--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")
        _git(self.root, "fetch", *quiet, str(self.workspace), f"+{self.ref}:{self.ref}")

    def discard(self) -> None:
        """Removes the copy; the output logs of its stages stay, as `<stage>.log`."""
        (self.folder / "ready").unlink(missing_ok=True)
        for log in (self.workspace / ".runs").glob("*/output.log"):
            log.replace(self.folder / f"{log.parent.name}.log")
        shutil.rmtree(self.workspace)


@contextmanager
def open_experiment(root: Path, stage: str, overrides: Sequence[str], stop: threading.Event) -> Iterator[Experiment]:
    """The experiment, with a copy in which its stages can run: the one left by an earlier try, else a new one.

    It is one process's at a time; another one that asks for the same waits.

    Args:
        root: the workspace, a git repository with at least one commit.
        stage: a stage of dvc.yaml, or `all`.
        overrides: texts such as `grpo.lr=1e-4`.
        stop: when set, waiting ends.

    Raises:
        ParamsError: an override or `stage` is wrong.
        DataError: a file that a stage reads is nowhere.
        PipelineError: git refuses, or the wait was stopped.
    """
    (experiment,) = describe_all(root, stage, [overrides])
    with hold_unless(stop, experiment.folder / "lock") as held:
        if not held:
            raise PipelineError(f"{experiment.name}: stopped while another process ran the same experiment")
        if not (experiment.folder / "ready").exists():
            try:
                _make_copy(experiment)
            except BaseException:
                shutil.rmtree(experiment.workspace, ignore_errors=True)
                raise
            (experiment.folder / "ready").touch()
        yield experiment


def describe_all(root: Path, stage: str, choices: Iterable[Sequence[str]]) -> list[Experiment]:
    """The experiments that each choice of overrides makes of the workspace as it is now; hundreds of choices take a second.

    Raises:
        ParamsError: an override is wrong.
        PipelineError: the workspace is no git repository with a commit, or dvc.yaml cannot be read.
    """
    check = overrides_check(root)
    baseline = _git(root, "rev-parse", "HEAD")
    edits = {path: _content(root / path) for path in _edits(root) if Path(path).parts[0] not in RECORDS}
    digests_with = source_digests(root)

    def describe(overrides: Sequence[str]) -> Experiment:
        values = parse_overrides(overrides)
        check(values)
        identity = json.dumps([stage, values, baseline, edits, digests_with(values)], sort_keys=True)
        return Experiment(f"{slug(values)}-{hashlib.sha256(identity.encode()).hexdigest()[:7]}", root, stage, values, baseline)

    return [describe(overrides) for overrides in choices]


def _edits(root: Path) -> list[str]:
    """Tracked files that differ from the commit or are gone, and files that are neither tracked nor ignored."""
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD")
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({path for path in (changed + new).split("\0") if path and not path.endswith("/")})


def _content(path: Path) -> str | None:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return digest(path) if path.exists() else None


def _make_copy(experiment: Experiment) -> None:
    root, copy = experiment.root, experiment.workspace
    shutil.rmtree(copy, ignore_errors=True)  # what is left of a try that was killed
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Objects are borrowed: a clone that links or copies them fails when another process writes some at that moment.
    _git(root, "clone", "--quiet", "--shared", "--no-checkout", str(root), str(copy))
    _git(copy, "checkout", "--quiet", "--detach", experiment.baseline)
    if _git(root, "rev-parse", "--quiet", "--verify", experiment.ref, allow_no=True):
        _git(copy, "fetch", "--quiet", "--no-tags", str(root), experiment.ref)
        _git(copy, "read-tree", "--reset", "-u", "FETCH_HEAD")
    else:
        for path in _edits(root):
            _take_over(root / path, copy / path)
        write_overrides(copy / "params.yaml", experiment.overrides)
    link_sources(root, copy)
    # A process of its own: DVC's checkout is not made for several threads.
    output_of(copy, sys.executable, "-m", "dvc", "checkout", "--quiet", "--force", "--allow-missing")
    needed = {planned.stage for planned in read_plan(copy, experiment.targets)}
    if absent := [(stage, path) for stage, path in absent_sources(copy) if stage in needed]:
        raise DataError(*(_absence(stage, path) for stage, path in absent))


def _absence(stage: str, path: str) -> str:
    if path.startswith(".."):
        return f"{path}: stage {stage} reads it, but it leads elsewhere from an isolated copy; give its absolute path"
    return f"{path}: no such file, and stage {stage} reads it; put it there"


def _take_over(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    with suppress(NotADirectoryError):  # a file has taken the place of its folder
        target.unlink(missing_ok=True)
    if source.is_symlink() or source.is_file():  # a folder in place of a file: what is in it comes by itself
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _git(root: Path, *arguments: str, allow_no: bool = False) -> str:
    return output_of(root, "git", *arguments, allow_no=allow_no)
