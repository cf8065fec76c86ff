"""The checks beside a run that lives: fed with every step, they cost next to nothing."""

import math
from collections.abc import Mapping
from typing import Any

from pipeline.diagnosis.checks import diagnose, keys_read
from pipeline.diagnosis.findings import Finding, Severity
from pipeline.diagnosis.signals import Signals
from pipeline.tracking.records import Series

EVERY = 10
"""Steps from one look to the next."""
GROWTH = 0.05
"""Of the steps so far, where that is more: a look reads whole series, so all looks together cost as much as a few tens."""


class Guard:
    """Looks at a run while it trains. It reads and never decides a value.

    Args:
        stage: the run's stage.
        params: what decides its result, by section.
        before: what it measured before this process, up to the save that it goes on from.

    Attributes:
        problem: the first finding that is a problem.
    """

    def __init__(self, stage: str, params: Mapping[str, Any], before: Mapping[str, Series]) -> None:
        self.problem: Finding | None = None
        keys = set(keys_read(stage))
        self._prefixes = tuple(key for key in keys if key.endswith("/"))
        self._keys = keys.difference(self._prefixes)
        self._series = {key: series for key, series in before.items() if self._reads(key)}
        self._signals = Signals(stage, params, self._series, ended=False)
        self._next = EVERY
        self._said: set[tuple[str, Severity]] = set()

    def follow(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Takes the metrics of a step; gives what was found for the first time, or has become worse, if it is time to look."""
        for key, value in metrics.items():
            if self._reads(key) and math.isfinite(value):
                series = self._series.setdefault(key, Series())
                series.steps.append(step)
                series.values.append(float(value))
        if step < self._next:
            return []
        self._next = step + max(EVERY, int(step * GROWTH))
        found = diagnose(self._signals)
        new = [finding for finding in found if (finding.name, finding.severity) not in self._said]
        self._said |= {(finding.name, finding.severity) for finding in new}
        self.problem = self.problem or next((finding for finding in new if finding.severity is Severity.PROBLEM), None)
        return new

    def _reads(self, key: str) -> bool:
        return key in self._keys or key.startswith(self._prefixes)
