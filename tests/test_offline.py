"""Nothing is announced or sent home, and no package index is spelled out."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTICE = "anonymous usage data"


@pytest.mark.slow
@pytest.mark.parametrize("start", ["import site; site.addsitedir('deploy'); import prefect", "import flows.automations"])
def test_prefect_announces_no_telemetry_in_a_terminal(start: str, tmp_path: Path) -> None:
    """The first is how `make` prepares every Python of `.venv`, and so the user's own `prefect` commands."""
    terminal, inside = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path), "TERM": "xterm"}
    command = [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {start}; print('over')"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=inside, stdout=inside, stderr=inside):
        os.close(inside)
        said = b""
        while b"over" not in said and (more := os.read(terminal, 1 << 16)):
            said += more
    os.close(terminal)
    assert NOTICE not in said.decode()


def test_make_puts_the_switch_where_every_python_reads_it() -> None:
    assert re.search(r"^\tcp .*deploy/do_not_track.pth .*purelib", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "ENV DO_NOT_TRACK=1" in (ROOT / "Dockerfile").read_text()


def test_no_package_index_is_spelled_out() -> None:
    """Where packages come from is for pip's own configuration to say."""
    spelled = re.compile(r"(?:index[-_]url|_INDEX)\s*[ =]\s*[\"']?\w+://", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    texts = {name: (ROOT / name).read_bytes().decode(errors="replace") for name in listed if name and (ROOT / name).is_file()}
    assert not [name for name, text in texts.items() if spelled.search(text)]
