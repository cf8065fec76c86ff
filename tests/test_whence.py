"""Where a file came from, in a small lineage of real DVC stages under git."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.__main__ import app
from pipeline.digests import digest
from pipeline.errors import DataError
from pipeline.lineage.whence import Origin, Source, as_json, as_text, trace, whence

STAGES = """
stages:
  code:
    cmd: mkdir -p data/code; echo '{}' > data/code/left.json
    deps: [corpus.txt]
    outs: [data/code/left.json]
  tokens:
    cmd: mkdir tokens; cp corpus.txt tokens/a.txt; tr a-z A-Z < corpus.txt > tokens/B.txt
    deps: [corpus.txt]
    outs: [tokens]
  base:
    cmd: (echo base; cat corpus.txt) > base.bin
    deps: [corpus.txt]
    outs: [base.bin]
  left:
    cmd: (cat base.bin; grep lr params.yaml) > left.bin
    deps: [base.bin, data/code/left.json]
    params: [left]
    outs: [left.bin]
  eval:
    cmd: mkdir -p metrics; echo '{"left":{"score":0.5,"score_low":0.4,"score_high":0.6,"score_n":9.0}}' > metrics/eval.json
    deps: [left.bin]
    metrics:
      - metrics/eval.json: {cache: false}
"""


def run(root: Path, *command: str) -> None:
    author = {f"GIT_{who}_{what}": "nobody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(command, cwd=root, check=True, capture_output=True, env=os.environ | author)


def repro(root: Path, lr: str) -> None:
    (root / "params.yaml").write_text(f"left:\n  lr: {lr}\n  seed: 1\n")
    run(root, sys.executable, "-m", "dvc", "repro", "-q")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed versions, lr 1 and lr 2, and an uncommitted third in the workspace; each left.bin kept aside."""
    root = tmp_path_factory.mktemp("project")
    run(root, "git", "init", "-q")
    run(root, sys.executable, "-m", "dvc", "init", "-q")
    (root / "dvc.yaml").write_text(STAGES)
    (root / "corpus.txt").write_text("corpus\n")
    (root / ".gitignore").write_text("/*.bin\n/kept*\n/.runs\n/tokens\n/data\n")
    for number in (1, 2, 3):
        repro(root, f"{number}e-4")
        shutil.copy(root / "left.bin", root / f"kept{number}.pth")
        if number < 3:
            run(root, "git", "add", ".")
            run(root, "git", "commit", "-qm", f"version {number}")
    return root


def origin(project: Path, file: str) -> Origin:
    return whence(project / file, project, project / ".runs")


def test_a_renamed_file_is_traced_to_the_corpus(project: Path) -> None:
    found = origin(project, "kept1.pth")
    assert (found.path, found.in_workspace) == ("left.bin", False)
    assert [step.stage for step in found.steps] == ["base", "left"]
    assert found.steps[-1].params == {"left.lr": 1e-4, "left.seed": 1}
    assert found.steps[-1].deps == {"base.bin": digest(project / "base.bin")}
    assert found.sources == {"corpus.txt": digest(project / "corpus.txt")}
    first = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"], cwd=project, capture_output=True, text=True, check=True
    )
    assert [each["commit"] for each in found.commits] == [first.stdout.strip()]
    assert found.evaluation == {"score": 0.5, "score_low": 0.4, "score_high": 0.6, "score_n": 9.0}


def test_the_workspace_counts_before_it_is_committed(project: Path) -> None:
    found = origin(project, "kept3.pth")
    assert found.in_workspace and found.commits == [] and found.steps[-1].params["left.lr"] == 3e-4


def test_an_evaluation_of_other_weights_does_not_count(project: Path, tmp_path: Path) -> None:
    """As after `dvc repro left`: eval has not run again, and metrics/eval.json is of the weights before."""
    shutil.copytree(project / "metrics", tmp_path / "metrics")
    shutil.copy(project / "left.bin", tmp_path / "made.pth")
    lock = (project / "dvc.lock").read_text()
    head, eval_entry = lock.split("  eval:\n")
    for text, expected in ((lock, True), (f"{head}  eval:\n{eval_entry.replace(digest(project / 'left.bin'), 'f' * 32)}", False)):
        (tmp_path / "dvc.lock").write_text(text)
        assert bool(origin(tmp_path, "made.pth").evaluation) == expected


