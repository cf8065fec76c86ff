"""The flow against a real, temporary Prefect server and a small lineage: order, siblings, retries, failures."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from flows import minimind as flows
from flows import rebuild
from flows.minimind import minimind
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
STAGES = """
stages:
  code:
    cmd: cat script > code.txt
    deps: [script]
    outs: [code.txt]
  base:
    cmd: echo base >> ran && cat code.txt > base.txt
    deps: [code.txt]
    outs: [base.txt]
  left:
    cmd: echo left >> ran && exec python left.py
    deps: [base.txt, left.py]
    outs: [left.txt]
  right:
    cmd: echo right >> ran && touch right.started && cat base.txt > right.txt
    deps: [base.txt]
    outs: [right.txt]
  eval:
    cmd: echo eval >> ran && cat left.txt right.txt > eval.txt
    deps: [left.txt, right.txt]
    outs: [eval.txt]
"""
COPY = "from pathlib import Path\nPath('left.txt').write_text(Path('base.txt').read_text())\n"
# Siblings that run one after the other would wait for ever.
AWAITS_RIGHT = "import time\nfrom pathlib import Path\nwhile not Path('right.started').exists():\n    time.sleep(0.05)\n" + COPY
FAULTY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pipeline.errors import DataError
from pipeline.supervise import exit_on_error
with exit_on_error('left'):
    raise DataError('row 3: no such role')
"""
KILLED_ONCE = (
    "import os, signal\nfrom pathlib import Path\n"
    "if not Path('second').exists():\n    Path('second').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n" + COPY
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "dvc.yaml").write_text(STAGES.replace("exec python", f"exec {sys.executable}"))
    (tmp_path / "script").write_text("1")
    (tmp_path / "left.py").write_text(COPY)
    monkeypatch.setattr(flows, "ROOT", tmp_path)
    monkeypatch.setattr(rebuild, "run_stage", rebuild.run_stage.with_options(retry_delay_seconds=0.1))
    return tmp_path


def ran(project: Path) -> list[str]:
    return (project / "ran").read_text().split()


def test_all_stages_run_once_and_siblings_side_by_side(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.os, "cpu_count", lambda: 2)
    (project / "left.py").write_text(AWAITS_RIGHT)
    minimind("all")
    order = ran(project)
    assert order[0] == "base" and sorted(order[1:3]) == ["left", "right"] and order[3:] == ["eval"]
    minimind("all")
    assert ran(project) == order


def test_a_target_takes_what_it_needs_and_no_more(project: Path) -> None:
    minimind("right")
    assert ran(project) == ["base", "right"]


def test_a_fault_in_the_data_is_not_tried_again_and_spares_the_siblings(project: Path) -> None:
    (project / "left.py").write_text(FAULTY)
    with pytest.raises(RuntimeError, match="left: row 3: no such role"):
        minimind("all")
    assert sorted(ran(project)) == ["base", "left", "right"]  # eval needs left


def test_a_killed_stage_is_tried_again(project: Path) -> None:
    (project / "left.py").write_text(KILLED_ONCE)
    minimind("eval")
    assert ran(project).count("left") == 2 and ran(project)[-1] == "eval"


def test_every_stage_has_a_deployment() -> None:
    declared = read_yaml(ROOT / "prefect.yaml")["deployments"]
    sweep = next(each for each in declared if each["name"] == "sweep")
    declared.remove(sweep)
    assert sweep["entrypoint"] == "flows/sweep.py:sweep" and "schedules" not in sweep
    stages = set(read_yaml(ROOT / "dvc.yaml")["stages"]) - {"code"}  # every flow run begins with code
    assert {(each["name"], each["parameters"]["stage"]) for each in declared} == {(name, name) for name in [*stages, "all"]}
    assert {each["entrypoint"] for each in declared} == {"flows/minimind.py:minimind"}
    assert [schedule["active"] for each in declared for schedule in each.get("schedules", [])] == [False]
