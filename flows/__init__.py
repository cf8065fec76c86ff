"""Prefect flows: when and where stages run, and what is tried again. Never imports torch."""
