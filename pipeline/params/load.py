"""Reads and validates `params.yaml`; every fault becomes one line with its dotted path."""

import difflib
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.errors import ParamsError
from pipeline.params.misfits import misfits
from pipeline.params.schema import Params
from pipeline.yaml_files import read_yaml

WEIGHTS = "file or folder"  # what may hold weights


def load_params(path: Path | str = "params.yaml") -> Params:
    """The validated parameters of `path`.

    Raises:
        ParamsError: one line per fault: the dotted path, what was given, what is allowed, the nearest valid name.
    """
    try:
        tree = read_yaml(Path(path))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; `python -m pipeline use micro` writes one") from None
    params = parse_params(tree, str(path))
    check_files(params, Path(path).absolute().parent)
    return params


def parse_params(tree: Any, source: str = "params.yaml") -> Params:
    """As `load_params`, from values already read."""
    if not isinstance(tree, dict):
        raise ParamsError(f"{source}: must be a mapping of sections, got {type(tree).__name__}")
    try:
        params = Params.model_validate(tree)
    except ValidationError as error:
        raise ParamsError(*(f"{source}: {line}" for line in _lines(error.errors()))) from None
    if faults := list(misfits(params)):
        raise ParamsError(*(f"{source}: {line}" for line in faults))
    return params


def check_files(params: Params, root: Path) -> None:
    """Checks that what `init_from`, `external` and `extra` name exists below `root/external`, where DVC hashes it.

    Sources of data may still be absent, as only the stages `data@SET` read them; their names must be possible ones.

    Raises:
        ParamsError: one line per path that leaves external/, is absent, or is a file instead of a folder or the reverse, or
            that the operating system refuses.
    """
    named = {
        "tokenizer.init_from": (params.tokenizer.init_from, "folder"),
        "pretrain.init_from": (params.pretrain.init_from, WEIGHTS),
        "full_sft.init_from": (params.full_sft.init_from, WEIGHTS),
        "reward.external": (params.reward.external, "folder"),
        "tools.extra": (params.tools.extra, "file"),
    }
    faults = [
        fault for key, (given, kind) in named.items() if given is not None for fault in _foreign_faults(given, kind, root, key)
    ]
    for name, entry in params.data.sets:
        try:
            (root / entry.source).exists()
        except OSError as error:
            faults.append(f"data.sets.{name}.source={_shown(entry.source)}: {error.strerror}")
    if faults:
        raise ParamsError(*(f"params.yaml: {fault}" for fault in faults))


def _foreign_faults(given: str, kind: str, root: Path, key: str) -> Iterator[str]:
    path = Path(given)
    target = root / "external" / path
    if given in ("", ".", "None") or path.is_absolute() or ".." in path.parts:
        yield f"{key}={_shown(given)}: must be null or a path relative to external/, without `..`"
        return
    try:
        there = kind != "folder" and target.is_file() or kind != "file" and target.is_dir()
        lacking = _lacking(target) if there and kind == WEIGHTS else []
    except OSError as error:
        yield f"{key}={_shown(given)}: {error.strerror}"
        return
    if not there:
        yield f"{key}={_shown(given)}: no such {kind}: external/{given}; put it there, or write null"
    elif lacking:
        yield (
            f"{key}={_shown(given)}: without {' and '.join(lacking)}; a folder needs model.safetensors, all weights in one file, "
            "and config.json; a single .safetensors file needs the config.json beside it"
        )


def _lacking(weights: Path) -> list[str]:
    """What is missing where weights are a folder as transformers writes it, or a file of one."""
    if weights.is_dir():
        return [name for name in ("model.safetensors", "config.json") if not (weights / name).is_file()]
    beside = weights.with_name("config.json")
    return [] if weights.suffix != ".safetensors" or beside.is_file() else [beside.name]


def _lines(faults: Sequence[Any]) -> Iterator[str]:
    """A line per fault; a key that is missing because its name is misspelt has one only, at the misspelt name."""
    missing = {fault["loc"] for fault in faults if fault["type"] == "missing"}
    meant = {fault["loc"]: _meant(fault["loc"], missing) for fault in faults if fault["type"] == "extra_forbidden"}
    for fault in faults:
        loc, given = fault["loc"], fault["input"]
        path = ".".join(map(str, loc))
        match fault["type"]:
            case "extra_forbidden":
                hint = f"did you mean `{meant[loc]}`?" if meant[loc] else "known here: " + ", ".join(_names_at(loc[:-1]))
                yield f"{path}: unknown key; {hint}"
            case "missing":
                if loc not in [(*extra[:-1], name) for extra, name in meant.items()]:
                    yield f"{path}: missing; params.yaml is complete, there are no defaults (profiles/ has every key)"
            case "value_error":  # of `Section._fits`
                yield from (f"{path}.{line}" for line in str(fault["ctx"]["error"]).splitlines())
            case _:
                yield f"{path}={_shown(given)}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _shown(value: Any) -> str:
    """The value as it was given, cut to 60 characters; a container in short, as YAML's aliases let few lines hold billions."""
    try:
        text = repr(value) if isinstance(value, str | float) else reprlib.repr(value)
    except ValueError:  # more digits than Python writes out
        return "an enormous number"
    return text if len(text) <= 60 else text[:57] + "..."


def _meant(loc: tuple[Any, ...], missing: set[tuple[Any, ...]]) -> str | None:
    """The key that an unknown one was probably meant to be: of the missing ones beside it before those that are there."""
    known = _names_at(loc[:-1])
    absent = [name for name in known if (*loc[:-1], name) in missing]
    near = [match for names in (absent, known) for match in difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5)]
    return near[0] if near else None


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
