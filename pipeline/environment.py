"""Process environment: no telemetry, no hub access. Set before any library of the stack is imported.

A value that the user has set in the shell wins, so `HF_HUB_OFFLINE=0` opts back in.
"""

import os

OFFLINE = {
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
}


def make_offline() -> None:
    """Sets every variable of `OFFLINE` that the user has not set."""
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
