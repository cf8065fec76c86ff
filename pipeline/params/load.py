"""Reads and validates `params.yaml`; every fault becomes one line with its dotted path."""

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import ParamsError
from pipeline.params.schema import Params


def read_yaml(path: Path) -> Any:
    """The file's content, read as YAML 1.2 as DVC does (`1e-4` is a number).

    Raises:
        ParamsError: the file is absent, not UTF-8, or not YAML.
    """
    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; `python -m pipeline use micro` writes one") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None


def load_params(path: Path | str = "params.yaml") -> Params:
    """The validated parameters of `path`.

    Raises:
        ParamsError: one line per fault: the dotted path, what was given, what is allowed, the nearest valid name.
    """
    params = parse_params(read_yaml(Path(path)), str(path))
    check_files(params, Path(path).absolute().parent)
    return params


def parse_params(tree: Any, source: str = "params.yaml") -> Params:
    """As `load_params`, from values already read."""
    if not isinstance(tree, dict):
        raise ParamsError(f"{source}: must be a mapping of sections, got {type(tree).__name__}")
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        raise ParamsError(*(f"{source}: {_line(fault)}" for fault in error.errors())) from None


def check_files(params: Params, root: Path) -> None:
    """Checks that what `init_from` and `external` name exists below `root/external`, where DVC hashes it.

    Raises:
        ParamsError: one line per path that leaves external/, is absent, or is a file instead of a folder or the reverse.
    """
    named = {
        "tokenizer.init_from": (params.tokenizer.init_from, "folder"),
        "pretrain.init_from": (params.pretrain.init_from, "file"),
        "full_sft.init_from": (params.full_sft.init_from, "file"),
        "reward.external": (params.reward.external, "folder"),
    }
    faults = []
    for key, (given, kind) in named.items():
        if given is None:
            continue
        path = Path(given)
        target = root / "external" / path
        if given in ("", ".", "None") or path.is_absolute() or ".." in path.parts:
            faults.append(f"{key}={given!r}: must be null or a path relative to external/, without `..`")
        elif not (target.is_file() if kind == "file" else target.is_dir()):
            faults.append(f"{key}={given!r}: no such {kind}: external/{given}; put it there, or write null")
    if faults:
        raise ParamsError(*(f"params.yaml: {fault}" for fault in faults))


def _line(fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    kind, given = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        known = _names_at(fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else "known here: " + ", ".join(known)
        return f"{path}: unknown key; {hint}"
    if kind == "missing":
        return f"{path}: missing; params.yaml is complete, there are no defaults (profiles/ has every key)"
    if kind == "value_error":
        return f"{path}.{fault['ctx']['error']}" if path else str(fault["ctx"]["error"])
    shown = repr(given) if len(repr(given)) <= 60 else repr(given)[:57] + "..."
    return f"{path}={shown}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _names_at(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Params
    for part in loc:
        field = model.model_fields.get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)
