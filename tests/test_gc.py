"""`python -m pipeline gc`: what it frees, to the byte, and that nothing is lost that a rerun or a resume needs."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

import fed_runs
import pytest
from dvc.repo import Repo

from pipeline.errors import PipelineError
from pipeline.lineage.cache import unused_in_cache
from pipeline.lineage.housekeeping import collect, freed_by, shown
from pipeline.lineage.overrides import write_overrides
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.supervise import hold
from pipeline.tracking.discarded import discarded
from pipeline.tracking.leftovers import DAY_S, Limits, leftovers
from pipeline.tracking.replay import incomplete_runs
from pipeline.tracking.run_folder import RunFolder, read_json, write_json

ROOT = Path(__file__).parents[1]
LIMITS = Limits(runs=1, age_s=DAY_S, keep_records=True)
STAGES = """
stages:
  train:
    cmd: echo ran >> ran.txt && mkdir -p metrics && cp seed weights && (echo of; cat seed) > metrics/train.json
    deps: [seed]
    outs: [weights]
    metrics: [metrics/train.json: {cache: false}]
  eval:
    cmd: mkdir -p reports && cp weights reports/a && echo b > reports/b
    deps: [weights]
    outs: [reports]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    root = tmp_path / "repository"
    root.mkdir()
    run(root, "git", "init", "-q")
    Repo.init(str(root))
    (root / "dvc.yaml").write_text(STAGES)
    (root / ".gitignore").write_text("/.runs/\n/weights\n/reports\n/ran.txt\n")
    return root


def run(root: Path, *command: str) -> str:
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, env={**os.environ, **identity}).stdout


def repro(root: Path) -> list[str]:
    """The stages that ran or came back."""
    with chdir(root), Repo() as repo:
        return [stage.name for stage in repo.reproduce()]


def train(root: Path, seed: str, *, commit: bool) -> None:
    (root / "seed").write_text(seed)
    repro(root)
    if commit:
        run(root, "git", "add", "--all")
        run(root, "git", "commit", "-qm", seed)


