"""MLflow's pages as a person opens them: `python -m pipeline.tracking.ui` in a workspace, and a tab of headless Chromium."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 120.0
PATIENCE_MS = 30_000


class served:
    """`python -m pipeline.tracking.ui` in a workspace: its address and the first line that it prints."""

    def __init__(self, root: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "pipeline.tracking.ui", "--port", str(self.port), "--workers", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._log = log
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=root, env=environment, stdout=log, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> tuple[str, str]:
        end = time.monotonic() + START_S
        while not self._is_up():
            assert time.monotonic() < end and self._process.poll() is None, self._log.read_text()
            time.sleep(0.2)
        return f"http://127.0.0.1:{self.port}/", self._log.read_text().splitlines()[0]

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """A page of a fresh browser that reaches nothing but the server."""
    from playwright.sync_api import sync_playwright  # of the extra `test`; tests without a browser do without it

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1600, "height": 1000})
        tab.set_default_timeout(PATIENCE_MS)
        tab.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
        tab.route("**/*", lambda route: route.continue_() if route.request.url.startswith(url) else route.abort())
        yield tab
        browser.close()


def pictures(tab: Any, otherwise: Path) -> Callable[[str], None]:
    """Takes a picture of the page as it is, into the folder MLFLOW_PAGES."""
    folder = Path(os.environ.get("MLFLOW_PAGES") or otherwise)

    def take(name: str) -> None:
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(2000)  # charts are drawn after their data has come
        tab.screenshot(path=folder / f"mlflow-{name}.png")

    return take
