"""Which models are worse than the one they started from, and what cannot tell."""

import math
from collections.abc import Iterator, Mapping, Sequence

from pipeline.evaluation.catalogue import METRICS, PARENTS

FEWEST_ROWS = 20
"""Of fewer, the interval of a share near a half is wider than 0.4, and a bootstrap's is too narrow: neither proves anything."""

Measured = Mapping[str, Mapping[str, float]]
"""metrics/eval.json: value, `_low`, `_high` and `_n` of every metric by model."""


def regressions(measured: Measured, metrics: Sequence[str]) -> Iterator[str]:
    """A line per model that is worse than its parent beyond both intervals, with the metrics in which it is.

    Args:
        measured: metrics/eval.json.
        metrics: which to look at. One that a model or its parent lacks, or has too few rows of, says nothing about it.
    """
    for model, parent in PARENTS.items():
        own, other = measured.get(model, {}), measured.get(parent, {})
        worse = [name for name in metrics if _rows(name, own, other) >= FEWEST_ROWS and _is_worse(name, own, other)]
        if worse:
            shown = "; ".join(f"{name} {_estimate(name, own)} against {_estimate(name, other)}" for name in worse)
            yield f"{model} is worse than {parent}: {shown}"


def unproven(measured: Measured, metrics: Sequence[str]) -> Iterator[str]:
    """A line per metric that proves nothing about some model, or about any: too few rows, or none."""
    pairs = [(model, measured.get(model, {}), measured.get(parent, {})) for model, parent in PARENTS.items()]
    for name in metrics:
        rows = {model: n for model, own, other in pairs if (n := _rows(name, own, other))}
        few = [model for model, n in rows.items() if n < FEWEST_ROWS]
        if not rows:
            yield f"{name} proves nothing: no model and its parent were measured by it"
        elif few:
            counts = " to ".join(f"{n:.0f}" for n in sorted({bound(rows[model] for model in few) for bound in (min, max)}))
            seen = f"measured on {counts} rows, at least {FEWEST_ROWS} are needed"
            yield f"{name} proves nothing about {', '.join(few)}: {seen}; raise eval.panel_rows or hold out more rows"


def _rows(name: str, own: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Rows that both were measured on; 0 where one was not."""
    return min(own[f"{name}_n"], other[f"{name}_n"]) if name in own and name in other else 0.0


def _is_worse(name: str, own: Mapping[str, float], other: Mapping[str, float]) -> bool:
    _, higher_is_better = METRICS[name]
    if not all(math.isfinite(own[f"{name}{bound}"]) for bound in ("", "_low", "_high")):
        return True
    if higher_is_better:
        return own[f"{name}_high"] < other[f"{name}_low"]
    return own[f"{name}_low"] > other[f"{name}_high"]


def _estimate(name: str, values: Mapping[str, float]) -> str:
    return f"{values[name]:.3f} [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"