def size_of(folder: Path) -> int:
    """Bytes on disk: a file with several links counts once."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def freed(lines: list[str]) -> dict[str, str]:
    """Number and bytes by kind."""
    rows = [re.match(r"(.+?)\s{2,}(\d*)\s+([\d.]+ \w+) ", line) for line in lines[1:]]
    return {row[1].strip(): f"{row[2]} {row[3]}".strip() for row in rows if row}


# DVC's cache


def test_only_what_nothing_names_leaves_the_cache_and_every_commit_still_comes_back(root: Path) -> None:
    train(root, "one\n", commit=True)
    train(root, "two\n", commit=True)
    run(root, "git", "checkout", "-q", "-b", "side")
    train(root, "three\n", commit=True)
    run(root, "git", "checkout", "-q", "-")
    train(root, "tried\n", commit=False)
    train(root, "four\n", commit=False)  # the workspace
    cache = root / ".dvc" / "cache"
    lines = list(collect(root, LIMITS, remove=False))
    tried = [path for path in cache.rglob("*") if path.is_file() and b"tried\n" in path.read_bytes()]
    assert len(tried) == 2 and set(tried) <= set(unused_in_cache(root))  # weights and metrics
    before = size_of(cache)
    assert list(collect(root, LIMITS, remove=True))[:-1] == lines[:-1]
    assert freed(lines)["DVC's cache"].endswith(shown(before - size_of(cache))) and before > size_of(cache)
    assert not any(path.exists() for path in tried) and unused_in_cache(root) == []
    (root / "ran.txt").unlink()
    assert repro(root) == []
    for seed in ("one\n", "two\n", "three\n"):  # from the run cache, whose metrics no commit's outputs name
        (root / "seed").write_text(seed)
        for path in (root / "weights", root / "metrics" / "train.json"):
            path.unlink()
        assert repro(root) == ["train", "eval"]
        assert (root / "metrics" / "train.json").read_text() == f"of\n{seed}" and (root / "reports" / "a").read_text() == seed
    assert not (root / "ran.txt").exists()


def test_a_model_that_shares_its_description_with_a_kept_one_goes(root: Path) -> None:
    """As two trainings of one shape do: the same checkpoints/STAGE.json beside other weights."""
    (root / "dvc.yaml").write_text(
        STAGES.replace("outs: [weights]", "outs: [weights, shape]").replace(
            "&& cp seed weights", "&& cp seed weights && echo 4x4 > shape"
        )
    )
    train(root, "tried\n", commit=False)
    train(root, "kept\n", commit=True)
    list(collect(root, LIMITS, remove=True))
    held = [path.read_bytes() for path in (root / ".dvc" / "cache").rglob("*") if path.is_file()]
    assert b"tried\n" not in held and b"kept\n" in held and b"4x4\n" in held
    (root / "seed").write_text("kept\n")
    (root / "weights").unlink()
    (root / "ran.txt").unlink()
    assert repro(root) == ["train"] and not (root / "ran.txt").exists()


def test_what_another_clone_made_is_no_obstacle(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its commits name folders whose lists of files are not in the cache here."""
    train(root, "one\n", commit=True)
    with (root / "dvc.yaml").open("a") as text:
        text.write("  late: {cmd: cp weights late, deps: [weights], outs: [late]}\n")  # has not run: dvc.lock lacks it
    run(root, "git", "commit", "-qam", "late")
    clone = tmp_path / "clone"
    run(root, "git", "clone", "-q", str(root), str(clone))
    for seed, commit in (("two\n", True), ("tried\n", False), ("two\n", False)):
        train(clone, seed, commit=commit)
    capfd.readouterr()
    assert not freed(list(collect(clone, LIMITS, remove=True)))["DVC's cache"].startswith("0 ")
    assert unused_in_cache(clone) == [] and "WARNING" not in capfd.readouterr().err
    assert not any(b"tried\n" in path.read_bytes() for path in (clone / ".dvc/cache").rglob("*") if path.is_file())
    (clone / "ran.txt").unlink()
    for path in (clone / "weights", clone / "metrics" / "train.json"):
        path.unlink()
    repro(clone)
    assert (clone / "weights").read_text() == "two\n" and not (clone / "ran.txt").exists()


