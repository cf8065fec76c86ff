"""Why a stage runs: what differs from the inputs that dvc.lock has for its last result, named as closely as the records allow.

A parameter by its old and new value; code by the module and, where git still has the old one, by the function; a source of data
by its rows (`pipeline.lineage.rows`); everything else by its path.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from configparser import ConfigParser, Error
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.lineage.code_hash import syntax_hash, syntax_text, without_strings
from pipeline.lineage.declaration import read_lock
from pipeline.lineage.git import git, text_at
from pipeline.lineage.history import flat_params
from pipeline.lineage.overrides import shown
from pipeline.lineage.rows import changed_rows

MAX_VERSIONS = 50
"""Of a module in git that are searched for the old code."""
MAX_NAMES = 4
NOTHING = "nothing differs: it was forced, or its outputs were gone"
FIRST = "dvc.lock has no result of it"


def reasons(
    root: Path, home: Path, stage: str, params: Mapping[str, Any], digests: Mapping[str, str], lock_file: str = "dvc.lock"
) -> list[str]:
    """Why `stage` runs now, a line per cause, at least one.

    Args:
        root: the repository, or an isolated copy.
        home: where its `.runs` are.
        stage: its name in dvc.lock.
        params: its parameters as a tree, those of its declaration.
        digests: digest of every input by path, `data/code/<stage>.json` included.
        lock_file: of the last results, below `root`.
    """
    made = read_lock(root / lock_file).get(stage)
    if made is None:
        return [FIRST]
    causes = [*param_causes(made.params, params), *dep_causes(root, home, made.digests, digests)]
    return causes or [NOTHING]


def param_causes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """`grpo.lr 1e-4 → 2e-4` for every leaf that differs; trees and dotted keys may be mixed."""
    old, new = dict(flat_params(before)), dict(flat_params(after))
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in old:
            yield f"{key} (new) → {shown(new[key])}"
        elif key not in new:
            yield f"{key} {shown(old[key])} → (gone)"
        elif _plain(old[key]) != _plain(new[key]):
            yield f"{key} {shown(old[key])} → {shown(new[key])}"


def dep_causes(root: Path, home: Path, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """What differs between two sets of digests by path; where a path is new, or is none of the stage's any more, that."""
    for path, digest in after.items():
        if path not in before:
            yield f"{path} is a new input"
        elif before[path] != digest:
            yield from file_causes(root, home, path, before[path])
    yield from (f"{path} is no input any more" for path in before if path not in after)


def file_causes(root: Path, home: Path, path: str, before: str) -> Iterator[str]:
    """What changed in an input, closer than its path where the old version (of digest `before`) is known."""
    if path.startswith("data/code/"):
        yield from code_causes(root, before, json.loads((root / path).read_text(encoding="utf-8")))
    else:
        yield f"{path} {changed_rows(root / path, home, before) or 'modified'}"


def code_causes(root: Path, before: str, after: Mapping[str, str]) -> Iterator[str]:
    """`pipeline.maths.policy changed: clipped_loss` for every module that differs.

    Args:
        root: the repository.
        before: digest of the old `data/code/<stage>.json`, which DVC's cache may have.
        after: hash by module, the new one.
    """
    try:
        old: dict[str, str] = json.loads(cached_file(root, before).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        yield "code changed"
        return
    for name in [*after, *(name for name in old if name not in after)]:
        if name not in old:
            yield f"{name} is new"
        elif name not in after:
            yield f"{name} is no longer used"
        elif old[name] != after[name]:
            names: list[str] = []
            with suppress(PipelineError):  # git fails: then the module alone is named
                names = _changed_names(root, name, old[name])
            yield f"{name} changed" + (f": {', '.join(names)}" if names else "")


def cache_folder(root: Path) -> Path:
    """DVC's cache, as the repository's configuration says."""
    config = ConfigParser(interpolation=None)  # a folder may have a % in its name
    try:
        config.read([root / ".dvc/config", root / ".dvc/config.local"], encoding="utf-8")
    except (Error, ValueError):  # DVC itself will complain
        return root / ".dvc/cache"
    return (root / ".dvc" / config.get("cache", "dir", fallback="cache")).resolve()


def cached_file(root: Path, digest: str) -> Path:
    """Where DVC's cache has these bytes, if it has them; of a folder its listing."""
    return cache_folder(root) / "files" / "md5" / digest[:2] / digest[2:]


def _changed_names(root: Path, module: str, old_hash: str) -> list[str]:
    """The functions, classes and constants of a module that changed since its version of a hash; none where that is not known."""
    base = root.joinpath(*module.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    if not path.is_file():  # a file that is no module
        return []
    where = path.relative_to(root).as_posix()
    for commit in git(root, "log", "--all", f"--max-count={MAX_VERSIONS}", "--format=%H", "--", where).splitlines():
        try:
            old = ast.parse(text_at(root, commit, where) or "")
        except SyntaxError:
            continue
        if syntax_hash(old) == old_hash:  # removes its docstrings
            before, after = _definitions(old), _definitions(without_strings(ast.parse(path.read_bytes())))
            changed = [name for name in {**after, **before} if before.get(name) != after.get(name)]
            return changed if len(changed) <= MAX_NAMES else [*changed[:MAX_NAMES], f"{len(changed) - MAX_NAMES} more"]
    return []


def _definitions(tree: ast.Module) -> dict[str, str]:
    """Digest by name of what a module defines at its top; methods as `Class.method`, imports and the rest without a name."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inner = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            found |= {f"{node.name}.{child.name}": _dump(child) for child in inner}
            node.body = [child for child in node.body if child not in inner]
            found[node.name] = _dump(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = _dump(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: _dump(node) for target in targets if isinstance(target, ast.Name)}
    return found


def _dump(node: ast.AST) -> str:
    return hashlib.sha256(syntax_text(node).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """As YAML has it, which knows no tuples."""
    return list(value) if isinstance(value, tuple) else value
