"""Prefect on this machine: server, work pool, deployments, automations and worker, until Ctrl-C. What already runs is used.

Server and worker have sessions of their own, so that Ctrl-C or a closed terminal reaches this process alone, which ends the
worker first (its flow runs save, and are started again by the next worker) and then the server. They end with it, too, when
it is killed (Linux).
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from prefect import get_client
from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from flows.automations import ensure_automations
from flows.gpus import set_limit
from pipeline.errors import HeldError, PipelineError
from pipeline.params import load_params
from pipeline.params.schema import Runtime
from pipeline.supervise import follow_parent, hold

ROOT = Path(__file__).resolve().parents[1]
POOL = "minimind"
START_S = 120.0
STOP_S = 40.0
POLL_S = 0.5
SETTLED_S = 60.0  # who ends by itself before this has a reason that another start would not remove
_PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def main() -> int:
    """Runs until it is told to stop; its exit code."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda received, _: sys.exit(128 + received))  # leaves through the stacks, as Ctrl-C does
    os.environ |= {"MINIMIND_ROOT": str(ROOT), "MINIMIND_PYTHON": sys.executable}  # prefect.yaml
    os.chdir(ROOT)
    try:
        with hold(ROOT / ".runs" / "flows.lock", wait=False):
            return run()
    except HeldError as error:
        print(f"`make flows` runs already in this folder: {error}")
        return 0
    except PipelineError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run() -> int:
    """Brings everything up, and starts again what is killed; the exit code of a server or worker that ends by itself.

    Raises:
        PipelineError: no server could be started, or that of the address belongs to another folder.
    """
    runtime = load_params(ROOT / "params.yaml").runtime
    url = get_current_settings().api.url or ""
    with ExitStack() as stack:
        services = [] if is_healthy(url) else [stack.enter_context(_server(url))]
        _refuse_other_folder(url)
        subprocess.run([*_PREFECT, "work-pool", "create", POOL, "--type", "process", "--overwrite"], check=True)
        subprocess.run([*_PREFECT, "deploy", "--all"], check=True, stdout=subprocess.DEVNULL)
        ensure_automations()
        set_limit(gpus := usable_gpus(runtime))
        print(f"{url.removesuffix('/api')}: ready; in another terminal: prefect deployment run minimind/grpo", flush=True)
        if gpus is not None:
            print(f"GPUs that flow runs may use at once (runtime.gpus): {gpus}", flush=True)
        worker = _Service("worker", [*_PREFECT, "worker", "start", "--pool", POOL, "--type", "process"])
        services.append(stack.enter_context(worker))
        while True:
            for service in services:
                if (code := service.ended()) is not None:
                    return code
            time.sleep(POLL_S)


def usable_gpus(runtime: Runtime) -> int | None:
    """How many GPUs trainers may use at once, as `runtime.gpus` wants it; None where there is nothing to count."""
    if runtime.gpus != "auto":
        return runtime.gpus
    if runtime.device == "cpu":
        return None
    counted = subprocess.run([sys.executable, "-c", _COUNT_GPUS], stdout=subprocess.PIPE, text=True, check=True)
    return int(counted.stdout) or None


def is_healthy(url: str) -> bool:
    """Whether a Prefect server answers at this API address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.read().strip() == b"true"
    except (urllib.error.URLError, OSError, ValueError):
        return False


@contextmanager
def _server(url: str) -> "Iterator[_Service]":
    """A Prefect server of our own at this address, until the block ends."""
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost", "::1") or address.port is None:
        raise PipelineError(
            f"{url}: no Prefect server answers, and only one on this machine can be started; check PREFECT_API_URL"
        )
    with socket.socket() as probe:
        if probe.connect_ex((address.hostname, address.port)) == 0:
            elsewhere = url.replace(str(address.port), str(address.port + 1))
            raise PipelineError(
                f"{url}: another program uses this port, or a Prefect server that hangs; end it, or PREFECT_API_URL={elsewhere} "
                "make flows"
            )
    log = ROOT / ".runs" / "prefect-server.log"
    start = [*_PREFECT, "server", "start", "--host", address.hostname, "--port", str(address.port)]
    with _Service("server", start, log) as server:
        end = time.monotonic() + START_S
        while not is_healthy(url):
            if server.process.poll() is not None or time.monotonic() > end:
                raise PipelineError(f"{url}: the Prefect server does not start; see {log}")
            time.sleep(0.2)
        yield server


def _refuse_other_folder(url: str) -> None:
    """One work pool serves one folder: a second one would take over the deployments of the first.

    Raises:
        PipelineError: another folder's worker is at work on this server.
    """
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name("minimind/all")
        except ObjectNotFound:
            return
        online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
        folder = deployment.job_variables.get("working_dir")
        if folder in (None, str(ROOT)) or not client.read_workers_for_work_pool(POOL, online):
            return
    raise PipelineError(
        f"{url}: serves {folder}, whose worker has been there within the last minutes; end its `make flows`, or use a server "
        "of your own: PREFECT_API_URL=http://127.0.0.1:4201/api make flows"
    )


class _Service:
    """A process in a session of its own that ends with the block, and with this process.

    Args:
        name: for messages.
        command: what to run.
        log: gets its output; this terminal when left out.
    """

    def __init__(self, name: str, command: list[str], log: Path | None = None) -> None:
        self._name = name
        self._command = command
        self._log = log
        self._start()

    def _start(self) -> None:
        with ExitStack() as stack:
            output = stack.enter_context(self._log.open("ab")) if self._log else None
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_begin_child,
            )
        self._started = time.monotonic()

    def ended(self) -> int | None:
        """The exit code when it ended at once or in order; one that was killed, or gave up after a while, is started again."""
        code = self.process.poll()
        if code is None or code == 0 or (code > 0 and time.monotonic() - self._started < SETTLED_S):
            return code
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"The Prefect {self._name} {end}; starting it again", file=sys.stderr, flush=True)
        self._start()
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _begin_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Prefect stops by it, and "ignored" (a job in the background) is inherited
    follow_parent(signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
