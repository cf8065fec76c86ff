"""What answers the calls of a stage: the tools of a preset, and those of a user's own file with its own checker."""

import json
import math
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import DataError
from pipeline.params.schema import Tools
from pipeline.tools.minimind import minimind_result
from pipeline.tools.registry import ARGUMENT_TYPES, MAX_REASON_CHARS, TOOLS, Tool, ToolResult, call_tool, described, offer_fault
from pipeline.tools.simulated import shown

Check = Callable[[Sequence[str], str], list[bool]]
"""Which of the expected answers a final answer holds: one flag per expected answer, in order."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a stage.

    Attributes:
        preset: whose tools answer calls to anything but the own ones; see `docs/rewards.md`.
        own: tools of the user's file by name; one of a preset's name takes its place.
        own_check: the user's checker; `check_for` says where it applies.
    """

    preset: Literal["default", "minimind"] = "default"
    own: Mapping[str, Tool] = field(default_factory=dict)
    own_check: Check | None = None

    @property
    def tools(self) -> Mapping[str, Tool]:
        """Every tool that may be offered, by name; both presets have the same six."""
        return {**TOOLS, **self.own}

    def call(self, name: str, arguments: Any, offered: Collection[str] | None = None) -> ToolResult:
        """The result of a call, or an error to read; never raises, whatever JSON the model wrote."""
        if self.preset == "minimind" and name not in [*self.own]:
            return minimind_result(name, arguments)
        return call_tool(name, arguments, offered, self.tools)

    def offer_fault(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Why calls that fit these function objects cannot all be answered here, with the tool's name; None where they can."""
        known = {**TOOLS, **self.own}
        for offered in tools:
            name = offered["function"]["name"]
            if name not in known:
                return f"the toolbox has no tool '{shown(name)}', only {', '.join(known)}"
            if fault := offer_fault(offered, known[name].schema):
                return f"tool '{name}' has another schema in the toolbox: {fault}"
        return None

    def check_for(self, offered: Collection[str]) -> Check | None:
        """The user's checker for tasks that offer one of the user's tools; None leaves them to `verify`."""
        return self.own_check if any(name in self.own for name in offered) else None


PRESET_TOOLS = Toolbox()
"""The default preset alone."""


def open_toolbox(params: Tools) -> Toolbox:
    """The toolbox of params; the Python file that `extra` names below external/ is executed.

    Raises:
        DataError: that file cannot be run, imports one that no stage depends on, or what it defines is no list of tools or no
            checker.
    """
    if params.extra is None:
        return Toolbox(params.preset)
    path = Path("external") / params.extra
    before = set(sys.modules)
    try:
        defined = runpy.run_path(str(path))
    except KeyboardInterrupt:  # and the stop signals, which are kinds of it
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary to a user's file: anything may be wrong with it
        raise DataError(f"{path}: cannot be run ({described(error)}); mend it, or write tools.extra: null") from None
    if helper := _imported_helper(sys.modules.keys() - before):
        raise DataError(f"{path}: imports {helper}, whose edits would rerun nothing; write all into the one file")
    tools, check = defined.get("TOOLS"), defined.get("check")
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Tool) for tool in tools):
        raise DataError(
            f"{path}: must define TOOLS, a list of at least one pipeline.tools.registry.Tool(schema=..., function=...)"
        )
    for number, tool in enumerate(tools):
        if fault := _schema_fault(tool):
            raise DataError(f"{path}: TOOLS[{number}]: {fault}")
    own = {tool.name: tool for tool in tools}
    if len(own) < len(tools):
        raise DataError(f"{path}: TOOLS: names must differ, got {', '.join(tool.name for tool in tools)}")
    return Toolbox(params.preset, own, None if check is None else _checked(check, path))


def _imported_helper(names: Iterable[str]) -> Path | None:
    """A file of the repository, but not of `pipeline/`, that one of the modules is from: what the lineage does not know."""
    root, installed = Path.cwd().resolve(), Path(sys.prefix).resolve()
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        found = Path(file).resolve() if file else installed
        if found.is_relative_to(root) and not found.is_relative_to(installed) and not found.is_relative_to(root / "pipeline"):
            return found.relative_to(root)
    return None


def _schema_fault(tool: Tool) -> str | None:
    """What is wrong with a tool of the user's, in one line."""
    function = tool.schema.get("function") if isinstance(tool.schema, Mapping) else None
    if not isinstance(function, Mapping) or not (isinstance(function.get("name"), str) and function["name"]):
        return 'schema must be {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
    name, parameters = function["name"], function.get("parameters", {})
    try:
        json.dumps(tool.schema, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        return f"{function['name']!a}: schema must be JSON, as models are shown it ({error})"
    if not callable(tool.function):
        return f"{name}: function must be callable, got {type(tool.function).__name__}"
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or not all(isinstance(entry, Mapping) for entry in properties.values()):
        return f'{name}: parameters must be {{"type": "object", "properties": {{argument: {{"type": ...}}}}, "required": [...]}}'
    for argument, entry in properties.items():
        if "type" in entry and entry["type"] not in ARGUMENT_TYPES:
            return f"{name}: type of argument '{argument}' must be one of {', '.join(ARGUMENT_TYPES)}, got {entry['type']!r}"
        if not isinstance(entry.get("enum", []), list):
            return f"{name}: enum of argument '{argument}' must be a list, got {entry['enum']!r}"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(argument in [*properties] for argument in required):
        return f"{name}: required must list names of properties, got {required!r}"
    return None


def _checked(check: Any, path: Path) -> Check:
    """The user's checker behind a boundary: where it raises on what a policy wrote, nothing is found.

    What it returns must be flags, always: anything else (a score, NaN, one too few) would be taken for an answer that is there. A
    first call on a harmless text tells a checker that never works from one that meets an odd answer.

    Raises:
        DataError: the first call fails, or any call returns something else.
    """
    try:
        _flags(check(["5"], "a reply"), 1)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        raise DataError(f'{path}: check(["5"], "a reply") must return a list with one bool ({described(error)})') from None

    def safe(gt: Sequence[str], answer: str) -> list[bool]:
        try:
            found = [*check([*gt], answer)]
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - as above
            return [False] * len(gt)
        try:
            return _flags(found, len(gt))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - as above
            call = f"check({[*gt]!r}, {answer[:MAX_REASON_CHARS]!r})"
            raise DataError(f"{path}: {call} must return a bool per expected answer ({described(error)})") from None

    return safe


def _flags(found: Any, expected: int) -> list[bool]:
    flags = [_flag(value) for value in found]
    if len(flags) != expected:
        raise ValueError(f"got {len(flags)} flags for {expected} expected answers")
    return flags


def _flag(value: Any) -> bool:
    """Of a bool, also numpy's, and of 0 and 1."""
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if number not in (0.0, 1.0):
        raise ValueError(f"a {type(value).__name__}{'' if isinstance(value, str | bytes) else f' of {number:g}'} is no flag")
    return number == 1.0
