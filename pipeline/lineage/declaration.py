"""What dvc.yaml declares for a stage, resolved with the parameters: the one list of its inputs, read instead of repeated."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError
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
    declared, keys = declared_names(stage, item, tree, dvc_file)
    deps = [dep for dep in declared if not dep.startswith("data/code/")]
    chosen: dict[str, Any] = {}
    for key in keys:
        _insert(chosen, key.split("."), value_at(tree, key.split(".")))
    return Declaration(deps, chosen)


def declared_names(stage: str, item: str | None, tree: Mapping[str, Any], dvc_file: Path) -> tuple[list[str], list[str]]:
    """Its deps and the keys of its params, resolved with the values of params.yaml."""
    body = read_again(dvc_file)["stages"][stage]
    names: dict[str, Any] = dict(tree)
    if "do" in body:
        body = body["do"]
        names |= {"key": item, "item": tree["data"]["sets"][item] if stage == "data" else item}
    deps, keys = ([_resolved(text, names) for text in body.get(kind, [])] for kind in ("deps", "params"))
    return deps, keys


def outputs_of(stage: str, dvc_file: Path = Path("dvc.yaml")) -> list[str]:
    """Paths of what a stage writes, metrics and plots included; none of a stage that dvc.yaml does not have."""
    body = read_again(dvc_file)["stages"].get(stage, {}) if dvc_file.exists() else {}
    entries = [entry for kind in ("outs", "metrics", "plots") for entry in body.get(kind, [])]
    return [path for entry in entries for path in (entry if isinstance(entry, Mapping) else [entry])]


def is_recorded(stage: str, params: Mapping[str, Any], digests: Mapping[str, str], lock_file: Path = Path("dvc.lock")) -> bool:
    """Whether dvc.lock holds results that `stage` made with these params and input digests."""
    made = read_lock(lock_file).get(stage)
    return made is not None and made.params == params and made.digests == digests


@dataclass(frozen=True, slots=True)
class Locked:
    """What dvc.lock has of a stage.

    Attributes:
        params: values by key, as a tree like that of params.yaml.
        digests: of the inputs, by path.
        outs: digests of the outputs, by path.
    """

    params: dict[str, Any]
    digests: dict[str, str]
    outs: dict[str, str]


def read_lock(lock_file: Path) -> dict[str, Locked]:
    """The stages of a dvc.lock; none where there is no such file, or half of one.

    DVC writes it in place, for a sibling too, and is the one to complain of a broken one.
    """
    try:
        return {stage: _locked(entry) for stage, entry in read_again(lock_file)["stages"].items()}
    except (OSError, ParamsError, AttributeError, KeyError, TypeError):
        return {}


def _locked(entry: Mapping[str, Any]) -> Locked:
    params: dict[str, Any] = {}
    for key, value in entry.get("params", {}).get("params.yaml", {}).items():
        _insert(params, key.split("."), value)
    digests, outs = ({each["path"]: each["md5"] for each in entry.get(kind, [])} for kind in ("deps", "outs"))
    return Locked(params, digests, outs)


def _resolved(text: str, names: Mapping[str, Any]) -> str:
    return _REFERENCE.sub(lambda match: str(value_at(names, match[1].split("."))), text)


def value_at(tree: Mapping[str, Any], path: list[str]) -> Any:
    """The value below a key's parts; KeyError or TypeError where there is none."""
    value: Any = tree
    for part in path:
        value = value[part]
    return value


def _insert(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
