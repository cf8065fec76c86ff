"""Which edits change which stage's code hash."""

import ast
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.lineage.code_hash import EXECUTION_ONLY, CodeBase, is_execution_only, syntax_text, write_code_hashes
from pipeline.params import schema

FILES = {
    "pipeline/__init__.py": "from pipeline import environment\n",
    "pipeline/environment.py": "import pipeline.maths.unused\n",
    "pipeline/params.py": "KEYS = 1\n",
    "pipeline/maths/__init__.py": "",
    "pipeline/maths/grpo.py": "def loss(x):\n    return x\n",
    "pipeline/maths/dpo.py": "from . import helper\n\ndef loss(x):\n    return helper.half(x)\n",
    "pipeline/maths/helper.py": "def half(x):\n    return x / 2\n",
    "pipeline/maths/unused.py": "",
    "pipeline/text/__init__.py": "",
    "pipeline/text/chat.py": "import json\n",
    "pipeline/text/words/zh.txt": "one",
    "stages/__init__.py": "from pipeline.params import KEYS\n",
    "stages/code.py": "",
    "stages/dpo.py": "def main():\n    from pipeline.maths.dpo import loss\n    return loss(1)\n",
    "stages/grpo.py": """
import pipeline.maths.grpo as g
from typing import TYPE_CHECKING
from pipeline.text import chat
from pipeline.params import KEYS
if TYPE_CHECKING:
    from pipeline.maths import unused
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def written(project: Path) -> dict[str, bytes]:
    write_code_hashes(project, project / "out")
    return {path.stem: path.read_bytes() for path in (project / "out").glob("*.json")}


def changed_by(project: Path, name: str, text: str) -> set[str]:
    before = written(project)
    (project / name).write_text(text, encoding="utf-8")
    after = written(project)
    return {stage for stage in after if after[stage] != before[stage]}


def test_closure_follows_every_form_of_import(project: Path) -> None:
    code = CodeBase(project)
    common = {"pipeline", "pipeline.maths", "stages"}
    assert code.closure("stages.dpo") == common | {"stages.dpo", "pipeline.maths.dpo", "pipeline.maths.helper"}
    assert code.closure("stages.grpo") == common | {"stages.grpo", "pipeline.maths.grpo", "pipeline.text", "pipeline.text.chat"}


def test_file_holds_modules_and_other_files(project: Path) -> None:
    found = json.loads(written(project)["grpo"])
    assert list(found) == sorted(found)
    assert found["pipeline/text/words/zh.txt"] == hashlib.sha256(b"one").hexdigest()
    assert "pipeline/text/words/zh.txt" not in json.loads(written(project)["dpo"])
    assert set(written(project)) == {"dpo", "grpo"}


@pytest.mark.parametrize(
    "text",
    [
        "# why\ndef loss(x):  # how\n    return x\n",
        '"""Losses."""\n\n\ndef loss(x):\n    """The loss."""\n    return x\n',
        "def loss(\n    x,\n):\n    return (x)\n",
    ],
)
def test_comments_docstrings_and_layout_change_nothing(project: Path, text: str) -> None:
    assert changed_by(project, "pipeline/maths/grpo.py", text) == set()


@pytest.mark.parametrize(
    ("name", "text", "stages"),
    [
        ("pipeline/maths/grpo.py", "def loss(x):\n    return -x\n", {"grpo"}),
        ("pipeline/maths/helper.py", "def half(x):\n    return x / 3\n", {"dpo"}),
        ("pipeline/maths/dpo.py", "from . import helper\n\ndef loss(x):\n    return 'helper'\n", {"dpo"}),
        ("pipeline/maths/unused.py", "x = 1\n", set()),
        ("pipeline/environment.py", "x = 1\n", set()),
        ("pipeline/params.py", "KEYS = 2\n", set()),
        ("pipeline/text/words/zh.txt", "two", {"grpo"}),
        ("pipeline/maths/__init__.py", "x = 1\n", {"dpo", "grpo"}),
        ("stages/dpo.py", "def main():\n    return 1\n", {"dpo"}),
        ("stages/code.py", "x = 1\n", set()),
    ],
)
def test_edit_changes_exactly_its_users(project: Path, name: str, text: str, stages: set[str]) -> None:
    assert changed_by(project, name, text) == stages


def test_docstring_next_to_nothing_counts_as_pass(project: Path) -> None:
    (project / "pipeline/maths/unused.py").write_text("class A:\n    pass\n", encoding="utf-8")
    (project / "stages/dpo.py").write_text("import pipeline.maths.unused\n", encoding="utf-8")
    assert changed_by(project, "pipeline/maths/unused.py", 'class A:\n    """Nothing more."""\n') == set()
    assert changed_by(project, "pipeline/maths/unused.py", "class A:\n    x = 'text'\n") == {"dpo"}


def test_hashing_this_project_is_quick_complete_and_repeatable(root: Path, tmp_path: Path) -> None:
    start = time.process_time()  # what others do on this machine does not count
    write_code_hashes(root, tmp_path / "a")
    assert time.process_time() - start < 5  # about 0.6 s
    other = "from pathlib import Path\nfrom pipeline.lineage.code_hash import write_code_hashes as w\nimport sys\n"
    other += "w(Path.cwd(), Path(sys.argv[1]))\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", other, str(tmp_path / "b")], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {f"{path.stem}.json" for path in (root / "stages").glob("*.py") if path.stem not in ("__init__", "code")}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


SYNTAX = """
from __future__ import annotations
import a.b as c
@d(1, *e, k=None, **f)
class C(B, metaclass=M):
    x: int = 0
    def f(self, a, /, b=1, *args: int, c, d=None, **kw) -> None: return
    async def g(self): return [i async for i in x if i if not i]
def h(): global z; yield
lambda: (yield)
x[1:2, ::3], y = {**a, 1: "é"}, {*b}; del x
match p:
    case [1, *_] | {"k": v, **rest} | C(x=None) | None if v: pass
    case _: raise
try: assert x, f"{x!r:>{n}} {{}} {1 + 1=}" "tail" f"{'q'}"
except* (A, B) as e: pass
else: print(1j, 1e-3, b"x", ..., -1 if a else not b)
with open(a) as b, c: pass
for i in (): break
else: nonlocal_ = 1
while a < b <= c is not d not in e: continue
"""


def test_the_hash_of_a_tree_is_that_of_the_first_python(tmp_path: Path) -> None:
    """`ast.dump` under 3.11 is the oracle; the hash was written down there, and other Pythons have to come to it, too."""
    digest = hashlib.sha256(syntax_text(ast.parse(SYNTAX)).encode()).hexdigest()
    assert digest == "9240a9e61df220cc620ed36193e9aa5a4310cf996975d00d109d9894e2d5bf68"
    if sys.version_info[:2] == (3, 11):
        assert syntax_text(ast.parse(SYNTAX)) == ast.dump(ast.parse(SYNTAX))


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_that_is_there_hashes_this_project_alike(root: Path, tmp_path: Path, version: str) -> None:
    """A colleague's Python reruns nothing. No package is needed for it."""
    python = shutil.which(f"python{version}")
    script = "import sys; from pathlib import Path; from pipeline.lineage.code_hash import write_code_hashes\n"
    script += "assert sys.version_info[:2] == tuple(map(int, sys.argv[2].split('.')))\n"
    script += "write_code_hashes(Path.cwd(), Path(sys.argv[1]))"
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:  # a version manager's stub
        pytest.skip(f"no Python {version} in PATH")
    subprocess.run([python, "-c", script, str(tmp_path / "other"), version], cwd=root, check=True)
    write_code_hashes(root, tmp_path / "own")
    for path in (tmp_path / "own").iterdir():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes()


def test_template_is_part_of_what_reads_it(root: Path) -> None:
    assert "pipeline/text/chat_template.jinja" in CodeBase(root).hashes("stages.tokenizer")


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        ("pipeline.maths.supervised", {"pretrain", "full_sft", "lora"}),
        ("pipeline.maths.preference", {"dpo", "reward", "eval"}),
        ("pipeline.maths.policy", {"ppo", "grpo", "agent"}),
        ("pipeline.maths.value", {"ppo"}),
        ("pipeline.data.encode", {"encode"}),
        ("pipeline.yaml_files", {"data"}),
        ("pipeline.data.world", {"data"}),
        ("pipeline.evaluation.statistics", {"eval"}),
        ("pipeline.rewards.rules", {"ppo", "grpo", "agent", "eval"}),
    ],
)
def test_edited_module_reruns_what_uses_it(root: Path, module: str, stages: set[str]) -> None:
    code = CodeBase(root)
    scripts = {name.removeprefix("stages.") for name in code.paths if name.startswith("stages.")}
    assert {name for name in scripts if module in code.closure(f"stages.{name}")} == stages


