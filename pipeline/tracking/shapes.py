"""What the files of a run folder may hold, and those with final metrics.

Anybody can edit these files, and disks flip bits. What is read here has the types that its readers count on: a file, or a line of
one, that has others counts as damaged. Keys may be missing, and others may be there.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn, Required

from annotated_types import Interval
from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from pipeline.errors import DataError

_STRICT = with_config(ConfigDict(strict=True))
_Count = Annotated[int, Interval(ge=0, le=2**53)]
"""What JSON readers in any language take for a whole number."""


@_STRICT
class _Rebuild(TypedDict, total=False):
    started_s: FiniteFloat


@_STRICT
class _About(TypedDict, total=False):
    """run.json."""

    stage: str
    name: str
    uid: str
    attempt: _Count
    started_s: FiniteFloat
    attempt_s: FiniteFloat
    spent: dict[str, FiniteFloat]
    why: list[str]
    tracking_uri: str
    params: dict[str, dict[str, Any]]
    tags: dict[str, str]
    rebuild: _Rebuild | None
    params_file: str | None


@_STRICT
class _Progress(TypedDict):
    """progress.json."""

    total: _Count
    done: _Count
    began_s: FiniteFloat


@_STRICT
class _End(TypedDict, total=False):
    """exit.json."""

    code: Required[int]
    reason: str
    time_s: FiniteFloat
    used: dict[str, FiniteFloat]
    outputs: dict[str, str]
    metrics_bytes: _Count


@_STRICT
class _Note(TypedDict, total=False):
    """feeder.json."""

    run_id: str
    tracking_uri: str
    complete: _Count | None


@_STRICT
class _Gone(TypedDict):
    """gone.json."""

    step: _Count
    tracking_uri: str


@_STRICT
class _Step(TypedDict):
    """A line of metrics.jsonl or system.jsonl."""

    step: _Count
    time_s: FiniteFloat
    metrics: dict[str, FiniteFloat | None]


@_STRICT
class _Sample(TypedDict, total=False):
    """A line of samples.jsonl."""

    step: Required[_Count]
    model: str
    task: str
    prompt: str
    completion: str


_OBJECTS: dict[str, TypeAdapter[Any]] = {
    "run.json": TypeAdapter(_About),
    "progress.json": TypeAdapter(_Progress),
    "exit.json": TypeAdapter(_End),
    "feeder.json": TypeAdapter(_Note),
    "eval.json": TypeAdapter(Annotated[dict[str, dict[str, FiniteFloat]], ConfigDict(strict=True)]),
    "gone.json": TypeAdapter(_Gone),
    "guard.json": TypeAdapter(Annotated[dict[str, str], ConfigDict(strict=True)]),
}
_METRICS: TypeAdapter[dict[str, Any]] = TypeAdapter(
    Annotated[dict[str, FiniteFloat | dict[str, FiniteFloat]], ConfigDict(strict=True)]
)
_STEP: TypeAdapter[Any] = TypeAdapter(_Step)
_SAMPLE: TypeAdapter[Any] = TypeAdapter(_Sample)


def loads(text: str | bytes) -> Any:
    """Strict JSON: no NaN, no infinity and no number that becomes one.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def parse_metrics(text: str, source: object) -> dict[str, Any]:
    """What a metrics file holds: numbers by name, or by model and name.

    Args:
        text: of the file.
        source: what a fault is said to be of.

    Raises:
        DataError: it is none.
    """
    try:
        _METRICS.validate_python(value := loads(text))
    except ValidationError as error:
        raise DataError(f"{source}: no metrics: {_first_fault(error)}; `dvc checkout` or git brings it back") from None
    except ValueError as error:
        raise DataError(f"{source}: not JSON: {error}; `dvc checkout` or git brings it back") from None
    return dict(value)


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def fault_of_object(name: str, value: dict[str, Any]) -> str | None:
    """What in the file of this name has not the type that its readers count on; None for a file without a shape of its own."""
    shape = _OBJECTS.get(name)
    try:
        if shape is not None:
            shape.validate_python(value)
    except ValidationError as error:
        return _first_fault(error)
    return None


def read_steps(path: Path, start: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """The undamaged lines of metrics.jsonl or system.jsonl: `step`, `time_s`, `metrics`.

    Args:
        path: the file; nothing comes of one that is not there or cannot be read.
        start: where in it to begin, in bytes.
        end: where to stop: a line that reaches beyond it, or has no end, is left out. None for all there is.
    """
    return _read(path, start, end, _STEP)


def read_samples(path: Path, start: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
    """The same of samples.jsonl: `step` first, then whatever a row holds."""
    return _read(path, start, end, _SAMPLE)


def _read(path: Path, start: int, end: int | None, shape: TypeAdapter[Any]) -> Iterator[dict[str, Any]]:
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        while line := file.readline(-1 if end is None else max(0, end - file.tell())):
            if end is None or line.endswith(b"\n"):
                with suppress(ValueError):  # of pydantic's, too
                    value = loads(line)
                    shape.validate_python(value)
                    yield value
