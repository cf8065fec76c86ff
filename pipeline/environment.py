"""Process environment: no telemetry, no hub access, no spinning. Set before any library of the stack is imported.

A value that the user has set in the shell wins, so `HF_HUB_OFFLINE=0` opts back in.
"""

import os

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that wait sleep: where they spin, one busy neighbour makes a step take ten times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def make_offline() -> None:
    """Sets every variable of `DEFAULTS` that the user has not set."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
