"""What goes in: `params.yaml` as frozen, validated values. Imports no torch; loads in a fraction of a second."""

from pipeline.params.load import load_params, parse_params
from pipeline.params.schema import Params

__all__ = ["Params", "load_params", "parse_params"]
