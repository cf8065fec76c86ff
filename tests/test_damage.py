"""Files that DVC has recorded and that are gone or rotten, here or in its cache: the commands that are printed are run."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipeline.commands.models import open_model, open_tokenizer
from pipeline.errors import DataError
from pipeline.lineage.damage import remedies
from pipeline.lineage.declaration import read_lock
from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
DVC = """
stages:
  model:
    cmd: echo weights > model.pth
    outs: [model.pth]
  data:
    cmd: mkdir data && echo one > data/1 && echo two > 'data/2 b'
    outs: [data]
"""
MODEL, PART = hashlib.md5(b"weights\n").hexdigest(), hashlib.md5(b"two\n").hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    (root / "dvc.yaml").write_text(DVC)
    dvc(root, "init --no-scm --quiet")
    dvc(root, "repro --quiet")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", f"{made}/.", tmp_path], check=True)
    return tmp_path


def dvc(root: Path, arguments: str) -> None:
    shell(root, f"dvc {arguments}")


def shell(root: Path, line: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(line, shell=True, cwd=root, env=os.environ | {"PATH": path}, check=True, capture_output=True)


def whole(root: Path) -> bool:
    contents = {(root / "model.pth").read_bytes(), (root / "data/1").read_bytes(), (root / "data/2 b").read_bytes()}
    return contents == {b"weights\n", b"one\n", b"two\n"} and list(remedies(root, ["model.pth", "data"])) == []


def cached(root: Path, md5: str) -> Path:
    return root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def rot(path: Path) -> None:
    """As a disk does it: neither mode nor times change."""
    mode, times = path.stat().st_mode, path.stat()
    path.chmod(0o644)
    path.write_bytes(b"x" * times.st_size)
    path.chmod(mode)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_what_is_as_recorded_or_of_nobody_needs_nothing(root: Path) -> None:
    (root / "own").touch()
    assert whole(root) and list(remedies(root, ["own", "nowhere"])) == []


@pytest.mark.parametrize("damage", [rot, Path.unlink])
def test_what_the_cache_has_comes_from_there(root: Path, damage: Callable[[Path], None]) -> None:
    damage(root / "model.pth")
    damage(root / "data/2 b")
    for path, stage in (("model.pth", "model"), ("data", "data")):
        (line,) = remedies(root, [path])
        command = f"rm -rf {path} && dvc checkout {stage}"
        assert line == f"{path}: not the bytes that dvc.lock has of stage {stage}; `{command}` brings them back"
        shell(root, command)
    assert whole(root)


@pytest.mark.parametrize("damage", [rot, Path.unlink])
@pytest.mark.parametrize(("path", "stage", "md5"), [("model.pth", "model", MODEL), ("data", "data", PART), ("data", "data", "")])
def test_what_the_cache_has_lost_is_made_anew(
    root: Path, damage: Callable[[Path], None], path: str, stage: str, md5: str
) -> None:
    """A part of a folder, or its list."""
    damage(cached(root, md5 or read_lock(root / "dvc.lock")["data"].outs["data"]))
    damage(root / ("model.pth" if stage == "model" else "data/2 b"))
    (line,) = remedies(root, [path])
    assert "DVC's cache has lost them, too" in line
    removal, fetch, again = re.findall(r"`([^`]+)`", line)
    assert fetch == f"dvc fetch {stage} && dvc checkout {stage}" and again == f"dvc repro {stage}"
    shell(root, removal)
    shell(root, again)
    assert whole(root)


def test_a_stage_that_cannot_read_an_input_says_what_to_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rot(root / "model.pth")
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update={"mlflow": False, "progress": "off"})
    with pytest.raises(SystemExit) as ended, stage_run("grpo", params={}, inputs=["model.pth"], runtime=runtime, root=root):
        raise DataError("model.pth: not a readable PyTorch file of tensors")
    said = capsys.readouterr().err
    assert ended.value.code == 3 and "grpo: model.pth: not a readable" in said and "Traceback" not in said
    assert "grpo: model.pth: not the bytes that dvc.lock has of stage model; `rm -rf model.pth && dvc checkout model`" in said


def test_chat_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/grpo.pth").write_bytes(b"rotten")
    (tmp_path / "checkpoints/grpo.json").write_bytes(b"{")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "dvc.lock").write_text(f"stages: {{grpo: {{outs: [{{path: checkpoints/grpo.json, md5: {MODEL}}}]}}}}")
    monkeypatch.setattr("pipeline.lineage.damage._bad_objects", lambda *_: iter(()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as raised:
        open_model("grpo", cast(Tokenizer, SimpleNamespace(digest="")))
    assert len(raised.value.lines) == 1 and "checkpoints/grpo.json: not the description" in str(raised.value)
    assert str(raised.value).endswith("`rm -rf checkpoints/grpo.json && dvc checkout grpo` brings them back")


def test_chat_says_what_a_damaged_tokenizer_needs_and_what_dvc_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of DVC's without the git repository that it was made in."""
    (tmp_path / "data/tokenizer").mkdir(parents=True)
    (tmp_path / "data/tokenizer/tokenizer.json").write_text("{")
    dvc(tmp_path, "init --no-scm --quiet")
    (tmp_path / ".dvc/config").write_text("")
    (tmp_path / "dvc.lock").write_text("stages: {tokenizer: {outs: [{path: data/tokenizer, md5: 0.dir}]}}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as raised:
        open_tokenizer()
    damaged, recorded, why = str(raised.value).split("; ")
    assert damaged.startswith("data/tokenizer/tokenizer.json: not JSON")
    assert recorded == "data/tokenizer: not the bytes that dvc.lock has of stage tokenizer"
    assert why.startswith("DVC cannot bring them back: ") and "not a git repository" in why
