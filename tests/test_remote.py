"""Workspaces that share nothing but a DVC remote: what one has made, another one takes."""

import threading
from pathlib import Path

import dvc_here
import pytest

from pipeline.errors import PipelineError
from pipeline.lineage.execute import bring_up
from pipeline.lineage.plan import Verdict, read_plan
from pipeline.lineage.remote import VARIABLE

STAGES = """
stages:
  data:
    cmd: echo data >> ran && cp seed data.txt
    deps: [seed]
    outs: [data.txt]
  train:
    cmd: echo train >> ran && cp data.txt weights && cp seed metrics.json
    deps: [data.txt]
    outs: [weights]
    metrics: [metrics.json: {cache: false}]
"""


def workspace(folder: Path) -> Path:
    """A fresh one, as a container that starts from an image has it."""
    folder.mkdir()
    dvc_here.init(folder)
    (folder / "dvc.yaml").write_text(STAGES)
    (folder / "seed").write_text("1")
    return folder


def bring_up_all(root: Path) -> list[str]:
    """The stages that ran, below an environment that names a remote."""
    for stage in ("data", "train"):
        assert bring_up(root, stage, on_line=print, stop=threading.Event()).code == 0
    assert {planned.verdict for planned in read_plan(root)} == {Verdict.UP_TO_DATE}
    return (root / "ran").read_text().split() if (root / "ran").exists() else []


@pytest.mark.faults
def test_a_fresh_workspace_takes_what_another_one_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "remote"))
    first, second = workspace(tmp_path / "first"), workspace(tmp_path / "second")
    assert bring_up_all(first) == ["data", "train"]
    assert bring_up_all(second) == []
    for name in ("weights", "metrics.json", "dvc.lock"):
        assert (second / name).read_bytes() == (first / name).read_bytes()


def test_a_remote_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "remote").touch()
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "remote"))
    with pytest.raises(PipelineError, match=rf"`dvc push` failed \({VARIABLE}=.*: ERROR"):
        bring_up(workspace(tmp_path / "first"), "data", on_line=print, stop=threading.Event())
