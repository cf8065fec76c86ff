"""The store of a copied or moved folder made its own: MLflow records where artifacts are, and runs which store they are in."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from pipeline.errors import HeldError
from pipeline.supervise import hold, is_held
from pipeline.tracking.records import all_runs
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.store import artifact_folder, artifact_root, moved_from, own_store, store_lock


def relocate(root: Path) -> Iterator[str]:
    """Makes store and run folders name `root` in place of the folder that they were copied or moved from; says what was done.

    Run folders come first: what is interrupted is found, and done, the next time.

    Args:
        root: the repository.

    Raises:
        HeldError: a run is at work.
        sqlite3.Error: the store cannot be written.
    """
    root = root.resolve()
    old = moved_from(root)
    if old is None:
        yield "relocate: the store is this folder's own"
        return
    runs = all_runs(root)
    if busy := next((run for run in runs if is_held(run.lock) or is_held(run.feeder_lock)), None):
        raise HeldError(f"{busy.path.relative_to(root)}: is at work; wait for its end, and relocate again")
    changed = sum([_relocate_run(run, old, root) for run in runs])
    with hold(store_lock(root), wait=True):
        rows = _relocate_store(root, old)
    yield f"relocate: {changed} run folders and {rows} places in mlflow.db name {root} in place of {old}"
    if not artifact_folder(root).exists() and artifact_folder(old).exists():
        yield f"relocate: {artifact_folder(root)} is not there; a copy of {artifact_folder(old)} brings samples of older runs"


def _relocate_run(run: RunFolder, old: Path, root: Path) -> bool:
    names = {own_store(old): own_store(root), str(old): str(root)}
    changed = False
    for path in (run.about, run.feeder_note):
        before = read_json(path)
        after = {key: names.get(value, value) if isinstance(value, str) else value for key, value in before.items()}
        if after != before:
            write_json(path, after)
            changed = True
    return changed


def _relocate_store(root: Path, old: Path) -> int:
    """Replaces the old folder in every text of the store that begins with it, in one transaction; the number of texts."""
    pairs = [(artifact_root(old), artifact_root(root)), (str(old / ".runs"), str(root / ".runs"))]
    total = 0
    with closing(sqlite3.connect(root / "mlflow.db")) as connection, connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")') if _is_text(row[2])]
            for column in columns:
                for before, after in pairs:
                    total += connection.execute(
                        f'UPDATE "{table}" SET "{column}" = ? || substr("{column}", ?) '
                        f'WHERE "{column}" = ? OR substr("{column}", 1, ?) = ?',
                        (after, len(before) + 1, before, len(before) + 1, f"{before}/"),
                    ).rowcount
    return total


def _is_text(kind: str) -> bool:
    return kind.upper().startswith(("VARCHAR", "TEXT", "CLOB", "CHAR"))
