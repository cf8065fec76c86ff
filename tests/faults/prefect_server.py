"""A real Prefect server on a home of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.mlflow_server import wait_for

from flows.local import is_healthy


@contextmanager
def prefect_server(home: Path, port: int) -> Iterator[dict[str, str]]:
    """Gives the environment that leads to the server, whose process id is in `home`/pid.

    Args:
        home: a folder, made when absent; its `prefect.db` is the server's.
        port: a free one.
    """
    url = f"http://127.0.0.1:{port}/api"
    variables = {"PREFECT_HOME": str(home), "PREFECT_API_URL": url, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    home.mkdir(exist_ok=True)
    with (home / "server.log").open("ab") as log:
        command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
        server = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    (home / "pid").write_text(str(server.pid))
    try:
        wait_for(lambda: is_healthy(url), 120, "the Prefect server")
        yield variables
    finally:
        server.terminate()
        server.wait(60)
