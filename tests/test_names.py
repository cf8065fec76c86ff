"""Names that people give to files, folders and experiments, where MLflow, git and terminals see them."""

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import small_lineage
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_tag_name
from rich.table import Table

from flows.faults import FlowFault, log_faults_as_lines
from pipeline.errors import DataError
from pipeline.params import load_params
from pipeline.reading.console import EscapingConsole
from pipeline.stage import stage_run
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


@pytest.mark.slow
def test_the_first_commands_work_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """The lineage is made by DVC, so its stages have run there."""
    root = small_lineage.make(tmp_path / 'it"s 100%' / "a?b#1 *[c]" / "a$b'c`d" / "模型 é")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}
    for command, word in (("check", "is valid"), ("plan", "grpo             up to date"), ("status", "grpo  up to date")):
        line = [sys.executable, "-m", "pipeline", command]
        done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and word in done.stdout, done.stderr
    (root / "grpo.txt").unlink()
    small_lineage.dvc(root, "checkout", "grpo")
    assert (root / "grpo.txt").is_file() and small_lineage.ran(root) == []


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


HELD = """
import sys
from flows import local
from pipeline.errors import HeldError

def hold(*_, **__):
    raise HeldError("模型")

local.hold = hold
sys.exit(local.main())
"""
STAGE = "from pipeline.supervise import exit_on_error\nwith exit_on_error('stage'):\n    print('模型')"


@pytest.mark.parametrize("program", [["-c", HELD], ["-c", STAGE], ["-m", "pipeline.tracking.ui"]], ids=["flows", "stages", "ui"])
def test_every_program_bears_any_locale(tmp_path: Path, program: list[str]) -> None:
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "MLFLOW_TRACKING_URI": "http://模型"}
    line = [sys.executable, *program]
    done = subprocess.run(line, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0 and "\\u6a21\\u578b" in done.stdout, done.stderr


NASTY, ESCAPED = "a\x1b[2J\x07\u202eb", "a\\u001b[2J\\u0007\\u202eb"


def test_what_a_stage_prints_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, the end by an error that quotes a text, and a bug's traceback."""
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update={"mlflow": False, "progress": "on"})
    for error in (DataError(f"{NASTY}: bad"), RuntimeError(NASTY)):
        with pytest.raises(SystemExit), stage_run("grpo", params={}, inputs=[], runtime=runtime, root=tmp_path) as run:
            run.announce(f"reads {NASTY}")
            raise error
        said = capsys.readouterr().err
        assert f"grpo: reads {ESCAPED}\n" in said and said.count(ESCAPED) >= 2
        assert not {*"\x1b\x07\u202e"} & {*said}


def test_what_a_flow_logs_moves_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("prefect.task_runs")
    log_faults_as_lines()
    with caplog.at_level(logging.INFO, "prefect.task_runs"):
        logger.propagate, before = True, logger.propagate
        logger.info("stage says %s, %d %%", NASTY, 5)
        logger.error("%s", NASTY, exc_info=(FlowFault, FlowFault(NASTY), None))
        logger.propagate = before
    assert [record.getMessage() for record in caplog.records] == [f"stage says {ESCAPED}, 5 %", ESCAPED]


def test_nobody_prints_past_the_one_function() -> None:
    """What prints tables has its own reasons."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("pipeline", "stages", "flows")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"(?<![.\w])print\(|typer\.echo\(|sys\.std(?:out|err)\.write\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"pipeline/terminal.py", "pipeline/__main__.py", "flows/local.py"}
    # flows/local.py has one in a program that counts GPUs
