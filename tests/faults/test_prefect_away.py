"""The Prefect server killed or hung while a stage runs: the stage ends as ever, and the flow when the server is back."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.mlflow_server import wait_for
from faults.prefect_server import prefect_server

from pipeline.lineage.plan import Verdict, read_plan

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PORT = 4338
STAGES = f"""
stages:
  code: {{cmd: touch code.txt, outs: [code.txt]}}
  train: {{cmd: exec {sys.executable} train.py, deps: [train.py, code.txt], outs: [weights]}}
"""
TRAIN = """
import time
from pathlib import Path
with Path("started").open("a") as file:
    file.write("x")
while not Path("open").exists():
    time.sleep(0.05)
time.sleep(3)
Path("weights").write_text("trained")
"""
FLOW = "from pathlib import Path; from flows import minimind as f; f.ROOT = Path.cwd(); f.minimind('train')"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_goes_away_takes_no_result_with_it(tmp_path: Path, signum: signal.Signals) -> None:
    project = tmp_path / "project"
    project.mkdir()
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=project, check=True)
    (project / "dvc.yaml").write_text(STAGES)
    (project / "train.py").write_text(TRAIN)
    with prefect_server(tmp_path / "prefect", PORT) as variables:
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
        server = int((tmp_path / "prefect" / "pid").read_text())
        flow = subprocess.Popen([sys.executable, "-c", FLOW], cwd=project, env=environment, stderr=subprocess.PIPE, text=True)
        wait_for((project / "started").exists, 90, "the stage")
        os.kill(server, signum)
        (project / "open").touch()
        wait_for((project / "weights").exists, 60, "the stage's end")
        wait_for(lambda: (project / "dvc.lock").exists() and "weights" in (project / "dvc.lock").read_text(), 60, "dvc.lock")
        with ExitStack() as again:
            if signum == signal.SIGSTOP:
                os.kill(server, signal.SIGCONT)
            else:
                again.enter_context(prefect_server(tmp_path / "prefect", PORT))
            _, said = flow.communicate(timeout=180)
    print(signum.name, flow.returncode, said.splitlines()[-1][:200])
    assert flow.returncode == 0, said[-3000:]
    assert (project / "started").read_text() == "x"
    assert {planned.verdict for planned in read_plan(project)} == {Verdict.UP_TO_DATE}
