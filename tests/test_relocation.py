"""A copied folder has a store of its own, and any folder's name is an address."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fed_runs import make_workspace, train
from mlflow import MlflowClient
from mlflow.artifacts import load_text
from typer.testing import CliRunner

from pipeline.__main__ import app
from pipeline.diagnosis.findings import Severity
from pipeline.errors import PipelineError
from pipeline.lineage.records import run_page
from pipeline.reading.workspace import check_mlflow
from pipeline.tracking.records import Record, noted_complete
from pipeline.tracking.replay import incomplete_runs, send_missing
from pipeline.tracking.run_folder import RunFolder
from pipeline.tracking.store import artifact_root, is_server, moved_from, open_store, own_store, sqlite_file, sqlite_uri

NAMES = ["plain", "a%2Fb", "a%20b", "what?", "a#b", "a b", "it's", 'say "x"', "100%", "a?x=1&uri=true", "+", "\u5c0f\u96e8"]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "x")  # put back: MLflow sets it
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


@pytest.mark.parametrize("name", NAMES)
def test_the_address_of_a_file_means_that_file_and_opens_no_sibling(tmp_path: Path, name: str) -> None:
    from sqlalchemy import create_engine

    folder = tmp_path / name
    folder.mkdir()
    uri = own_store(folder)
    assert sqlite_file(uri) == folder / "mlflow.db" and not is_server(uri) and sqlite_uri(folder / "mlflow.db") == uri
    with create_engine(uri).connect() as connection:
        connection.exec_driver_sql("CREATE TABLE experiments (name VARCHAR, artifact_location VARCHAR)")
        row = ("minimind", artifact_root(folder))
        connection.exec_driver_sql("INSERT INTO experiments VALUES (?, ?)", row)
        connection.commit()
    assert (folder / "mlflow.db").is_file() and [path.name for path in tmp_path.iterdir()] == [name]
    assert moved_from(folder) is None
    shutil.copytree(folder, tmp_path / "copy")
    assert moved_from(tmp_path / "copy") == folder


def _runs(root: Path) -> set[str]:
    with closing(sqlite3.connect(root / "mlflow.db")) as connection:
        return {uri for (uri,) in connection.execute("SELECT artifact_uri FROM runs")}


@pytest.mark.parametrize(
    "uri", ["postgresql://u@db:5432/runs", "mysql+pymysql://db/runs", "sqlite:///runs.db", "file:///runs", "runs"]
)
def test_only_what_answers_http_is_a_server_with_pages(uri: str) -> None:
    assert not is_server(uri) and not run_page(uri, "a1").served and run_page(uri, "a1").url.startswith("http://127.0.0.1:")
    assert is_server("https://host/mlflow/") and run_page("https://host/mlflow/", "a1").url == "https://host/mlflow/#/runs/a1"


@pytest.mark.slow
def test_a_copied_folder_is_told_and_relocated_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, copy = tmp_path / "of 50% size?", tmp_path / "copy"
    first.mkdir()
    make_workspace(first)
    list(send_missing([train(first)], None))
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name]
    shutil.copytree(first, copy)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file() and "mlartifacts" in path.parts}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    later = train(copy, lr=2e-4)
    line = check_mlflow(copy, None)
    assert line.severity is Severity.PROBLEM and str(first) in line.text and "`python -m pipeline relocate`" in line.text
    with pytest.raises(PipelineError, match="was copied or moved"):
        list(send_missing([later], None))
    with pytest.raises(PipelineError, match="was copied or moved"):
        open_store(own_store(copy), copy)
    monkeypatch.chdir(copy)
    done = CliRunner().invoke(app, ["relocate"])
    assert done.exit_code == 0 and f"name {copy} in place of {first}" in done.stdout
    assert CliRunner().invoke(app, ["relocate"]).stdout == "relocate: the store is this folder's own\n"
    assert [run.path for run in incomplete_runs(copy, None)] == [later.path]
    list(send_missing(incomplete_runs(copy, None), None))
    assert check_mlflow(copy, None).severity is Severity.OK
    assert all(uri.startswith(f"{artifact_root(copy)}/") for uri in _runs(copy))
    assert all(uri.startswith(f"{artifact_root(first)}/") for uri in _runs(first))
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file() and "mlartifacts" in path.parts}
    (older,) = (RunFolder(path.parent) for path in (copy / ".runs/agent").glob("*/*/run.json") if path.parent != later.path)
    record = Record(older)
    assert noted_complete(older) and record.tracking_uri == own_store(copy)
    run = MlflowClient(own_store(copy)).get_run(record.mlflow_id)
    assert run.data.tags["run.folder"] == str(older.path) and "lr" in load_text(f"{run.info.artifact_uri}/params.json")


@pytest.mark.slow
def test_a_moved_folder_sends_nothing_to_where_it_was(tmp_path: Path) -> None:
    """Runs name the store that they were fed to: before `relocate` that of the old folder, also where that is gone."""
    first, there = tmp_path / "first", tmp_path / "there"
    first.mkdir()
    make_workspace(first)
    list(send_missing([train(first)], None))
    first.rename(there)
    missed = incomplete_runs(there, None)
    assert len(missed) == 1
    with pytest.raises(PipelineError, match=r"was copied or moved: `python -m pipeline relocate`") as caught:
        list(send_missing([*missed, *missed], None))
    assert len(caught.value.lines) == 1
    (there / "mlflow.db").unlink()  # nothing says any more that the folder was another
    with pytest.raises(PipelineError, match=f"first/mlflow.db: no such file any more; MLFLOW_TRACKING_URI={own_store(there)}"):
        list(send_missing(missed, None))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    list(send_missing(missed, own_store(there)))
    assert not incomplete_runs(there, None)