def test_what_no_lock_names_is_foreign(project: Path) -> None:
    changed = project / "kept1.pth.changed"
    changed.write_bytes((project / "kept1.pth").read_bytes() + b"!")
    with pytest.raises(DataError, match="no version of dvc.lock"):
        origin(project, changed.name)
    with pytest.raises(DataError, match="no such file"):
        origin(project, "absent.pth")


def test_a_source_is_told_with_those_that_read_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(project / "corpus.txt", project / "kept.txt")
    found = trace(project / "kept.txt", project, project / ".runs")
    assert isinstance(found, Source) and (found.path, found.in_workspace) == ("corpus.txt", True)
    assert found.digest == digest(project / "corpus.txt") and len(found.commits) == 1
    assert sorted(found.readers) == ["base", "code", "tokens"] and found.behind == ["left", "eval"]
    with pytest.raises(DataError, match=r"a source, which stages read \(.*base.*\) and none wrote"):
        origin(project, "corpus.txt")
    monkeypatch.chdir(project)
    lines = CliRunner().invoke(app, ["whence", "kept.txt"]).stdout.splitlines()
    assert lines[0] == f"kept.txt is corpus.txt, a source, which no stage wrote (md5 {found.digest})"
    assert lines[1].startswith("dvc.lock    the workspace, commit ") and lines[-1] == "leads to    left, eval"
    told = json.loads(CliRunner().invoke(app, ["whence", "kept.txt", "--json"]).stdout)
    assert told["kind"] == "source" and told["readers"] == found.readers and told["behind"] == ["left", "eval"]


def test_a_file_of_a_folder_that_a_stage_wrote_is_found(project: Path) -> None:
    shutil.copy(project / "tokens/B.txt", project / "kept.B")
    found = origin(project, "kept.B")
    assert (found.path, found.digest, found.steps[-1].stage) == ("tokens/B.txt", digest(project / "kept.B"), "tokens")
    assert found.steps[-1].outs == {"tokens": digest(project / "tokens")} and found.in_workspace
    assert origin(project, "tokens").path == "tokens"
    copied = trace(project / "tokens/a.txt", project, project / ".runs")
    assert isinstance(copied, Source) and copied.path == "corpus.txt"  # where its bytes come from


def test_hashes_of_code_are_outputs_too(project: Path) -> None:
    found = origin(project, "data/code/left.json")
    assert [step.stage for step in found.steps] == ["code"] and found.sources == {"corpus.txt": digest(project / "corpus.txt")}
    assert [step.stage for step in origin(project, "left.bin").steps] == ["base", "left"]  # which the commit says better


def test_an_edited_file_is_told_from_a_foreign_one(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "dvc.lock", tmp_path / "dvc.lock")
    for name, said in (("corpus.txt", "read"), ("left.bin", "wrote")):
        (tmp_path / name).write_text("edited")
        recorded = digest(project / name)
        with pytest.raises(DataError, match=f"changed since stage .* {said} it, which dvc.lock has with md5 {recorded}"):
            origin(tmp_path, name)


