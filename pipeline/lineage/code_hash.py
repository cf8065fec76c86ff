"""A stage's code as data: one hash per module that its script can reach.

DVC compares `data/code/<stage>.json`, so a stage reruns when code that decides its result changes, and only then. The hash
is of the syntax tree: comments, docstrings and layout do not count. Granularity is the module.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOTS = ("pipeline", "stages")

EXECUTION_ONLY = (
    "pipeline.__main__",
    "pipeline.diagnosis",
    "pipeline.environment",
    "pipeline.errors",
    "pipeline.lineage",
    "pipeline.masking",
    "pipeline.pages",
    "pipeline.params",  # one schema for all stages: a key added for one would rerun all; DVC tracks the values themselves
    "pipeline.reading",
    "pipeline.stage",
    "pipeline.supervise",
    "pipeline.terminal",
    "pipeline.tracking",
    "pipeline.training.panels",
)
"""Modules (with everything below them) that cannot change an out: neither hashed nor followed."""


class CodeBase:
    """The Python packages of `ROOTS` below `root`, read once.

    Args:
        root: the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = cache(self._parse)  # most modules are of many stages
        self._imports = cache(self._read_imports)
        self._tree_hash = cache(self._hash_tree)

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Module name -> file; a package is its `__init__.py`."""
        found = {}
        for top in ROOTS:
            for path in sorted((self.root / top).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def data_files(self) -> dict[str, list[Path]]:
        """Folder of modules, as a dotted name -> its other files, those in subfolders without modules included."""
        folders = {path.parent for path in self.paths.values()}
        found: dict[str, list[Path]] = {}
        for top in ROOTS:
            for path in sorted((self.root / top).rglob("*")):
                hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(self.root).parts)
                if path.suffix == ".py" or hidden or not path.is_file():
                    continue
                owner = next(folder for folder in path.parents if folder in folders or folder.parent == self.root)
                found.setdefault(".".join(owner.relative_to(self.root).parts), []).append(path)
        return found

    def closure(self, entry: str) -> set[str]:
        """The modules that running `entry` can reach, `EXECUTION_ONLY` left out."""
        reached: set[str] = set()
        waiting = [entry]
        while waiting:
            name = waiting.pop()
            if name in reached or is_execution_only(name):
                continue
            reached.add(name)
            waiting += self._imports(name)
            waiting += [package for package in _packages(name) if package in self.paths]
        return reached

    def hashes(self, entry: str) -> dict[str, str]:
        """SHA-256 per module of `closure(entry)` and per other file in these modules' folders, sorted by name."""
        modules = self.closure(entry)
        found = {name: self._tree_hash(name) for name in modules}
        for folder in {".".join(self.paths[name].parent.relative_to(self.root).parts) for name in modules}:
            for path in self.data_files.get(folder, []):
                found[path.relative_to(self.root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
        return dict(sorted(found.items()))

    def _parse(self, name: str) -> ast.Module:
        """The syntax tree of a module."""
        return ast.parse(self.paths[name].read_bytes(), str(self.paths[name]))

    def _hash_tree(self, name: str) -> str:
        return syntax_hash(self.tree(name))

    def _read_imports(self, name: str) -> set[str]:
        """The modules of this code base that a module imports, inside functions too."""
        return set(self._imported(name))

    def _imported(self, name: str) -> Iterator[str]:
        package = name if self.paths[name].name == "__init__.py" else name.rpartition(".")[0]
        for node in _executed(self.tree(name)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            for target in targets:
                yield from (found for found in [*_packages(target), target] if found in self.paths)


def code_files(root: Path) -> dict[str, str]:
    """Name and text of the file for every script of `root/stages` but `code` itself, as `write_code_hashes` writes them."""
    code = CodeBase(root)
    scripts = [script.stem for script in sorted((root / "stages").glob("*.py")) if script.stem not in ("__init__", "code")]
    return {f"{script}.json": code_text(code, script) for script in scripts}


def code_text(code: CodeBase, script: str) -> str:
    """The text of the file for one script."""
    return json.dumps(code.hashes(f"stages.{script}"), indent=1) + "\n"


def write_code_hashes(root: Path, out: Path) -> None:
    """Writes `out/<stage>.json` for every script of `root/stages` but the one that calls this."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in code_files(root).items():
        (out / name).write_text(text, encoding="utf-8")


def syntax_hash(tree: ast.Module) -> str:
    """SHA-256 of a module's syntax tree, from which it takes the docstrings."""
    return hashlib.sha256(syntax_text(without_strings(tree)).encode()).hexdigest()


def syntax_text(node: Any) -> str:
    """What Python 3.11's `ast.dump` says of a node, under every Python.

    3.12 adds `type_params`, and early releases of it an empty text behind the nested fields of an f-string's format; 3.13 leaves
    out empty lists.
    """
    if isinstance(node, list):
        return f"[{', '.join(map(syntax_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: getattr(node, name, None) for name in node._fields if name != "type_params" or getattr(node, name)}
    if isinstance(node, ast.JoinedStr):
        fields["values"] = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    optional = {name for name, value in fields.items() if value is None and getattr(type(node), name, ...) is None}
    return f"{type(node).__name__}({', '.join(f'{k}={syntax_text(v)}' for k, v in fields.items() if k not in optional)})"


def is_execution_only(name: str) -> bool:
    """Whether module `name` is, or lies below, one of `EXECUTION_ONLY`."""
    return any(name == excluded or name.startswith(f"{excluded}.") for excluded in EXECUTION_ONLY)


def _packages(name: str) -> list[str]:
    """The packages that importing `name` imports first: a.b.c -> a, a.b."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of `tree` in no particular order, bodies of `if TYPE_CHECKING:` left out: no program runs them."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        skipped = node.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in skipped]


def without_strings(tree: ast.Module) -> ast.Module:
    """`tree` without statements that are only a string (docstrings of modules, classes, functions and attributes)."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not _is_string(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_string(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    )
