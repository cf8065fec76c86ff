"""`gc --yes` in random histories: whatever git, a workspace or another clone can still reach checks out afterwards."""

import os
import shutil
import subprocess
import tempfile
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from dvc.repo.experiments.refs import ExpRefInfo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.lineage.housekeeping import collect
from pipeline.tracking.leftovers import DAY_S, Limits

LIMITS = Limits(runs=1, age_s=DAY_S, keep_records=True)
STAGES = "stages:\n  train: {cmd: mkdir out && cp seed out/a && cp seed b, deps: [seed], outs: [out, b]}\n"
FAILURES = ({"PATH": "/nowhere"}, {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"})


class History:
    """A repository, a clone that may share its cache, and what either must be able to check out: by place, the seed."""

    def __init__(self, folder: Path) -> None:
        self.root, self.clone = folder / "a", folder / "b"
        self.root.mkdir()
        self.git("init", "-q", "-b", "main")
        with chdir(self.root):
            Repo.init()
        (self.root / "dvc.yaml").write_text(STAGES)
        (self.root / ".gitignore").write_text("/out\n/b\n")
        self.seed = 0
        self.needed: dict[tuple[Path, str], str] = {}  # (workspace, commit) -> seed
        self.train()
        self.commit()

    def git(self, *arguments: str, at: Path | None = None) -> str:
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = subprocess.run(
            ["git", *arguments], cwd=at or self.root, check=True, capture_output=True, text=True, env={**os.environ, **identity}
        )
        return done.stdout.strip()

    def train(self, at: Path | None = None) -> None:
        """Another seed, whose results nothing but the workspace names."""
        self.seed += 1
        self._run(at or self.root, str(self.seed))

    def _run(self, at: Path, seed: str) -> None:
        (at / "seed").write_text(seed)
        with chdir(at), Repo() as repo:
            repo.reproduce()

    def _keep(self, commit: str, at: Path | None = None) -> None:
        self.needed[at or self.root, commit] = self.git("show", f"{commit}:seed", at=at)

    def commit(self, at: Path | None = None) -> None:
        self.git("add", "-A", at=at)
        self.git("commit", "-q", "--allow-empty", "-m", "x", at=at)
        self._keep(self.git("rev-parse", "HEAD", at=at), at)

    def branch(self) -> None:
        """A commit on a branch of its own, deleted again: its reflog is all that knows it."""
        name = f"side{self.seed}"
        self.git("checkout", "-q", "-b", name)
        self.train()
        self.commit()
        self.git("checkout", "-q", "main")
        self._run(self.root, (self.root / "seed").read_text())
        self.git("branch", "-q", "-D", name)

    def stash(self) -> None:
        self.train()
        self.git("stash", "-q")
        self._keep(self.git("rev-parse", "stash@{0}"))
        self._run(self.root, (self.root / "seed").read_text())

    def stage_in_index(self) -> None:
        """What is staged, under a workspace that has gone on."""
        self.train()
        self.git("add", "dvc.lock", "seed")
        tree = self.git("write-tree")
        self.train()
        self.needed[self.root, tree] = self.git("show", f"{tree}:seed")

    def experiment(self) -> None:
        self.train()
        self.git("add", "-A")
        commit = self.git("commit-tree", self.git("write-tree"), "-p", "HEAD", "-m", "x")
        self.git("update-ref", str(ExpRefInfo(self.git("rev-parse", "HEAD"), f"e{self.seed}")), commit)
        self._keep(commit)
        self.git("reset", "-q", "--hard")
        self._run(self.root, (self.root / "seed").read_text())

    def share(self) -> None:
        """A clone that uses this cache, and what it alone commits."""
        if not self.clone.exists():
            self.git("clone", "-q", str(self.root), str(self.clone))
            (self.clone / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {self.root}/.dvc/cache\n")
        self.train(self.clone)
        self.commit(self.clone)

    def lose_a_file(self) -> None:
        """The workspace loses its outputs: the cache alone has them."""
        shutil.rmtree(self.root / "out", ignore_errors=True)

    def collect(self, fails: dict[str, str] | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch, suppress(PipelineError):
            for name, value in (fails or {}).items():
                patch.setenv(name, value)
            list(collect(self.root, LIMITS, remove=True))

    def check(self) -> None:
        """The workspaces first, then everything that git can reach."""
        for at in filter(Path.exists, (self.root, self.clone)):
            self._check(at, (at / "seed").read_text(), "the workspace")
        for (at, commit), seed in self.needed.items():
            self.git("checkout", "-q", "--force", "--detach", "HEAD", at=at)
            self.git("read-tree", "--reset", "-u", commit, at=at)
            self._check(at, seed, commit)

    def _check(self, at: Path, seed: str, what: str) -> None:
        for path in (at / "out", at / "b"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with chdir(at), Repo() as repo:
            repo.checkout(force=True)
        assert ((at / "out" / "a").read_text(), (at / "b").read_text()) == (seed, seed), what


STEPS = ("train", "commit", "branch", "stash", "stage_in_index", "experiment", "share", "lose_a_file", "collect")
step = st.sampled_from([*((name, None) for name in STEPS), *(("collect", failure) for failure in FAILURES)])


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(step, min_size=3, max_size=7))
def test_whatever_is_reachable_checks_out_after_a_gc(steps: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", f"{folder}/site")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        history = History(Path(folder))
        for name, failure in [*steps, ("collect", None)]:
            getattr(history, name)(*([failure] if failure else []))
        history.check()
