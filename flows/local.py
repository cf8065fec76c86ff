"""Prefect on this machine: server, work pool, deployments, automations and worker, until Ctrl-C. What already runs is used.

Server and worker have sessions of their own, so that Ctrl-C or a closed terminal reaches this process alone, which ends the
worker first (its flow runs save, and are started again by the next worker) and then the server. They end with it, too, when
it is killed (Linux).

Whoever may start flow runs may run code. So the server listens on loopback, asks for a password (`flows.access`), answers no page
of another origin (prefect.toml) and no other Host (`flows.server`), and a run cannot bring a command of its own (`job_template`).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from prefect import get_client
from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus
from prefect.context import refresh_global_settings_context
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.utilities.processutils import command_to_string

from flows.access import LOOPBACK, VARIABLE, ensure_password
from flows.automations import ensure_automations
from flows.gpus import set_limit
from pipeline.errors import HeldError, PipelineError
from pipeline.masking import masked
from pipeline.params import load_params
from pipeline.params.schema import Runtime
from pipeline.supervise import follow_parent, hold, signal_name
from pipeline.terminal import bear_any_locale, say, show

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
    bear_any_locale()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda received, _: sys.exit(128 + received))  # leaves through the stacks, as Ctrl-C does
    os.chdir(ROOT)
    try:
        with hold(ROOT / ".runs" / "flows.lock", wait=False):
            ensure_password(ROOT)
            refresh_global_settings_context()  # they were read when Prefect was imported
            return run()
    except HeldError as error:
        show(f"`make flows` runs already in this folder: {error}")
        return 0
    except PipelineError as error:
        say("\n".join(error.lines))
        return error.exit_code
    except subprocess.CalledProcessError as error:
        say(f"`{' '.join(error.cmd[1:5])}` failed with exit code {error.returncode}; what it said stands above")
        return 1
    except KeyboardInterrupt:
        return 130


def run() -> int:
    """Brings everything up, and starts again what is killed; the exit code of a server or worker that ends by itself.

    Raises:
        PipelineError: no server could be started, or that of the address belongs to somebody else or is open to everybody.
    """
    runtime = load_params(ROOT / "params.yaml").runtime
    url = get_current_settings().api.url or ""
    with ExitStack() as stack:
        services = [] if is_healthy(url) else [stack.enter_context(_server(url))]
        _refuse_open_server(url)
        _refuse_other_folder(url)
        _make_pool()
        subprocess.run([*_PREFECT, "deploy", "--all"], check=True, stdout=subprocess.DEVNULL)
        ensure_automations()
        set_limit(gpus := usable_gpus(runtime))
        show(f"{masked(url.removesuffix('/api'))}: ready; in another terminal: prefect deployment run minimind/grpo")
        show(f"Its page asks for the password: what stands behind {VARIABLE}= in .env")
        if gpus is not None:
            show(f"GPUs that flow runs may use at once (runtime.gpus): {gpus}")
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
    if address.hostname not in LOOPBACK or address.port is None:
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
    password = get_current_settings().api.auth_string
    assert password is not None  # `ensure_password`
    secret = {"PREFECT_SERVER_API_AUTH_STRING": password.get_secret_value()}
    start = [sys.executable, "-m", "flows.server", address.hostname, str(address.port)]
    with _Service("server", start, log, secret) as server:
        end = time.monotonic() + START_S
        while not is_healthy(url):
            if server.process.poll() is not None or time.monotonic() > end:
                raise PipelineError(f"{url}: the Prefect server does not start; see {log}")
            time.sleep(0.2)
        yield server


def job_template() -> dict[str, Any]:
    """Of the work pool: every run has this command in this folder; a run or a deployment that brings variables is refused."""
    return {
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
        "job_configuration": {
            # The engine at once: it saves the seconds of a process that would prepare the folder.
            "command": command_to_string([sys.executable, "-m", "prefect.engine"]),
            "working_dir": str(ROOT),
            "stream_output": True,
        },
    }


def _make_pool() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(job_template(), file)
        file.flush()
        create = [*_PREFECT, "work-pool", "create", POOL, "--type", "process", "--overwrite", "--base-job-template", file.name]
        subprocess.run(create, check=True)


def _refuse_open_server(url: str) -> None:
    """On this machine a server without a password is a door for all its users, and for every page in a browser.

    Raises:
        PipelineError: the server answers everybody.
    """
    if (
        urlsplit(url).hostname in LOOPBACK
        and httpx.get(f"{url}/admin/settings", timeout=30).status_code != httpx.codes.UNAUTHORIZED
    ):
        raise PipelineError(
            f"{url}: this Prefect server asks for no password, so that every user and every web page could run code; end it"
        )


def _refuse_other_folder(url: str) -> None:
    """One work pool serves one folder: a second one would take over the deployments of the first.

    Raises:
        PipelineError: another folder's worker is at work on this server, or it has another password.
    """
    own = "or use a server of your own: PREFECT_API_URL=http://127.0.0.1:4201/api make flows"
    with get_client(sync_client=True) as client:
        try:
            pool = client.read_work_pool(POOL)
        except ObjectNotFound:
            return
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.UNAUTHORIZED:
                raise
            raise PipelineError(
                f"{url}: asks for another password than {VARIABLE}, so it is another folder's or user's; end it, {own}"
            ) from None
        online = WorkerFilter(status=WorkerFilterStatus(any_=["ONLINE"]))
        folder = pool.base_job_template.get("job_configuration", {}).get("working_dir")
        if folder == str(ROOT) or not client.read_workers_for_work_pool(POOL, online):
            return
    raise PipelineError(
        f"{url}: serves {folder}, whose worker has been there within the last minutes; end its `make flows`, {own}"
    )


class _Service:
    """A process in a session of its own that ends with the block, and with this process.

    Args:
        name: for messages.
        command: what to run.
        log: gets its output; this terminal when left out.
        secret: variables on top of this process's own.
    """

    def __init__(self, name: str, command: list[str], log: Path | None = None, secret: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._command = command
        self._log = log
        self._environment = {**os.environ, **(secret or {})}
        self._start()

    def _start(self) -> None:
        with ExitStack() as stack:
            output = stack.enter_context(self._log.open("ab")) if self._log else None
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
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
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        say(f"The Prefect {self._name} {end}; starting it again")
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
