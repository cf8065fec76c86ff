"""The environment that importing the package sets for the libraries behind it."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "taken"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_openmp_reads_how_threads_wait_and_a_users_choice_wins(given: dict[str, str], taken: str) -> None:
    """OpenMP itself says what it has read, once torch loads it."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", "import pipeline, torch"]
    done = subprocess.run(
        command, env=inherited | {"OMP_DISPLAY_ENV": "TRUE"} | given, capture_output=True, text=True, check=True
    )
    assert f"OMP_WAIT_POLICY = '{taken}'" in done.stderr
