"""Carries one run's records to MLflow: `python -m pipeline.tracking.feeder RUN_FOLDER`.

A process of its own, started by the trainer and outliving it by seconds, so that training waits for no server. While the trainer
lives it sends what a save has made final; after an orderly end, everything. It then closes the MLflow run with the truth. When
the store stays away it gives up, and `python -m pipeline replay` sends the rest another day.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from pipeline.supervise import exit_on_error, hold, is_held, lasting_stderr
from pipeline.tracking.rebuild import Rebuild
from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.sender import TRACKER_FAULTS, Sender, note
from pipeline.tracking.store import limit_waiting
from pipeline.tracking.system_load import SystemLoad

POLL_S = 1.0
MAX_PAUSE_S = 30.0  # between attempts while the trainer lives and the store does not
LINGER_S = 15.0  # after the end of a stage, for the end of the rebuild: DVC takes over the outputs before it ends
GIVE_UP_S = 20.0  # without a working store, counted from the end of the trainer


def feed(folder: RunFolder) -> int:
    """Sends until the trainer has ended and all has arrived; the exit code is 1 when the store stayed away."""
    sender = Sender(folder)
    load = SystemLoad(folder, read_json(folder.about)["started_s"])
    said, pause, try_at, ended_at = "", POLL_S, 0.0, None
    while True:
        alive = is_held(folder.lock)
        if alive:
            load.sample()
        if not alive or time.monotonic() >= try_at:
            try:
                sender.send(final=not alive)
                if not alive:
                    sender.close(complete=True)
                    return 0
                said, pause = "", POLL_S
            except TRACKER_FAULTS as error:
                if str(error) != said:
                    said = str(error)
                    note(f"not sent: {error}")
                pause = min(2 * pause, MAX_PAUSE_S)
            try_at = time.monotonic() + pause
        if not alive:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > GIVE_UP_S:
                _give_up(sender)
                return 1
        time.sleep(POLL_S)


def _give_up(sender: Sender) -> None:
    """Closes the MLflow run although records are missing there, for which its artifacts need not work."""
    note("gave up; `python -m pipeline replay` sends the rest")
    try:
        sender.close(complete=False)
    except TRACKER_FAULTS as error:
        note(f"not closed: {error}")


def await_rebuild(folder: RunFolder) -> None:
    """Closes the rebuild's run in MLflow if the rebuild ends now; where it goes on, another stage's feeder does."""
    rebuild = Rebuild.of(read_json(folder.about).get("rebuild"))
    if rebuild is None:
        return
    end = time.monotonic() + LINGER_S
    while rebuild.is_alive and time.monotonic() < end:
        time.sleep(POLL_S)
    if not rebuild.is_alive:
        try:
            Sender(folder).close_rebuild()
        except TRACKER_FAULTS as error:
            note(f"rebuild not closed: {error}")


def main() -> int:
    """Feeds the folder named on the command line; a second feeder of the same folder waits for the first."""
    limit_waiting()
    with suppress(OSError):
        os.nice(10)  # never at the cost of training
    folder = RunFolder(Path(sys.argv[1]).resolve())
    # Its log may lie on a full disk, which must not end it.
    with lasting_stderr(), exit_on_error("feeder"):
        with hold(folder.feeder_lock, wait=True):
            code = feed(folder)
        await_rebuild(folder)  # without the lock: the run may be fed again meanwhile
        return code


if __name__ == "__main__":
    sys.exit(main())
