"""The Prefect server of `make flows`: `python -m flows.server HOST PORT`.

`prefect server start` answers a browser under any name that leads to this machine, and so a page that has made its own name lead
here (DNS rebinding). This is the same app behind a check of the Host header; password and origins are Prefect's own settings.
"""

import sys

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from flows.access import LOOPBACK


def guarded_app() -> ASGIApp:
    """Prefect's app, for requests to this machine's own names alone.

    The check lies around the app, not in it: the server's own services call the app without a network, under a name of their own.
    """
    return TrustedHostMiddleware(create_app(final=True), allowed_hosts=[*LOOPBACK, "[::1]"], www_redirect=False)


def main(host: str, port: int) -> None:
    """Serves until it is told to stop."""
    settings = get_current_settings().server
    keep_alive_s, level = settings.api.keepalive_timeout, settings.logging_level.lower()
    uvicorn.run(guarded_app(), host=host, port=port, timeout_keep_alive=keep_alive_s, log_level=level)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
