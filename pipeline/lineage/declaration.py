"""What dvc.yaml declares for a stage, resolved with the parameters: the one list of its inputs, read instead of repeated."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError, PipelineError
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
    declared, keys = _declared(stage, item, tree, dvc_file)
    deps = [dep for dep in declared if not dep.startswith("data/code/")]
    chosen: dict[str, Any] = {}
    for key in keys:
        _insert(chosen, key.split("."), _at(tree, key.split(".")))
    return Declaration(deps, chosen)


def _declared(stage: str, item: str | None, tree: Mapping[str, Any], dvc_file: Path) -> tuple[list[str], list[str]]:
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


@contextmanager
def undisturbed(stage: str, root: Path) -> Iterator[None]:
    """Refuses what a stage made while its parameters or inputs were edited.

    DVC looks at both again when the command has ended: it would record the new ones with what the old ones made, for good.

    Args:
        stage: its name, such as `encode@dpo`; one that dvc.yaml does not have is nothing to DVC.
        root: the repository.

    Raises:
        PipelineError: a value that dvc.yaml lists, or a file's time or size, is not what it was at the start of the block.
    """
    name, _, item = stage.partition("@")
    dvc_file, params_file = root / "dvc.yaml", root / "params.yaml"
    if not dvc_file.exists() or name not in read_yaml(dvc_file)["stages"]:
        yield
        return

    def look() -> dict[str, Any]:
        tree = read_yaml(params_file) if keys else {}
        return {key: _or_none(tree, key.split(".")) for key in keys} | {dep: list(_stamps(root / dep)) for dep in deps}

    deps, keys = _declared(name, item, read_yaml(params_file) if params_file.exists() else {}, dvc_file)
    before = look()
    yield
    after = look()
    if changed := [what for what in before if before[what] != after[what]]:
        raise PipelineError(
            f"{', '.join(changed)}: changed while the stage ran, and DVC would record the new with what the old made; "
            "put back the old, or give the same command for the new"
        )


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    """Path, time and size of a file, or of all files below a folder."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            yield str(file), file.stat().st_mtime_ns, file.stat().st_size


def is_recorded(stage: str, params: Mapping[str, Any], digests: Mapping[str, str], lock_file: Path = Path("dvc.lock")) -> bool:
    """Whether dvc.lock holds results that `stage` made with these params and input digests."""
    made = read_lock(lock_file).get(stage)
    return made is not None and made.params == params and made.digests.items() >= digests.items()


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
    return _REFERENCE.sub(lambda match: str(_at(names, match[1].split("."))), text)


def _at(tree: Mapping[str, Any], path: list[str]) -> Any:
    value: Any = tree
    for part in path:
        value = value[part]
    return value


def _or_none(tree: Any, path: list[str]) -> Any:
    try:
        return _at(tree, path)
    except (KeyError, TypeError):
        return None


def _insert(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
