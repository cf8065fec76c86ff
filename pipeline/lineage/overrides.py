"""Overrides: `grpo.lr=1e-4` in place of an edit of params.yaml."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

from pipeline.errors import ParamsError
from pipeline.params.load import check_files, load_params, parse_params
from pipeline.yaml_files import read_yaml

MAX_SLUG = 60


class _AsWritten(RoundTripRepresenter):
    """Writes null and new lists as params.yaml has them."""


_AsWritten.add_representer(type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null"))
_AsWritten.add_representer(list, lambda self, items: self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True))


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Key to value of texts such as `grpo.lr=1e-4`, sorted by key; values are YAML as in params.yaml. The last of a key wins.

    Raises:
        ParamsError: a text is not of that form.
    """
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
            raise ParamsError(f"override {text!r}: must be KEY=VALUE with a key of params.yaml, such as grpo.lr=1e-4")
        try:
            overrides[key.strip()] = YAML(typ="safe", pure=True).load(value)
        except (YAMLError, ValueError, RecursionError) as error:
            raise ParamsError(f"override {text!r}: the value is not YAML: {' '.join(str(error).split())}") from None
    return dict(sorted(overrides.items()))


def check_overrides(root: Path, overrides: Mapping[str, Any]) -> None:
    """Checks what params.yaml below `root` would be with the overrides.

    Raises:
        ParamsError: one line per fault: an unknown key with the nearest one, a value that is not allowed, an absent file.
    """
    overrides_check(root)(overrides)


def overrides_check(root: Path) -> Callable[[Mapping[str, Any]], None]:
    """As `check_overrides`, for many: params.yaml is read once, which takes longer than all the rest."""
    load_params(root / "params.yaml")  # its own faults are not the overrides'
    tree = read_yaml(root / "params.yaml")

    def check(overrides: Mapping[str, Any]) -> None:
        changed = deepcopy(tree)
        _set_all(changed, overrides)
        check_files(parse_params(changed, "override"), root)

    return check


def write_overrides(path: Path, overrides: Mapping[str, Any]) -> None:
    """Sets the values in the file `path`, whose other lines and comments stay."""
    yaml = YAML()
    yaml.Representer = _AsWritten
    yaml.preserve_quotes = True
    yaml.width = 1000
    tree = yaml.load(path.read_text(encoding="utf-8"))
    _set_all(tree, overrides)
    buffer = io.StringIO()
    yaml.dump(tree, buffer)
    path.write_text(buffer.getvalue(), encoding="utf-8")


def slug(overrides: Mapping[str, Any]) -> str:
    """A short name in letters, digits, dots and dashes, such as `grpo-lr-1e-4`."""
    words = "-".join(f"{key}-{shown(value)}" for key, value in overrides.items())
    points = re.sub(r"\.(?!\d)|(?<!\d)\.", "-", words)  # only those of decimal fractions stay
    return re.sub(r"[^A-Za-z0-9.]+", "-", points)[:MAX_SLUG].strip("-.")


def shown(value: Any) -> str:
    """A value as one writes it: `1e-4`, `true`, `null`."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, float) and value and not 1e-2 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.12e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return str(value)


def _set_all(tree: Any, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        *sections, last = key.split(".")
        place = tree
        for done, section in enumerate(sections, start=1):
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ParamsError(f"override: {key}: {'.'.join(sections[:done])} has no keys below it")
        place[last] = value
