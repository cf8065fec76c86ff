"""Why a stage runs, named as closely as the records allow."""

import json
import subprocess
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.digests import digest
from pipeline.lineage.causes import FIRST, NOTHING, code_causes, param_causes, reasons
from pipeline.lineage.code_hash import CodeBase
from pipeline.lineage.rows import KEPT, changed_rows, remember_rows


def test_params_are_named_leaf_by_leaf() -> None:
    before = {"grpo": {"lr": 1e-4, "loss": "cispo", "old": 1}, "data.seed": 42, "grpo.betas": [0.9, 0.95]}
    after = {"grpo": {"lr": 2e-4, "loss": "cispo", "new": None, "betas": (0.9, 0.95)}, "data": {"seed": 43}}
    assert list(param_causes(before, after)) == [
        "grpo.lr 1e-4 → 2e-4",
        "grpo.new (new) → null",
        "data.seed 42 → 43",
        "grpo.old 1 → (gone)",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("a b c", "a X c", "row 2 changed"),
        ("a b c", "X Y c", "rows 1-2 changed"),
        ("a b c", "a b c d e", "2 rows added behind row 3"),
        ("a b c", "x a b c", "1 row added behind row 0"),
        ("a b c", "a b", "row 3 removed"),
        ("a b c", "a X Y c", "row 2 became 2 rows"),
        ("a b c", "", "rows 1-3 removed"),
        ("a a a", "a a", "row 3 removed"),
        ("a b c", "a b c", None),
    ],
)
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "dpo.jsonl"
    source.write_text("".join(f"{row}\n" for row in before.split()))
    known = digest(source)
    remember_rows(source)
    source.write_text("".join(f"{row}\n" for row in after.split()))
    assert changed_rows(source, tmp_path, known) == said
    assert changed_rows(source, tmp_path, "0" * 32) is None


@given(before=st.lists(st.integers(0, 2), max_size=6), after=st.lists(st.integers(0, 2), max_size=6))
def test_the_rows_named_are_all_that_differ(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], after: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    source = folder / "x.jsonl"
    kept = folder / ".runs/rows/x.jsonl"
    kept.mkdir(parents=True)
    source.write_text("".join(f"{row}\n" for row in before))
    from zlib import crc32

    (kept / "old").write_bytes(array("I", (crc32(f"{row}\n".encode()) for row in before)).tobytes())
    source.write_text("".join(f"{row}\n" for row in after))
    said = changed_rows(source, folder, "old")
    assert (said is None) == (before == after)
    if said and said.startswith("row ") and said.endswith(" changed"):
        at = int(said.split()[1]) - 1
        assert [row for place, row in enumerate(before) if place != at] == [row for place, row in enumerate(after) if place != at]


def test_a_few_versions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "a.jsonl"
    for version in range(KEPT + 2):
        source.write_text(f"{version}\n")
        remember_rows(source)
    assert len(list((tmp_path / ".runs/rows/a.jsonl").iterdir())) == KEPT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one module, and in DVC's cache the hash file of its committed version, whose digest is `old`."""
    (tmp_path / "pipeline/maths").mkdir(parents=True)
    (tmp_path / "pipeline/__init__.py").touch()
    (tmp_path / "pipeline/maths/__init__.py").touch()
    module = tmp_path / "pipeline/maths/policy.py"
    module.write_text("CAP = 5\n\ndef loss(x):\n    '''Says.'''\n    return x\n\nclass A:\n    def f(self):\n        return 1\n")
    run = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*run, *command], cwd=tmp_path, check=True)
    cached = tmp_path / ".dvc/cache/files/md5/ol/d"
    cached.parent.mkdir(parents=True)
    cached.write_text(json.dumps({"pipeline.maths.policy": CodeBase(tmp_path)._tree_hash("pipeline.maths.policy")}))
    return tmp_path


def code_said(project: Path, text: str) -> list[str]:
    (project / "pipeline/maths/policy.py").write_text(text)
    return list(code_causes(project, "old", {"pipeline.maths.policy": CodeBase(project)._tree_hash("pipeline.maths.policy")}))


def test_code_is_named_by_function(project: Path) -> None:
    text = (project / "pipeline/maths/policy.py").read_text()
    assert code_said(project, text.replace("Says.", "Says more.")) == []
    assert code_said(project, text.replace("return x", "return -x")) == ["pipeline.maths.policy changed: loss"]
    assert code_said(project, text.replace("return 1", "return 2").replace("5", "6")) == [
        "pipeline.maths.policy changed: CAP, A.f"
    ]
    assert code_said(project, text + "\ndef more():\n    pass\n") == ["pipeline.maths.policy changed: more"]


def test_code_without_its_old_version_is_named_by_module_or_not_at_all(project: Path) -> None:
    new = {"pipeline.maths.policy": "1", "pipeline.maths.value": "2"}
    (project / ".dvc/cache/files/md5/ol/d").write_text(json.dumps({"pipeline.maths.policy": "0", "pipeline.maths.gone": "3"}))
    assert list(code_causes(project, "old", new)) == [
        "pipeline.maths.policy changed",
        "pipeline.maths.value is new",
        "pipeline.maths.gone is no longer used",
    ]
    assert list(code_causes(project, "0" * 32, new)) == ["code changed"]


def test_cache_lies_where_dvc_is_told(project: Path) -> None:
    (project / ".dvc/cache").rename(project / "elsewhere")
    (project / ".dvc/config").write_text("[cache]\n    dir = ../elsewhere\n")
    assert code_said(project, "CAP = 7\n") == ["pipeline.maths.policy changed: CAP, loss, A.f, A"]


LOCK = """
stages:
  grpo:
    cmd: x
    deps:
      - {path: data/a, md5: '1'}
      - {path: data/b, md5: '2'}
    params:
      params.yaml:
        grpo.lr: 0.1
"""


def test_reasons_of_a_stage(tmp_path: Path) -> None:
    params, digests = {"grpo": {"lr": 0.1}}, {"data/a": "1", "data/b": "2"}
    assert reasons(tmp_path, tmp_path, "grpo", params, digests) == [FIRST]
    (tmp_path / "dvc.lock").write_text(LOCK)
    assert reasons(tmp_path, tmp_path, "dpo", params, digests) == [FIRST]
    assert reasons(tmp_path, tmp_path, "grpo", params, digests) == [NOTHING]
    changed = reasons(tmp_path, tmp_path, "grpo", {"grpo": {"lr": 0.2}}, {"data/a": "9", "data/c": "3"})
    assert changed == ["grpo.lr 0.1 → 0.2", "data/a modified", "data/c is a new input", "data/b is no input any more"]
    for size in range(len(LOCK)):  # DVC may be writing it, for a sibling
        (tmp_path / "dvc.lock").write_text(LOCK[:size])
        assert reasons(tmp_path, tmp_path, "grpo", params, digests)
