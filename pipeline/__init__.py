"""The library behind the stages. Imports point one way; see docs/architecture.md for the table."""

from pipeline import environment as _environment

_environment.make_offline()
