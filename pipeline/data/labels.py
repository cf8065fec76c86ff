"""What every room that makes or reads labels has to agree on."""

IGNORED_LABEL = -100
"""Stands where a position is not trained: prompts, tool results, padding."""
