"""Reads YAML files; what params.yaml, dvc.yaml and the world's recipe have in common."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import ParamsError


def read_yaml(path: Path) -> Any:
    """The file's content, read as YAML 1.2 as DVC does (`1e-4` is a number).

    Raises:
        FileNotFoundError: the file is absent.
        ParamsError: it is not UTF-8 or not YAML.
    """
    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ParamsError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