def test_left_out_modules_exist(root: Path) -> None:
    assert [name for name in EXECUTION_ONLY if name not in CodeBase(root).paths] == []


UNHASHED_NAMES = {
    "pipeline": {"environment"},
    "pipeline.errors": {"DataError", "DiskSpaceError", "GateError", "NumericsError", "ParamsError", "PipelineError"},
    "pipeline.lineage": {"ran_code"},
    "pipeline.lineage.code_hash": {"write_code_hashes"},
    "pipeline.lineage.damage": {"remedies"},
    "pipeline.lineage.declaration": {"declaration"},
    "pipeline.lineage.rows": {"remember_rows"},
    "pipeline.params": {"load_params"},
    "pipeline.params.schema": {
        name for name, value in vars(schema).items() if isinstance(value, type)
    },  # sections: DVC has values
    "pipeline.stage": {"stage_process", "stage_run"},
    "pipeline.supervise": {"exit_on_error"},
    "pipeline.terminal": {"say"},
    "pipeline.training.panels": {"chat_prompts", "document_prompts", "greedy_panel", "pair_prompts"},
}
"""What hashed modules may import from modules that are not hashed: module -> names, none of which decides an out."""


def test_hashed_modules_import_only_listed_names_from_those_that_are_not(root: Path) -> None:
    unlisted, code = [], CodeBase(root)
    for name in code.paths:
        for node in [] if is_execution_only(name) else ast.walk(code.tree(name)):
            if isinstance(node, ast.Import):
                unlisted += [f"{name}: {alias.name}" for alias in node.names if is_execution_only(alias.name)]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = {a.name for a in node.names if is_execution_only(module) or is_execution_only(f"{module}.{a.name}")}
                unlisted += [f"{name}: {module}.{alias}" for alias in names - UNHASHED_NAMES.get(module, set())]
    assert unlisted == []


def test_no_import_is_hidden_from_the_closure(root: Path) -> None:
    """Names given as text to import machinery cannot be followed."""
    code = CodeBase(root)
    hidden = [
        f"{name}:{node.lineno}"
        for name in code.paths
        for node in ast.walk(code.tree(name))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") in ("__import__", "exec", "eval") or getattr(node.func, "attr", "") == "import_module")
    ]
    assert hidden == []
