"""Imports point one way: the table in docs/architecture.md, read and compared with what every module imports."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ADAPTERS = 11  # first row that may touch MLflow, DVC and signals


def rows() -> dict[str, int]:
    """Room -> its row in the table."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    found = {}
    for number, rooms in re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", rooms):
            found[name.removeprefix("pipeline/").removesuffix(".py").removesuffix("/*").removesuffix("/")] = int(number)
    return found


ROWS = rows()
MODULES = sorted(path.relative_to(ROOT) for top in ("pipeline", "stages", "flows") for path in (ROOT / top).rglob("*.py"))


def room(module: str) -> str | None:
    """Room of a dotted name; None outside the project and for the bare package `pipeline`."""
    top, *rest = module.split(".")
    if top in ("stages", "flows"):
        return top
    return rest[0] if top == "pipeline" and rest else None


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ([f"pipeline.{alias.name}" for alias in node.names] if node.module == "pipeline" else [node.module or ""])


def own_room(path: Path) -> str | None:
    return room(".".join(path.with_suffix("").parts).removesuffix(".__init__"))


def test_table_is_read() -> None:
    assert {"errors": 1, "params": 1, "text": 2, "maths": 6, "stage": 11, "stages": 14, "flows": 14}.items() <= ROWS.items()
    assert sorted(set(ROWS.values())) == list(range(1, 15))


def test_every_room_has_a_row() -> None:
    assert {own_room(path) for path in MODULES} - {None} <= set(ROWS)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_up(path: Path) -> None:
    own = own_room(path)
    if own is None:  # pipeline/__init__.py switches hubs off and does nothing else
        assert {room(name) for name in imported(path)} <= {"environment"}
        return
    below = [name for name in imported(path) if (other := room(name)) and other != own and ROWS[other] > ROWS[own]]
    assert below == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone count, too: two parts that need each other's types are one. One circle stays: blocks of keys and
    values take their shape from the model that fills them."""
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    uses = {name: {each for each in imported(path) if each in names} for name, path in names.items()}
    uses["pipeline.model.kv_block"].discard("pipeline.model.inference")
    while leaves := {name for name, used in uses.items() if not used & uses.keys()}:
        uses = {name: used for name, used in uses.items() if name not in leaves}
    assert uses == {}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    own = own_room(path)
    row = ROWS[own] if own else 1
    libraries = {name.partition(".")[0] for name in imported(path)}
    if row < ADAPTERS:
        assert not libraries & {"mlflow", "dvc", "signal", "fcntl"}
    if own in ("environment", "masking", "terminal", "errors", "yaml_files", "params", "tools", "lineage", "flows", None):
        assert "torch" not in libraries
    if own != "flows":
        assert "prefect" not in libraries
    else:
        allowed = {None, "flows", "params", "lineage", "masking", "terminal", "errors", "supervise"}
        assert {room(name) for name in imported(path)} <= allowed
