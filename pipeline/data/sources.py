"""Reads a set's source, a JSONL file or a recipe of the embedded world: every fault at once, before anything else runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.data.schema import SET_KINDS, Row, decode_json, normalise
from pipeline.data.world import generate
from pipeline.errors import DataError, ParamsError
from pipeline.yaml_files import read_yaml

MAX_LISTED_FAULTS = 50


def read_source(source: Path, set_name: str) -> list[Row]:
    r"""All rows of a JSONL file, or of a recipe (`.yaml`) of the embedded world, validated and normalised.

    Lines end in `\n` or `\r\n` (MiniMind's own files have both); the last line may lack its end.

    Raises:
        DataError: one line `file:line: reason` per fault (the first 50, then how many more), or no such file, one that cannot be
            read, or no rows.
    """
    try:
        return _read(source, set_name)
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror or error}") from None


def _read(source: Path, set_name: str) -> list[Row]:
    if not source.is_file():
        raise DataError(f"{source}: no such file; data.sets.{set_name}.source must name a JSONL file or a recipe (.yaml)")
    faults: list[str] = []
    rows: list[Row] = []
    values = _recipe_values(source, set_name) if source.suffix == ".yaml" else _file_values(source, faults)
    for line, value in values:
        reasons: list[str] = []
        normalised, moved = normalise(value, SET_KINDS[set_name], reasons)
        faults += (f"{source}:{line}: {reason}" for reason in reasons)
        if not reasons:
            rows.append(Row(line, normalised, moved))
    if faults:
        more = len(faults) - MAX_LISTED_FAULTS
        raise DataError(*faults[:MAX_LISTED_FAULTS], *([f"and {more} more faults in {source}"] if more > 0 else []))
    if not rows:
        raise DataError(f"{source}: holds no rows")
    return rows


def _recipe_values(source: Path, set_name: str) -> Iterator[tuple[int, Any]]:
    try:
        recipe = read_yaml(source)
    except ParamsError as error:
        raise DataError(*error.lines) from None
    if not isinstance(recipe, dict):
        raise DataError(f"{source}: must be a recipe as data/world.yaml, a mapping; got {type(recipe).__name__}")
    return enumerate(generate(set_name, recipe), start=1)


def _file_values(source: Path, faults: list[str]) -> Iterator[tuple[int, Any]]:
    with source.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if line == 1 and raw.startswith(b"\xef\xbb\xbf"):
                faults.append(f"{source}:1: starts with a byte order mark; save the file as UTF-8 without BOM")
                raw = raw[3:]
            try:
                value = _decode_line(raw)
            except ValueError as error:
                truncated = "" if raw.endswith(b"\n") else "truncated last line? "
                faults.append(f"{source}:{line}: {truncated}{error}")
            else:
                yield line, value


def _decode_line(content: bytes) -> Any:
    if not content.strip():
        raise ValueError("empty line")
    if b"\0" in content:
        raise ValueError("NUL byte")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}: {error.reason}") from None
    return decode_json(text)