def test_what_a_merge_made_or_left_aside_and_what_lies_in_a_stash_is_found(tmp_path: Path) -> None:
    """`ours` is what a merge took, `theirs` what it did not, with its branch gone; `merged` is made while one is resolved."""
    root = tmp_path / "project"
    run(tmp_path, "git", "init", "-q", "-b", "main", str(root))
    (root / "dvc.lock").write_text("")
    run(root, "git", "add", "dvc.lock")

    def made(what: str, *then: str) -> None:
        (root / "made.bin").write_text(what)
        shutil.copy(root / "made.bin", root / f"{what}.kept")
        md5 = digest(root / "made.bin")
        entry = {"cmd": what, "outs": [{"path": "made.bin", "md5": md5}]}
        (root / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"left": entry}}))
        run(root, "git", *(then or ("commit", "-qam", what)))

    def subjects(what: str) -> set[str]:
        shown = ["git", "show", "--no-patch", "--format=%s", *(each["commit"] for each in origin(root, f"{what}.kept").commits)]
        return set(subprocess.run(shown, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines())

    made("first")
    run(root, "git", "checkout", "-qb", "side")
    made("theirs")
    run(root, "git", "checkout", "-q", "main")
    made("ours")
    run(root, "git", "merge", "-q", "-s", "ours", "-m", "merge", "side")
    run(root, "git", "branch", "-qD", "side")
    run(root, "git", "checkout", "-qb", "other")
    made("another")
    run(root, "git", "checkout", "-q", "main")
    made("more")
    run(root, "git", "merge", "-q", "--no-commit", "-s", "ours", "other")
    made("merged")
    for name in ("older", "stashed"):
        made(name, "stash", "push", "-q", "-m", name)
    made("amended")
    made("last", "commit", "-qa", "--amend", "-m", "last")
    for what in ("first", "theirs", "ours", "another", "more", "merged", "amended", "last"):
        assert subjects(what) == {what}
    assert subjects("older") == {"On main: older"}
    assert subjects("stashed") == {"On main: stashed"}


def test_outside_git_the_workspace_is_all(project: Path, tmp_path: Path) -> None:
    for name in ("dvc.lock", "kept1.pth", "kept3.pth"):
        shutil.copy(project / name, tmp_path / name)
    assert origin(tmp_path, "kept3.pth").in_workspace
    with pytest.raises(DataError):
        origin(tmp_path, "kept1.pth")


def write_run(project: Path, number: int, *, lr: float, code: int, made: str, base: str, hashed: str) -> None:
    folder = project / ".runs" / "left" / f"key{lr}" / str(number)
    folder.mkdir(parents=True)
    about = {
        "name": f"left {number}",
        "started_s": 100.0 * number,
        "tracking_uri": "sqlite:///x.db",
        "params": {"left": {"lr": lr, "seed": 1}},
        "tags": {"dvc.base.bin": base, "dvc.data/code/left.json": hashed},
    }
    (folder / "run.json").write_text(json.dumps(about))
    end = {"code": code, "reason": "", "time_s": 100.0 * number + 7, "outputs": {"left.bin": made}}
    (folder / "exit.json").write_text(json.dumps(end))
    (folder / "feeder.json").write_text(json.dumps({"run_id": f"id{number}"}))


def test_the_run_is_the_newest_finished_one_that_made_the_bytes(project: Path) -> None:
    base, made, hashed = (digest(project / name) for name in ("base.bin", "kept1.pth", "data/code/left.json"))
    known = {"lr": 1e-4, "code": 0, "made": made, "base": base, "hashed": hashed}
    write_run(project, 1, **known)
    write_run(project, 2, **known)
    write_run(project, 3, **known | {"code": 143})
    write_run(project, 4, **known | {"lr": 2e-4})
    write_run(project, 5, **known | {"base": "another"})
    write_run(project, 6, **known | {"made": "f" * 32})  # a forced rerun of the same recipe, on a GPU say
    write_run(project, 7, **known | {"hashed": "f" * 32})  # other code that made the same
    found = origin(project, "kept1.pth").steps[-1].run
    assert found is not None and (found.name, found.mlflow, found.seconds) == ("left 2", "id2", 7.0)
    assert found.folder == ".runs/left/key0.0001/2"
    assert origin(project, "kept3.pth").steps[-1].run is None


TWINS = """
stages:
  one: {cmd: echo same > one.json; echo 1 > one.pth, outs: [one.json, one.pth]}
  two: {cmd: echo same > two.json; echo 2 > two.pth, outs: [two.json, two.pth]}
"""


def test_equal_bytes_are_told_apart_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sidecars of two stages may be equal; elsewhere nothing tells whose a copy is."""
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, sys.executable, "-m", "dvc", "init", "-q")
    (tmp_path / "dvc.yaml").write_text(TWINS)
    run(tmp_path, sys.executable, "-m", "dvc", "repro", "-q")
    for name in ("one", "two"):
        found = origin(tmp_path, f"{name}.json")
        assert (found.path, found.steps[-1].stage) == (f"{name}.json", name) and len(found.also) == 1
        assert origin(tmp_path, f"{name}.pth").also == {}
    shutil.copy(tmp_path / "two.json", tmp_path / "kept.json")
    monkeypatch.chdir(tmp_path)
    lines = CliRunner().invoke(app, ["whence", "kept.json"]).stdout.splitlines()
    assert lines[0].startswith("kept.json is one.json, ") and "also        two.json, of stage two: the same bytes" in lines


def test_the_command_prints_text_and_strict_json(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    text = CliRunner().invoke(app, ["whence", "kept2.pth"]).stdout
    assert text.splitlines()[0].startswith("kept2.pth is left.bin, written by stage left (md5 ")
    assert "params      left.lr 0.0002" in text and "evaluated   score 0.500 [0.400, 0.600]" in text
    printed = CliRunner().invoke(app, ["whence", "--json", "kept2.pth"]).stdout
    assert json.loads(printed) == json.loads(as_json(origin(project, "kept2.pth"))) | {"file": "kept2.pth"}
    assert list(as_text(origin(project, "kept2.pth")))[-1].startswith("source      corpus.txt ")
