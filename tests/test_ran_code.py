"""The code that ran is the code that is recorded, whatever was edited before, while and after a stage starts."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.lineage.code_hash import CodeBase, is_execution_only, write_code_hashes

ROOT = Path(__file__).parents[1]
GATE = Path("pipeline/evaluation/gate.py")
SAID = "grpo is worse than full_sft"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The code of this repository, hashed, and what stage `gate` reads: it finds that grpo is worse, and says so."""
    for name in ("pipeline", "stages"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    params = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(params.replace("  gate: null", "  gate: [reward_mean]"), encoding="utf-8")
    (tmp_path / "metrics").mkdir()
    measured = {
        model: {"reward_mean": value, "reward_mean_low": value, "reward_mean_high": value, "reward_mean_n": 200.0}
        for model, value in (("full_sft", 2.0), ("grpo", 1.0))
    }
    (tmp_path / "metrics/eval.json").write_text(json.dumps(measured))
    write_code_hashes(tmp_path, tmp_path / "data/code")
    return tmp_path


def run(project: Path, stage: str = "gate") -> tuple[int, str]:
    command = [sys.executable, "-m", f"stages.{stage}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_stage_whose_code_was_edited_since_says_what_to_run(project: Path) -> None:
    edit(project / GATE, "is worse than", "is  worse than")
    code, said = run(project)
    assert code == 1 and said == (
        "gate: pipeline.evaluation.gate: not the code that DVC would record, data/code/gate.json; `dvc repro gate` records the "
        "code as it is now and runs it\n"
    )
    write_code_hashes(project, project / "data/code")
    code, said = run(project)
    assert code == 7 and "grpo is  worse than full_sft" in said


def test_an_edited_comment_and_an_edit_for_others_stop_nothing(project: Path) -> None:
    edit(project / GATE, "    for model, parent", "    # each\n    for model, parent")
    edit(project / "pipeline/maths/policy.py", "import ", "import os\nimport ")
    code, said = run(project)
    assert code == 7 and SAID in said


def test_code_that_is_put_back_while_it_starts_is_refused(project: Path) -> None:
    """What lies on disk at the end of the imports is what was hashed, and something else was imported."""
    good = (project / GATE).read_text(encoding="utf-8")
    edit(project / GATE, "is worse than", "outdoes")
    with (project / GATE).open("a", encoding="utf-8") as file:
        file.write(f"import pathlib\npathlib.Path(__file__).write_text({good!r}, encoding='utf-8')\n")
    code, said = run(project)
    assert code == 1 and said.startswith("gate: its code was edited while it started; give the same command again")
    code, said = run(project)
    assert code == 7 and SAID in said


def test_an_edit_that_leaves_size_and_second_is_not_hidden_by_bytecode(project: Path) -> None:
    """Python compares no more of a source with its bytecode."""
    assert SAID in run(project)[1]
    status = (project / GATE).stat()
    edit(project / GATE, "is worse than", "is w0rse than")
    os.utime(project / GATE, ns=(status.st_atime_ns, status.st_mtime_ns))
    write_code_hashes(project, project / "data/code")
    assert "grpo is w0rse than full_sft" in run(project)[1]


def test_later_edits_do_not_act_on_a_stage_and_do_not_cost_it(project: Path) -> None:
    """Stage gate rewrites its own code and another module before it needs them."""
    edit(
        project / "stages/gate.py",
        "        metrics = params.eval.gate",
        "        for path in ('pipeline/evaluation/gate.py', 'pipeline/evaluation/catalogue.py', 'stages/gate.py'):\n"
        "            Path(path).write_text('raise SystemExit(99)')\n"
        "        metrics = params.eval.gate",
    )
    write_code_hashes(project, project / "data/code")
    code, said = run(project)
    assert code == 7 and SAID in said


def test_code_that_is_edited_while_it_is_hashed_is_hashed_again(project: Path) -> None:
    """Else DVC records the new folder with the hashes of the old one, for good."""
    edit(
        project / "pipeline/lineage/code_hash.py",
        "    for name, text in code_files(root).items():",
        "    with (root / 'stages/gate.py').open('a') as file:\n        file.write('EDITED = 1')\n"
        "    for name, text in code_files(root).items():",
    )
    code, said = run(project, "code")
    assert code == 1 and said.startswith("code: stages: changed while the stage ran, and DVC would record the new")


def test_what_a_stage_is_hashed_of_is_imported_when_it_starts() -> None:
    """A module that is imported in the middle of a run is read as it is by then."""
    code = CodeBase(ROOT)
    late = [
        f"{name}:{node.lineno}"
        for name in code.paths
        if not is_execution_only(name)
        for function in ast.walk(code.tree(name))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "pipeline" in ast.unparse(node)
    ]
    assert late == []
