"""The password of the Prefect server of `make flows`: whoever can read `.env` may start runs, which is its owner.

Prefect reads `.env` of the folder it is started in, so that the worker, flows and every `prefect` command have it, too.
"""

import os
import secrets
from pathlib import Path

from dotenv import dotenv_values

VARIABLE = "PREFECT_API_AUTH_STRING"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def ensure_password(root: Path) -> None:
    """Makes one at the first start, in a file that its owner alone may read; what else stands in `.env` stays.

    Raises:
        OSError: `.env` cannot be written.
    """
    # Opened with its mode: not even for a moment may others read it.
    with open(root / ".env", "a+", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)
        file.seek(0)
        text = file.read()
        file.seek(0)
        if not dotenv_values(stream=file).get(VARIABLE):
            begin = "" if not text or text.endswith("\n") else "\n"
            file.write(
                f"{begin}# Of the Prefect server that `make flows` starts\n{VARIABLE}=minimind:{secrets.token_urlsafe(32)}\n"
            )
