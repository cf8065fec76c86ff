"""What dvc.yaml declares for a stage, resolved with the parameters: the one list of its inputs, read instead of repeated."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


def declaration(stage: str, params: Params, item: str | None = None, *, dvc_file: Path = Path("dvc.yaml")) -> Declaration:
    """Declared deps and params of `stage`, or of one `item` of a foreach stage.

    Raises:
        KeyError: dvc.yaml has no such stage, or it names a key that params.yaml lacks.
    """
    tree = params.model_dump(mode="json")
    body = read_yaml(dvc_file)["stages"][stage]
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
    made = read_lock(lock_file).get(stage)
    return made is not None and made.params == params and made.digests.items() >= digests.items()


@dataclass(frozen=True, slots=True)
class LockedInputs:
    """What the results of a stage in dvc.lock were made with.

    Attributes:
        params: values by key, as a tree like that of params.yaml.
        digests: of the inputs, by path.
    """

    params: dict[str, Any]
    digests: dict[str, str]


def read_lock(lock_file: Path) -> dict[str, LockedInputs]:
    """The stages of a dvc.lock; none where there is no such file, or half of one.

    DVC writes it in place, for a sibling too, and is the one to complain of a broken one.
    """
    try:
        return {stage: _locked(entry) for stage, entry in read_yaml(lock_file)["stages"].items()}
    except (FileNotFoundError, ParamsError, AttributeError, KeyError, TypeError):
        return {}


def _locked(entry: Mapping[str, Any]) -> LockedInputs:
    params: dict[str, Any] = {}
    for key, value in entry.get("params", {}).get("params.yaml", {}).items():
        _insert(params, key.split("."), value)
    return LockedInputs(params, {dep["path"]: dep["md5"] for dep in entry.get("deps", [])})


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
