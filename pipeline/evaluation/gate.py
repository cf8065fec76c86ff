"""Which models are worse than the one they started from."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.evaluation.catalogue import METRICS, PARENTS


def regressions(measured: Mapping[str, Mapping[str, float]], metrics: Sequence[str]) -> Iterator[str]:
    """A line per model that is worse than its parent beyond both intervals, with the metrics in which it is.

    Args:
        measured: metrics/eval.json: value, `_low` and `_high` of every metric by model.
        metrics: which to look at. One that a model or its parent lacks says nothing about it.
    """
    for model, parent in PARENTS.items():
        own, other = measured.get(model, {}), measured.get(parent, {})
        worse = [name for name in metrics if name in own and name in other and _is_worse(name, own, other)]
        if worse:
            shown = "; ".join(f"{name} {_estimate(name, own)} against {_estimate(name, other)}" for name in worse)
            yield f"{model} is worse than {parent}: {shown}"


def _is_worse(name: str, own: Mapping[str, float], other: Mapping[str, float]) -> bool:
    _, higher_is_better = METRICS[name]
    if higher_is_better:
        return own[f"{name}_high"] < other[f"{name}_low"]
    return own[f"{name}_low"] > other[f"{name}_high"]


def _estimate(name: str, values: Mapping[str, float]) -> str:
    return f"{values[name]:.3f} [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"
