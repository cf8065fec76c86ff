"""Fixtures that several test files share."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # stages are started as `python`

# Tests send these to processes that they start, and "ignored" (nohup, a job in the background) would be inherited.
for signum, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, default)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first: the processes share out whole files, and one that begins last keeps the others waiting."""
    e2e, slow = ({item.path for item in items if item.get_closest_marker(name)} for name in ("e2e", "slow"))
    items.sort(key=lambda item: (item.path not in e2e, item.path not in slow))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository, with data files of other people; for tests marked `wide`."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder `shared` beside the repository")
    return folder
