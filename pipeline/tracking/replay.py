"""Runs whose records MLflow lacks: finding them, and sending what their feeders could not."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import HeldError, PipelineError
from pipeline.masking import masked
from pipeline.supervise import hold, is_held
from pipeline.tracking.proof import Stores, lacking
from pipeline.tracking.records import all_runs, noted_complete
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.sender import TRACKER_FAULTS, Sender
from pipeline.tracking.store import MovedStoreError, moved, moved_from, own_store, sqlite_file


def send_missing(folders: Sequence[RunFolder], uri: str | None) -> Iterator[str]:
    """Sends what is missing of each run and closes it in MLflow; gives a line per run.

    Args:
        folders: runs; those that are still training, or that their feeders still send, are refused.
        uri: of the store; each run's own when None.

    Raises:
        PipelineError: at the end, with a line per run that could not be sent; equal ones once.
    """
    refused: list[str] = []
    for folder in folders:
        try:
            yield _send(folder, uri)
        except PipelineError as error:
            refused += error.lines
    if refused:
        raise PipelineError(*dict.fromkeys(refused))


def _send(folder: RunFolder, uri: str | None) -> str:
    name = folder.path.relative_to(folder.root)
    with hold(folder.feeder_lock, wait=False):
        if is_held(folder.lock):
            raise HeldError(f"{name}: is still training, and its own feeder sends it")
        sender = Sender(folder, uri)
        if uri is None:
            _check_own(folder, sender.uri)
        try:
            sender.send(final=True)
            missing = lacking(*sender.store(), folder, content=False) if read_json(folder.gone) else None
            status = sender.close(complete=missing is None)
        except TRACKER_FAULTS as error:
            said = str(error).partition("\n")[0]
            raise PipelineError(
                f"{name}: {sender.uri}: failed after {sender.points} points: {said}; mend it and replay again"
            ) from error
    sent = f"{name}: sent {sender.points} points and {sender.rows} samples"
    if missing:
        raise PipelineError(f"{sent}; not complete in {masked(sender.uri)}: {missing}")
    return f"{sent}; {status}, complete in {masked(sender.uri)}"


def _check_own(folder: RunFolder, uri: str) -> None:
    """Sees to it that a run is sent to the store that it names, and that none is made anew where one once was.

    Raises:
        PipelineError: the folder was copied or moved and the run still names the store of the old one, or it has been sent to a
            file that is gone.
    """
    root = folder.root
    if (old := moved_from(root)) is not None and uri == own_store(old):
        raise MovedStoreError(moved(root.resolve(), old))
    file = sqlite_file(uri)
    sent_before = read_json(folder.feeder_note).get("run_id")
    if sent_before and file is not None and not file.exists() and uri != own_store(root):
        raise PipelineError(f"{masked(uri)}: no such file any more; MLFLOW_TRACKING_URI={own_store(root)} names the store here")


def incomplete_runs(root: Path, uri: str | None) -> list[RunFolder]:
    """Runs that have ended and that the store has not wholly, which it is asked for."""
    stores, ended = Stores(root), (folder for folder in all_runs(root) if not is_held(folder.lock))
    return [each for each in ended if not noted_complete(each, uri) or stores.fault(each, content=False, uri=uri)]