def test_what_an_experiments_copy_has_made_stays_while_the_copy_does(root: Path) -> None:
    train(root, "one\n", commit=True)
    copy = root / ".runs" / "experiments" / "lr" / "workspace"
    copy.parent.mkdir(parents=True)
    run(root, "git", "clone", "-q", str(root), str(copy))
    (copy / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {root}/.dvc/cache\n    type = hardlink\n")
    train(copy, "other\n", commit=False)
    (copy.parent / "lock").touch()
    assert freed(list(collect(root, LIMITS, remove=True)))["DVC's cache"] == "0 0 B"
    (root / "ran.txt").unlink()
    for path in copy.parent.iterdir():
        os.utime(path, (1, 1))
    with hold(copy.parent / "lock", wait=False):
        os.utime(copy.parent / "lock", (1, 1))
        assert freed(list(collect(root, LIMITS, remove=True)))["experiments' copies"] == "0 0 B"
    os.utime(copy.parent / "lock", (1, 1))
    announced = list(collect(root, LIMITS, remove=False))
    before = size_of(root)
    assert list(collect(root, LIMITS, remove=True))[:-1] == announced[:-1]
    assert not copy.exists() and freed(announced)["total"] == shown(before - size_of(root))
    assert not freed(announced)["DVC's cache"].startswith("0 ")
    assert repro(root) == []


def test_what_a_stash_needs_stays(root: Path) -> None:
    train(root, "one\n", commit=True)
    train(root, "stashed\n", commit=False)
    run(root, "git", "stash", "--quiet")
    train(root, "one\n", commit=False)
    list(collect(root, LIMITS, remove=True))
    run(root, "git", "checkout", "--quiet", ".")
    run(root, "git", "stash", "pop", "--quiet")
    (root / "ran.txt").unlink()
    repro(root)
    assert (root / "weights").read_text() == "stashed\n" and not (root / "ran.txt").exists()


def test_a_cache_that_others_may_share_is_left_alone(root: Path, tmp_path: Path) -> None:
    """As that of an experiment's copy, in which somebody may give the command."""
    (root / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {tmp_path}/shared\n")
    train(root, "one\n", commit=True)
    foreign = tmp_path / "shared" / "files" / "md5" / "00" / ("0" * 30)
    foreign.parent.mkdir(parents=True)
    foreign.write_text("of another repository")
    list(collect(root, LIMITS, remove=True))
    assert foreign.exists()


def share(root: Path, clone: Path, how: str) -> None:
    """Makes the cache of `root` the clone's, too."""
    if how == "link":
        (clone / ".dvc" / "cache").symlink_to(root / ".dvc" / "cache")
    else:
        run(clone, "dvc", "cache", "dir", "--local", os.path.relpath(root / ".dvc" / "cache", clone))


@pytest.mark.parametrize("how", ["link", "setting"])
def test_a_cache_that_another_clone_uses_is_left_alone(root: Path, tmp_path: Path, how: str) -> None:
    train(root, "one\n", commit=True)
    train(root, "tried\n", commit=False)
    train(root, "one\n", commit=False)
    clone = tmp_path / "clone with 100% of #it"
    run(root, "git", "clone", "-q", str(root), str(clone))
    share(root, clone, how)
    train(clone, "other\n", commit=True)
    lines = list(collect(root, LIMITS, remove=True))
    assert any(
        line.startswith("DVC's cache") and f"left alone: {root}/.dvc/cache: {clone} uses it, too" in line for line in lines
    )
    shutil.rmtree(clone / "reports")
    with chdir(clone), Repo() as repo:
        repo.checkout()
    assert (clone / "reports" / "a").read_text() == "other\n"
    shutil.rmtree(clone)
    assert not freed(list(collect(root, LIMITS, remove=True)))["DVC's cache"].startswith("0 ")


def test_a_cache_behind_a_link_is_left_alone(root: Path, tmp_path: Path) -> None:
    train(root, "tried\n", commit=False)
    train(root, "one\n", commit=True)
    elsewhere = (root / ".dvc" / "cache").rename(tmp_path / "elsewhere")
    (root / ".dvc" / "cache").symlink_to(elsewhere)
    before = size_of(elsewhere)
    lines = list(collect(root, LIMITS, remove=True))
    assert size_of(elsewhere) == before and any("lies outside of the repository" in line for line in lines)


def test_what_a_copy_of_dvcs_own_experiments_has_made_stays(root: Path) -> None:
    """`dvc exp run --temp`, and the queue, at work: their dvc.lock lies where nobody looks."""
    train(root, "one\n", commit=True)
    copy = root / ".dvc" / "tmp" / "exps" / "standalone" / "tmpabc"
    copy.parent.mkdir(parents=True)
    run(root, "git", "clone", "-q", str(root), str(copy))
    share(root, copy, "setting")
    train(copy, "other\n", commit=False)
    assert freed(list(collect(root, LIMITS, remove=True)))["DVC's cache"] == "0 0 B"
    shutil.rmtree(copy)
    assert not freed(list(collect(root, LIMITS, remove=True)))["DVC's cache"].startswith("0 ")


def test_a_recipe_whose_results_went_runs_again(root: Path) -> None:
    train(root, "tried\n", commit=False)
    train(root, "one\n", commit=True)
    list(collect(root, LIMITS, remove=True))
    runs = root / ".dvc" / "cache" / "runs"
    assert len(list(runs.glob("*/*"))) == 2 and all(any(folder.iterdir()) for folder in runs.glob("*/*"))
    (root / "ran.txt").unlink()
    train(root, "tried\n", commit=False)  # a folder without entries is a TypeError to DVC
    assert (root / "ran.txt").exists()
    for digit in "0123456789abcdef":  # left by a removal of old
        (runs / f"{digit}0" / (digit * 64)).mkdir(parents=True)
    list(collect(root, LIMITS, remove=True))
    assert all(any(folder.iterdir()) for folder in runs.glob("*/*"))


@pytest.mark.parametrize("how", ["no git", "dubious ownership", "damaged"])
def test_where_git_fails_nothing_goes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    train(root, "one\n", commit=True)
    run(root, "git", "checkout", "-q", "-b", "side")
    train(root, "two\n", commit=True)
    run(root, "git", "checkout", "-q", "-")
    before = size_of(root / ".dvc" / "cache")
    if how == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif how == "dubious ownership":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    else:
        (root / ".git" / "HEAD").unlink()
    with pytest.raises(PipelineError):
        list(collect(root, LIMITS, remove=True))
    assert size_of(root / ".dvc" / "cache") == before


def test_a_damaged_list_of_a_folders_files_is_one_line_and_nothing_goes(root: Path) -> None:
    train(root, "one\n", commit=True)
    (listing,) = (root / ".dvc" / "cache" / "files").rglob("*.dir")
    listing.chmod(0o644)
    listing.write_text("[{")
    before = size_of(root / ".dvc" / "cache")
    with pytest.raises(PipelineError, match=f"{listing}: damaged, .*remove it, then"):
        list(collect(root, LIMITS, remove=True))
    assert size_of(root / ".dvc" / "cache") == before


def test_a_copy_that_came_into_use_since_the_listing_keeps_its_objects(root: Path) -> None:
    train(root, "one\n", commit=True)
    copy = root / ".runs" / "experiments" / "lr" / "workspace"
    copy.parent.mkdir(parents=True)
    run(root, "git", "clone", "-q", str(root), str(copy))
    (copy / ".dvc" / "config.local").write_text(f"[cache]\n    dir = {root}/.dvc/cache\n    type = hardlink\n")
    train(copy, "other\n", commit=False)
    (copy.parent / "lock").touch()
    for path in copy.parent.iterdir():
        os.utime(path, (1, 1))
    lines = collect(root, LIMITS, remove=True)
    next(lines)  # all has been listed, the copy among what goes
    with hold(copy.parent / "lock", wait=False):
        list(lines)
        with chdir(copy), Repo() as repo:
            assert repo.status() == {} and not repo.used_objs().keys() - {None}
            assert all(Path(repo.cache.local.oid_to_path(each.value)).exists() for each in repo.used_objs()[None])


def test_a_cache_at_work_is_one_line(root: Path) -> None:
    train(root, "one\n", commit=True)
    with Repo(str(root)).lock, pytest.raises(PipelineError, match="another DVC command is at work"):
        unused_in_cache(root)


# Runs


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow has what feeder.json says; that it is asked is tested below."""
    answer = lambda _, folder, **__: None if read_json(folder.feeder_note).get("complete") else "not there"  # noqa: E731
    monkeypatch.setattr("pipeline.tracking.proof.Stores.fault", answer)


def record(root: Path, stage: str, key: str, number: int, *, code: int | None, age_days: float) -> RunFolder:
    """A run whose files were last touched so long ago."""
    folder = RunFolder(root / ".runs" / stage / key / str(number))
    folder.path.mkdir(parents=True)
    write_json(folder.about, {"attempt": 1, "stage": stage})
    write_json(folder.feeder_note, {"run_id": "r", "tracking_uri": "u", "complete": 1})
    for path in (folder.metrics, folder.samples, folder.feeder_log, folder.state(3), folder.commit(3)):
        path.write_text(path.name * 10)
    folder.lock.write_text(str(os.getpid()))
    folder.rollouts.mkdir()
    folder.rollout(3).write_text("x" * 70)
    if code is not None:
        write_json(folder.exit, {"code": code})
    for path in folder.path.iterdir():
        os.utime(path, (time.time() - age_days * DAY_S,) * 2)
    return folder


def names(folder: RunFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()} if folder.path.exists() else set()


def test_runs_are_bounded_and_records_stay(root: Path, believed: None) -> None:
    train(root, "one\n", commit=True)
    newest, old, unsent = (record(root, "grpo", "a", number, code=0, age_days=age) for number, age in ((3, 1), (2, 2), (1, 3)))
    write_json(unsent.feeder_note, {"run_id": "r", "complete": None})
    os.utime(unsent.feeder_note, (1, 1))
    abandoned = record(root, "grpo", "b", 1, code=None, age_days=9)
    failed = record(root, "grpo", "c", 1, code=143, age_days=0.5)
    last_of_dpo = record(root, "dpo", "d", 1, code=None, age_days=99)
    held = record(root, "grpo", "e", 1, code=None, age_days=99)
    caches = [
        root / ".runs" / name for name in ("eval/cache/a.json", "eval/cache/b.json", "dpo/reference/a.pt", "dpo/output.log")
    ]
    for path in caches:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 100)
        os.utime(path, (1, 1) if path.stem != "b" else None)
    kept = names(failed)
    with hold(held.lock, wait=False):
        os.utime(held.lock, (1, 1))
        announced = list(collect(root, LIMITS, remove=False))
        before = size_of(root / ".runs")
        assert list(collect(root, LIMITS, remove=True))[:-1] == announced[:-1]
        assert freed(announced)["total"] == shown(before - size_of(root / ".runs"))
    assert freed(announced) | {"total": ""} == {
        "saves of finished runs": f"6 {shown(6 * 10 * 18 + 3 * 10 * 2)}",
        "caches of eval and dpo": "2 200 B",
        "output logs": "1 100 B",
        "abandoned runs": freed(announced)["abandoned runs"],
        "experiments' copies": "0 0 B",
        "samples and logs of finished runs": f"2 {shown(10 * len('samples.jsonl') + 10 * len('feeder.log'))}",
        "rollouts of finished runs": "2 140 B",
        "removed before": "0 0 B",
        "DVC's cache": "0 0 B",
        "total": "",
    }
    records = {"run.json", "exit.json", "metrics.jsonl", "feeder.json", "lock"}
    sent = {"samples.jsonl", "feeder.log"}
    assert names(newest) == records | sent | {"rollouts"} and names(unsent) == records | sent and names(old) == records
    assert names(abandoned) == set() and names(failed) == kept and "state-00000003.pt" in names(last_of_dpo) & names(held)
    assert [path.exists() for path in caches] == [False, True, False, False]
    assert not list((root / ".runs" / ".gc").iterdir())
    again = list(collect(root, Limits(1, 0.0, keep_records=False), remove=True))
    assert freed(again)["finished runs"].startswith("1 ") and names(newest) and not names(old)
    assert names(unsent) and any("kept, not proven: .runs/grpo/a/1: not there" in line for line in again)


def test_saves_that_stay_go_when_the_rollouts_do(root: Path) -> None:
    train(root, "one\n", commit=True)
    newest, old = (record(root, "grpo", "a", number, code=0, age_days=20 - number) for number in (2, 1))
    for folder in (newest, old):
        for step in (1, 2):
            folder.state(step).write_text("state")
            write_json(folder.commit(step), {"stays": step == 2})
    list(collect(root, LIMITS, remove=True))
    assert newest.commits() == [2] and newest.state(2).exists() and newest.rollout(3).exists()
    assert old.commits() == [] and not old.rollout(3).exists() and old.metrics.exists()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from test_gc import open_stage
with open_stage(Path(), "grpo", ["seed"]) as stage:
    Path("weights").write_text("w")
"""


def test_a_finished_run_keeps_its_last_save_until_dvc_has_its_results(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while DVC takes them over: `gc` is the advice then."""
    (root / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent), root=str(ROOT)))
    shutil.copy(ROOT / "params.yaml", root)
    write_overrides(root / "params.yaml", {"grpo.lr": 1})
    (root / "seed").write_text("1")
    command = f"exec {sys.executable} train.py"
    (root / "dvc.yaml").write_text(
        f"stages:\n  grpo:\n    cmd: {command}\n    deps: [seed]\n    params: [grpo.lr]\n    outs: [weights]\n"
    )
    monkeypatch.chdir(root)
    with open_stage(root, "grpo", ["seed"]) as stage:  # DVC did not get to it
        stage.save(3, {"x": 1})
    (save,) = root.glob(".runs/grpo/*/1/state-*.pt")
    list(collect(root, LIMITS, remove=True))
    assert save.exists()
    os.utime(save.with_suffix(".json"), (1, 1))
    assert freed(list(collect(root, LIMITS, remove=False)))["saves of finished runs"].startswith("2 ")
    os.utime(save.with_suffix(".json"))
    repro(root)
    list(collect(root, LIMITS, remove=True))
    assert not save.exists()
    # `status` and `whence` say of the weights in the workspace which run made them, however many came after it.
    monkeypatch.setattr("pipeline.tracking.proof.Stores.fault", lambda *_, **__: None)
    of_others = [record(root, "grpo", "z", number, code=0, age_days=-number) for number in (1, 2)]
    list(collect(root, Limits(1, 0.0, keep_records=False), remove=True))
    assert (save.parent / "run.json").exists() and [names(each) != set() for each in of_others] == [False, True]


def test_saves_of_a_run_that_is_taken_up_again_meanwhile_stay(root: Path) -> None:
    train(root, "one\n", commit=True)
    folder = record(root, "grpo", "a", 1, code=0, age_days=9)
    lines = collect(root, LIMITS, remove=True)
    next(lines)  # all has been listed
    with hold(folder.lock, wait=False):
        list(lines)
    assert folder.state(3).exists()
    lines = collect(root, LIMITS, remove=True)
    next(lines)
    folder.exit.unlink()
    list(lines)
    assert folder.state(3).exists()


def test_foreign_things_neither_end_the_command_nor_are_followed(root: Path, tmp_path: Path) -> None:
    train(root, "one\n", commit=True)
    old = record(root, "grpo", "a", 1, code=0, age_days=9)
    record(root, "grpo", "a", 2, code=0, age_days=8)
    old.about.write_text("cut")
    os.utime(old.about, (1, 1))
    newest = record(root, "dpo", "b", 1, code=None, age_days=7)
    elsewhere = RunFolder(record(root, "dpo", "c", 1, code=None, age_days=9).path.rename(tmp_path / "elsewhere"))
    link = newest.path.parents[1] / "c" / "1"
    link.symlink_to(elsewhere.path)
    list(collect(root, LIMITS, remove=True))
    assert elsewhere.state(3).exists() and newest.state(3).exists() and not link.is_symlink()
    assert freed(list(collect(root, LIMITS, remove=True)))["removed before"] == "0 0 B"


def test_what_cannot_be_removed_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(root, "one\n", commit=True)
    folder = record(root, "grpo", "a", 1, code=0, age_days=9)

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)  # root may remove everything
    with pytest.raises(PipelineError, match=f"^{folder.path}/state-.*: Permission denied; gc ended there"):
        list(collect(root, LIMITS, remove=True))


def test_what_an_interrupted_gc_has_moved_away_goes_next_time(root: Path) -> None:
    train(root, "one\n", commit=True)
    (root / ".runs" / ".gc" / "0" / "x").mkdir(parents=True)
    (root / ".runs" / ".gc" / "0" / "x" / "file").write_text("12345")
    assert freed(list(collect(root, LIMITS, remove=True)))["removed before"] == "1 5 B"
    assert not list((root / ".runs" / ".gc").iterdir())


def open_stage(root: Path, stage: str = "grpo", inputs: Sequence[str] = ()) -> Any:
    quiet = {"mlflow": False, "progress": "off", "save_every_s": 1e9}
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet)
    return stage_run(stage, params={stage: {"lr": 1}}, inputs=inputs, runtime=runtime, root=root)


def test_a_killed_run_resumes_after_a_gc(root: Path) -> None:
    train(root, "one\n", commit=True)
    with pytest.raises(SystemExit), open_stage(root) as stage:
        stage.save(3, {"x": 1})
        raise RuntimeError
    for path in stage.folder.path.iterdir():
        os.utime(path, (1, 1))
    list(collect(root, LIMITS, remove=True))
    with open_stage(root) as stage:
        assert stage.resumed_step == 3 and stage.load() == {"x": 1}


def test_a_trainer_that_chose_a_run_just_before_it_goes_begins_a_new_one(root: Path) -> None:
    """It waits for the lock of a folder that gc moves away meanwhile."""
    folder = record(root, "grpo", "a", 1, code=None, age_days=99)
    taken: list[Path] = []

    def trainer() -> None:
        with hold(folder.lock, wait=True):
            taken.extend(folder.path.iterdir())

    waiting = threading.Thread(target=trainer)
    with hold(folder.lock, wait=False):
        waiting.start()
        wait_for(lambda: "FLOCK" in Path("/proc/locks").read_text() and is_waited_for(folder.lock))
        folder.path.rename(folder.path.with_name("moved"))
    waiting.join(20)
    assert taken == [folder.lock]


def is_waited_for(lock: Path) -> bool:
    inode = f":{lock.stat().st_ino} "
    return any(inode in line and "->" in line for line in Path("/proc/locks").read_text().splitlines())


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


# MLflow


@pytest.mark.faults
def test_deleted_mlflow_runs_go_with_their_artifacts_and_others_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.tracking.store import open_store, tracking_uri

    train(root, "one\n", commit=True)
    client, experiment_id = open_store(tracking_uri(root), root)
    kept, deleted = (client.create_run(experiment_id).info.run_id for _ in range(2))
    for run_id in (kept, deleted):
        client.log_dict(run_id, {"a": 1}, "params.json")
    client.delete_run(deleted)
    orphan = root / "mlartifacts" / ("0" * 32) / "artifacts" / "x"
    orphan.parent.mkdir(parents=True)
    orphan.write_text("12345")
    (root / "mlartifacts" / "models").mkdir()
    announced = list(collect(root, LIMITS, remove=False))
    before = size_of(root / "mlartifacts")
    list(collect(root, LIMITS, remove=True))
    assert freed(announced)["artifacts without a run"] == "0 0 B"
    assert freed(announced)["total"] == shown(before - size_of(root / "mlartifacts"))
    assert sorted(path.name for path in (root / "mlartifacts").iterdir()) == sorted([kept, "models", orphan.parents[1].name])
    assert [run.info.run_id for run in client.search_runs([experiment_id], "", 3)] == [kept]  # 3: in any state

    # Another store in a file has its artifacts in the same folder.
    other = f"sqlite:///{root}/other.db"
    client, experiment_id = open_store(other, root)
    there = client.create_run(experiment_id).info.run_id
    client.log_dict(there, {"a": 1}, "params.json")
    folder = record(root, "grpo", "a", 1, code=0, age_days=0)
    write_json(folder.feeder_note, {"run_id": there, "tracking_uri": other, "complete": 1})
    for uri in (tracking_uri(root), other):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        list(collect(root, LIMITS, remove=True))
        assert sorted(path.name for path in (root / "mlartifacts").iterdir()) == sorted(
            [kept, there, "models", orphan.parents[1].name]
        )


def test_a_store_that_cannot_be_read_is_one_line(root: Path) -> None:
    train(root, "one\n", commit=True)
    (root / "mlflow.db").write_text("garbage")
    with pytest.raises(PipelineError, match="mlflow.db: cannot be read: file is not a database; move it away"):
        list(collect(root, LIMITS, remove=True))


def test_the_command_is_for_the_root(root: Path) -> None:
    """From a folder below it, DVC would find the cache and nobody the experiments' copies."""
    (root / "docs").mkdir()
    with pytest.raises(PipelineError, match="docs: no dvc.yaml; give the command at the root of the repository"):
        list(collect(root / "docs", LIMITS, remove=True))


# The figures


def test_a_file_with_several_links_frees_with_the_last(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("123")
    os.link(tmp_path / "a" / "x", tmp_path / "y")
    os.link(tmp_path / "a" / "x", tmp_path / "z")
    links: Counter[tuple[int, int]] = Counter()
    assert freed_by([tmp_path / "a", tmp_path / "y", tmp_path / "gone"], links) == 0
    assert freed_by([tmp_path / "z"], links) == 3
    assert [shown(size) for size in (0, 999, 1000, 12_345_678)] == ["0 B", "999 B", "1.0 kB", "12.3 MB"]


def test_the_command_removes_only_when_told(root: Path) -> None:
    train(root, "one\n", commit=True)
    folder = record(root, "grpo", "a", 1, code=0, age_days=15)
    command = [sys.executable, "-m", "pipeline", "gc"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def gc(*options: str) -> str:
        done = subprocess.run([*command, *options], cwd=root, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    assert "nothing removed yet: `python -m pipeline gc --yes` does it" in gc()
    assert folder.state(3).exists()
    assert gc("--yes").endswith("removed")
    assert not folder.state(3).exists() and read_json(folder.exit)["code"] == 0


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with two finished runs, of which an MLflow store of its own has everything; a new store takes seconds."""
    root = tmp_path_factory.mktemp("fed")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        fed_runs.make_workspace(root)
        folders = [fed_runs.train(root, lr=lr) for lr in (1e-4, 2e-4)]
        fed_runs.feed(*folders)
    return root


def test_samples_go_only_when_the_store_has_them_at_that_moment(fed: Path) -> None:
    """The notes say that it has, whatever became of it."""
    (old,) = leftovers_of(fed)
    samples, store = old.samples.read_bytes(), fed / "mlflow.db"
    (table, *_) = sorted((fed / "mlartifacts" / read_json(old.feeder_note)["run_id"] / "artifacts" / "samples").iterdir())

    def refused(why: str) -> None:
        found = next(each for each in leftovers(fed, LIMITS) if each.what.startswith("samples and logs"))
        assert found.paths == [] and why in found.why

    kept, whole = store.rename(fed / "elsewhere.db"), table.read_bytes()
    refused("mlflow.db: no such file")
    kept.rename(store)
    table.unlink()
    refused("MLflow lacks samples up to step 47")
    table.write_bytes(whole.replace(b"no tool", b"no toll", 1))
    refused(f"MLflow has other samples in samples/{table.name}")
    table.write_bytes(whole)
    old.samples.write_bytes(samples + samples.splitlines(keepends=True)[-1])
    refused("MLflow lacks samples")
    old.samples.write_bytes(samples)
    for each in leftovers(fed, LIMITS):
        if each.what.startswith("samples and logs"):
            each.remove()
    assert not old.samples.exists() and read_json(old.gone)["step"] == 47
    assert incomplete_runs(fed, None) == []
    table.unlink()
    assert incomplete_runs(fed, None) == [old]
    with pytest.raises(PipelineError, match="not complete in .*, which `pipeline gc` has removed here"):
        fed_runs.feed(old)


def leftovers_of(root: Path) -> list[RunFolder]:
    found = next(each for each in leftovers(root, LIMITS) if each.what.startswith("samples and logs"))
    return [RunFolder(path) for path in dict.fromkeys(path.parent for path in found.paths)]


def test_a_clones_runs_in_the_same_store_are_its_own(fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two gives the command, whatever store its environment names."""
    from pipeline.tracking.store import open_store, own_store

    client, experiment_id = open_store(own_store(fed), fed)
    foreign = client.create_run(experiment_id, tags={"run.folder": str(tmp_path / "clone/.runs/grpo/a/1")}).info.run_id
    client.log_dict(foreign, {"a": 1}, "params.json")
    client.delete_run(foreign)
    orphan = fed / "mlartifacts" / ("0" * 32)  # of a run in a store that is not there
    orphan.mkdir()
    for found in discarded(fed, own_store(fed)):
        assert found.paths == [] and "kept" in found.why
        found.remove()
    assert orphan.exists() and (fed / "mlartifacts" / foreign).exists()
    assert discarded(tmp_path, own_store(fed)) == []


def test_a_store_of_another_version_is_one_line_with_the_remedy(
    fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    from pipeline.tracking import ui
    from pipeline.tracking.store import open_store

    newer, older = "a newer MLflow; use that version", "an older MLflow; .*mlflow db upgrade"
    for revision, remedy in (("ffffffffffff", newer), ("451aebb31d03", older)):
        file = tmp_path / f"{revision}.db"
        with closing(sqlite3.connect(fed / "mlflow.db")) as store, closing(sqlite3.connect(file)) as copy:
            store.backup(copy)
            copy.execute("UPDATE alembic_version SET version_num = ?", (revision,))
            copy.commit()
        with pytest.raises(MlflowException, match=f"^made by {remedy}"):
            open_store(f"sqlite:///{file}", tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
        with pytest.raises(SystemExit, match=f"^sqlite:.*: made by {remedy}"):
            ui.main([])
