"""Prefect on this machine: server, work pool, deployments and worker, until Ctrl-C. What already runs is used as it is."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from prefect.settings import get_current_settings

ROOT = Path(__file__).resolve().parents[1]
POOL = "minimind"
START_S = 120.0
STOP_S = 40.0
_PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def main() -> int:
    """Runs until the worker ends; its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves through the stack, as Ctrl-C does
    os.environ["MINIMIND_ROOT"] = str(ROOT)
    os.chdir(ROOT)
    url = get_current_settings().api.url or ""
    with ExitStack() as stack:
        if not is_healthy(url):
            (ROOT / ".runs").mkdir(exist_ok=True)
            log = stack.enter_context((ROOT / ".runs" / "prefect-server.log").open("ab"))
            server = subprocess.Popen([*_PREFECT, "server", "start"], stdout=log, stderr=log)
            stack.callback(_end, server)
            if not _becomes_healthy(url, server):
                print(f"{url}: the Prefect server does not answer; see {log.name}", file=sys.stderr)
                return 1
        subprocess.run([*_PREFECT, "work-pool", "create", POOL, "--type", "process", "--overwrite"], check=True)
        subprocess.run([*_PREFECT, "deploy", "--all"], check=True, stdout=subprocess.DEVNULL)
        print(f"{url.removesuffix('/api')}: ready; in another terminal: prefect deployment run minimind/grpo", flush=True)
        worker = subprocess.Popen([*_PREFECT, "worker", "start", "--pool", POOL, "--type", "process"])
        stack.callback(_end, worker)
        try:
            return worker.wait()
        except KeyboardInterrupt:
            return 130


def is_healthy(url: str) -> bool:
    """Whether a Prefect server answers at this API address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _becomes_healthy(url: str, server: "subprocess.Popen[bytes]") -> bool:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        if is_healthy(url):
            return True
        time.sleep(0.5)
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    raise SystemExit(main())
