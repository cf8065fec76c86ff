"""Digests of inputs, the same that DVC writes to dvc.lock."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import DataError


def digest(path: Path) -> str:
    """The digest that DVC writes to dvc.lock: md5 of a file, or of a folder's sorted list of (md5, relative path).

    Raises:
        DataError: the path does not exist.
    """
    if path.is_dir():
        files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
        listing = json.dumps([{"md5": digest(file), "relpath": name} for name, file in files])
        return hashlib.md5(listing.encode(), usedforsecurity=False).hexdigest() + ".dir"
    if not path.is_file():
        raise DataError(f"{path}: does not exist, but this stage reads it; `dvc repro` makes what it needs")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def digests(root: Path, inputs: Sequence[str | Path]) -> dict[str, str]:
    """`{path as given: digest}` of every input, relative to `root`."""
    return {Path(path).as_posix(): digest(root / path) for path in inputs}
