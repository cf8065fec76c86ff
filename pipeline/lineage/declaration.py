"""What dvc.yaml declares for a stage, resolved with the parameters: the one list of its inputs, read instead of repeated."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.params import Params
from pipeline.yaml_files import read_yaml

_REFERENCE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A stage's declared inputs.

    Attributes:
        deps: paths relative to the repository, the stage's code hash left out (the run key has it already).
        params: the values of its `params:` keys, as a tree like that of params.yaml.
    """

    deps: list[str]
    params: dict[str, Any]


def read_again(path: Path) -> Any:
    """As `read_yaml`, from memory while the file has not changed: DVC's files take a while. The content is not to be altered."""
    status = path.stat()
    return _read_once(path.resolve(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read_once(path: Path, changed_ns: int, size: int) -> Any:
    return read_yaml(path)


def declaration(stage: str, params: Params, item: str | None = None, *, dvc_file: Path = Path("dvc.yaml")) -> Declaration:
    """Declared deps and params of `stage`, or of one `item` of a foreach stage.

    Raises:
        KeyError: dvc.yaml has no such stage, or it names a key that params.yaml lacks.
    """
    tree = params.model_dump(mode="json")
    body = read_again(dvc_file)["stages"][stage]
    names: dict[str, Any] = dict(tree)
    if "do" in body:
        body = body["do"]
        names |= {"key": item, "item": tree["data"]["sets"][item] if stage == "data" else item}
    deps = [_resolved(dep, names) for dep in body.get("deps", [])]
    chosen: dict[str, Any] = {}
    for key in body.get("params", []):
        path = _resolved(key, names).split(".")
        _insert(chosen, path, _at(tree, path))
    return Declaration([dep for dep in deps if not dep.startswith("data/code/")], chosen)


def is_recorded(stage: str, params: Mapping[str, Any], digests: Mapping[str, str], lock_file: Path = Path("dvc.lock")) -> bool:
    """Whether dvc.lock holds results that `stage` made with these params and input digests."""
    entry = (read_yaml(lock_file) or {}).get("stages", {}).get(stage, {}) if lock_file.exists() else {}
    return bool(entry) and is_entry_of(entry, params, digests)


def is_entry_of(entry: Mapping[str, Any], params: Mapping[str, Any], digests: Mapping[str, str]) -> bool:
    """Whether a stage's entry in dvc.lock was written for these params and input digests."""
    known = {dep["path"]: dep["md5"] for dep in entry.get("deps", [])}
    recorded: dict[str, Any] = {}
    for key, value in entry.get("params", {}).get("params.yaml", {}).items():
        _insert(recorded, key.split("."), value)
    return recorded == params and known.items() >= digests.items()


def _resolved(text: str, names: Mapping[str, Any]) -> str:
    return _REFERENCE.sub(lambda match: str(_at(names, match[1].split("."))), text)


def _at(tree: Mapping[str, Any], path: list[str]) -> Any:
    value: Any = tree
    for part in path:
        value = value[part]
    return value


def _insert(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
