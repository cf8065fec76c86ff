"""Names that people give to files, folders and experiments, where MLflow, git and terminals see them."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_tag_name
from rich.table import Table

from pipeline.reading.console import EscapingConsole
from pipeline.terminal import escaped
from pipeline.tracking.names import MAX_KEY, tag_key
from pipeline.tracking.rebuild import EXPERIMENT, Rebuild

ROOT = Path(__file__).parents[1]
AWKWARD = (
    "pretrain+v2 (1).pth",
    "it's `50%` of #1?.pth",
    'a"b.pth',
    "../elsewhere/x.pth",
    "/absolute//x/./y.pth",
    "模型.pth",
    "a:b",
)


@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from([*"ab.:/ +'`"]), max_size=300).map("".join)))
def test_mlflow_takes_every_name_as_a_tag(name: str) -> None:
    key = tag_key(f"dvc.{name}")
    _validate_tag_name(key)
    assert len(key) <= MAX_KEY and "`" not in key


@given(st.text(st.sampled_from("a+:2b/. "), max_size=8), st.text(st.sampled_from("a+:2b/. "), max_size=8))
def test_no_two_names_are_one_tag(one: str, other: str) -> None:
    assert (tag_key(f"dvc.{one}") == tag_key(f"dvc.{other}")) == (one == other)
    assert tag_key("x" * 300) != tag_key("x" * 299 + "y")


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("dvc.checkpoints/full_sft.pth", "version.python", "dvc.external/my model-2.jsonl", "dvc.../data/x"):
        assert tag_key(name) == name


def test_runs_are_found_by_awkward_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("pipeline.tracking.rebuild.inherited", lambda: [Rebuild("", "", os.getpid(), 1.0)])
    for name in AWKWARD:
        monkeypatch.setenv(EXPERIMENT, name)
        rebuild = Rebuild.current()
        assert rebuild is not None
        run = client.create_run("0", tags={tag_key(f"dvc.{name}"): "d" * 32, "rebuild.key": rebuild.key})
        for query in (f"tags.`{tag_key(f'dvc.{name}')}` = '{'d' * 32}'", f"tags.`rebuild.key` = '{rebuild.key}'"):
            assert [each.info.run_id for each in client.search_runs(["0"], query)] == [run.info.run_id]


def test_control_characters_are_shown_in_a_terminal() -> None:
    nasty = "a\x1b[2Jb\x07\r\x9b1mc\u202ed"
    shown = "a\\u001b[2Jb\\u0007\\u000d\\u009b1mc\\u202ed"
    assert escaped(nasty) == shown and escaped("Ärger\n\t模型 👍") == "Ärger\n\t模型 👍"
    file = io.StringIO()
    table = Table()
    table.add_column("name", style="bold red")
    table.add_row(nasty)
    console = EscapingConsole(file=file, force_terminal=True, width=100, color_system="standard")
    console.print(table)
    assert "\x1b[1;31m" in file.getvalue() and "\x1b[2J" not in file.getvalue() and "\x07" not in file.getvalue()


@pytest.mark.parametrize(
    "setting", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_locale_without_the_characters_gets_escapes(tmp_path: Path, setting: dict[str, str]) -> None:
    (tmp_path / "params.yaml").write_text("模型: 1\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "check"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), **setting},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "\\u6a21\\u578b" in done.stderr and "Traceback" not in done.stderr
