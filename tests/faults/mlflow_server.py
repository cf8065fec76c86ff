"""A real MLflow server, and what can befall it."""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

START_S = 90.0


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The condition's value once it is true."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s in vain for {what}"
        time.sleep(0.1)
    return value


class MlflowServer:
    """`mlflow server` on SQLite, its database and artifacts in `folder`.

    Args:
        folder: an existing folder.
        port: of the server; `uri` is that of a gate in front of it, at the next port, which can be made to answer nonsense.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.uri = f"http://127.0.0.1:{port + 1}"
        self.answers: Iterator[tuple[int, bytes]] | None = None  # what the gate says to anything; None lets all through
        self._process: subprocess.Popen[bytes] | None = None
        self._gate = ThreadingHTTPServer(("127.0.0.1", port + 1), self._handler())
        threading.Thread(target=self._gate.serve_forever, daemon=True).start()

    def start(self) -> None:
        store = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination",
            f"{self.folder}/artifacts",
        ]
        with (self.folder.parent / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *store, "--port", str(self.port), "--workers", "1"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        wait_for(self._is_healthy, START_S, "the MLflow server")

    def signal(self, signum: int) -> None:
        """To the server and its workers."""
        assert self._process is not None
        os.killpg(self._process.pid, signum)
        if signum == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        self._gate.shutdown()
        self._gate.server_close()
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if server.answers is not None:
                    self.reply(*next(server.answers))
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", server.port)
                try:
                    headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    self.reply(answer.status, answer.read())
                except OSError:  # the server is gone: so is the connection
                    self.close_connection = True
                finally:
                    upstream.close()

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        return Handler


@contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Makes files and folders read-only, for root too. Skips the test where the file system does not know how."""
    assert all(path.exists() for path in paths)
    if subprocess.run(["chattr", "+i", *map(str, paths)], capture_output=True).returncode:
        pytest.skip("chattr +i is not possible here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *map(str, paths)], check=True)
