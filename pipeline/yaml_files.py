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
        ParamsError: it cannot be read, or is not UTF-8 or not YAML.
    """
    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ParamsError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ParamsError(f"{path}: not readable as YAML: nested too deeply") from None
    # The last three: of a value that does not fit its tag, such as `!!int ten` or the 31st of June.
    except (YAMLError, ValueError, LookupError, OverflowError) as error:
        raise ParamsError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
