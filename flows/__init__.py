"""Prefect flows: when and where stages run, and what is tried again. Never imports torch."""

import pipeline as _switches  # noqa: F401  # telemetry is off before Prefect is imported
