"""A stage that never stops talking: nothing blocks, nothing is lost from its log, and Prefect's database does not fill up."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from faults.prefect_server import prefect_server

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PORT = 4336
LINES, LINE, UPDATES = 100_000, 100, 50_000
STAGES = f"""
stages:
  code: {{cmd: touch code.txt, outs: [code.txt]}}
  talker: {{cmd: exec {sys.executable} talker.py, deps: [talker.py, code.txt], outs: [talker.txt]}}
"""
TALKER = f"""
import sys
from pathlib import Path
for number in range({LINES}):
    print(str(number).zfill({LINE} - 1))
for number in range({UPDATES}):
    print(f"\\rstep {{number}}", end="", file=sys.stderr, flush=True)
Path("talker.txt").touch()
"""
FLOW = "from pathlib import Path; from flows import minimind as f; f.ROOT = Path.cwd(); f.minimind('talker')"


def test_ten_megabytes_and_fifty_thousand_updates_go_to_the_log_file_alone(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=project, check=True)
    (project / "dvc.yaml").write_text(STAGES)
    (project / "talker.py").write_text(TALKER)
    with prefect_server(tmp_path / "prefect", PORT) as variables:
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", FLOW], cwd=project, env=environment, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, done.stderr[-3000:]
    said = (project / ".runs/talker/output.log").read_text()
    assert sum(line.isdigit() and len(line) == LINE - 1 for line in said.splitlines()) == LINES
    assert f"step {UPDATES - 1}" in said
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        (logs,) = database.execute("select count(*) from log").fetchone()
        (size,) = database.execute("select coalesce(sum(length(message)), 0) from log").fetchone()
    print(f"{logs} log entries of {size} characters")
    assert 0 < logs < 200 and size < 100_000
