"""Passwords in addresses reach nothing that is printed, logged, linked, recorded or exported."""

import re
import string
import subprocess
from pathlib import Path

import dvc_here
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.lineage.records import run_page
from pipeline.lineage.remote import VARIABLE, pull_options
from pipeline.masking import masked, without_credentials
from pipeline.params.schema import Runtime
from pipeline.reading.workspace import check_mlflow
from pipeline.stage import stage_run
from pipeline.supervise.exits import explain
from pipeline.tracking.records import all_runs
from pipeline.tracking.sender import Sender
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
SECRET = "hunter2-9f3a"
ADDRESS = f"http://me:{SECRET}@127.0.0.1:9"
names = st.text(string.ascii_lowercase + "-_.", min_size=1, max_size=8)
hosts = st.from_regex(r"[a-z]{1,8}(\.[a-z]{2,4})?(:[1-9][0-9]{1,3})?", fullmatch=True)
passwords = st.text(string.ascii_letters + "!$%&()*+,;=:@~.-_", min_size=1, max_size=12).map(lambda text: f"0{text}Z9")
schemes = st.sampled_from(["http", "https", "postgresql+psycopg2", "mysql", "ssh", "s3", "webdavs"])


@given(schemes, st.one_of(st.just(""), names), passwords, hosts, st.sampled_from(["", "/db", "/a/b?x=1", "/#/runs/a@b"]))
def test_a_password_is_never_left_and_all_else_is(scheme: str, user: str, password: str, host: str, path: str) -> None:
    text = f"cannot reach {scheme}://{user}:{password}@{host}{path}, tried twice; see http://docs.example:80/x@y"
    expected = f"cannot reach {scheme}://{user}:***@{host}{path}, tried twice; see http://docs.example:80/x@y"
    assert masked(text) == expected and masked(expected) == expected
    assert without_credentials(f"{scheme}://{user}:{password}@{host}/x") == f"{scheme}://{host}/x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("postgresql://u:a/b?c@host:1/db", "postgresql://u:***@host:1/db"),  # as SQLAlchemy takes it
        ("mysql://host/db?user=u&password=p%40w&ssl=1", "mysql://host/db?user=u&password=***&ssl=1"),
        ("https://host/x?X-Amz-Signature=abc&design=1", "https://host/x?X-Amz-Signature=***&design=1"),
        ("http://host:5000/#/runs/models:/minimind@best", "http://host:5000/#/runs/models:/minimind@best"),
        ("sqlite:////a/b:c@d/mlflow.db", "sqlite:////a/b:c@d/mlflow.db"),
        ("mail me@host or git@host:x", "mail me@host or git@host:x"),
    ],
)
def test_what_is_a_secret_and_what_is_none(text: str, expected: str) -> None:
    assert masked(text) == expected


def test_a_run_records_no_password_and_is_still_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    runtime = Runtime.model_validate(read_yaml(ROOT / "params.yaml")["runtime"] | {"mlflow": False, "progress": "off"})
    with stage_run("pretrain", params={"pretrain": {"lr": 1.0}}, inputs=[], runtime=runtime, root=tmp_path):
        pass
    [folder] = all_runs(tmp_path)
    assert Sender(folder).uri == ADDRESS  # the environment has it
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    with pytest.raises(PipelineError, match=r"http://me:\*\*\*@127.0.0.1:9: has a password, which no record keeps"):
        _ = Sender(folder).uri
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(errors="replace"), path
    assert SECRET not in capfd.readouterr().err


def test_what_people_read_has_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    said = [
        str(check_mlflow(tmp_path, None)),
        str(PipelineError(f"{ADDRESS}: no answer")),
        "".join(explain(RuntimeError(f"API request to {ADDRESS}/api failed"))[1]),
        run_page(ADDRESS, "a1").url,
    ]
    assert not [text for text in said if SECRET in text] and said[3] == "http://127.0.0.1:9/#/runs/a1"
    assert "***" in said[0]


def test_a_remote_with_a_password_is_in_no_command_line_and_in_no_readable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dvc_here.init(tmp_path)
    monkeypatch.setenv(VARIABLE, f"webdavs://me:{SECRET}@host/x")
    commands: list[str] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        commands.append(" ".join(command))
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("pipeline.lineage.remote.subprocess.run", run)
    assert pull_options(tmp_path) == ["--pull"] and len(commands) == 1 and SECRET not in commands[0]
    config = tmp_path / ".dvc/config.local"
    assert SECRET in config.read_text() and config.stat().st_mode & 0o777 == 0o600
    (tmp_path / ".dvc/config.local").write_text("[broken")
    with pytest.raises(PipelineError) as caught:
        pull_options(tmp_path)
    assert SECRET not in str(caught.value) and re.search(r"webdavs://me:\*\*\*@host", str(caught.value))
