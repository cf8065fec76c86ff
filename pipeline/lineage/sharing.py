"""Workspaces of one home share results: what one of them runs, another one with the same recipe waits for."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.supervise import hold_unless
from pipeline.tracking.home import home


@contextmanager
def sole_runner(
    root: Path, stage: str, recipe: str | None, environment: Mapping[str, str], stop: threading.Event
) -> Iterator[None]:
    """Waits while another workspace runs this recipe of the stage; DVC's run cache has the result afterwards.

    Args:
        root: the repository, or an isolated copy.
        stage: its name.
        recipe: as in the plan; None for one that nobody waits for.
        environment: variables of the stage on top of this process's own.
        stop: when set, the waiting ends.
    """
    if recipe is None:
        yield
        return
    runs = home(root, {**os.environ, **environment}) / ".runs"
    with hold_unless(stop, runs / "recipes" / f"{stage}-{recipe}.lock"):
        yield
