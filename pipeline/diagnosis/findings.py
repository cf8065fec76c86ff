"""What a check says, and what it measures by."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Worth a look; a run may well end as it should."""
    PROBLEM = "problem"
    """What comes out will not be what was wanted."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where the record shows it: a metric over the steps from `first_step` to `last_step`."""

    key: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a run, in plain words.

    Attributes:
        name: of the check, the same for every run.
        severity: warn or problem.
        sentence: what was seen, with the figures.
        advice: what to change, with the parameter's key.
        evidence: where to look.
    """

    name: str
    severity: Severity
    sentence: str
    advice: str
    evidence: Evidence

    def __str__(self) -> str:
        where = self.evidence
        steps = (
            f"step {where.last_step}" if where.first_step == where.last_step else f"steps {where.first_step}-{where.last_step}"
        )
        return f"{self.name}: {self.sentence} ({where.key}, {steps}); {self.advice}"


@dataclass(frozen=True, slots=True)
class Limit:
    """From where on a figure is a warning, and from where on a problem; None: never.

    Attributes:
        below: whether low figures are the bad ones.
        source: who says so.
    """

    warn: float | None
    problem: float | None
    source: str
    below: bool = False

    def reached(self, figure: float) -> Severity | None:
        """How bad `figure` is; None when it is healthy."""
        sign = -1 if self.below else 1
        for severity, bound in ((Severity.PROBLEM, self.problem), (Severity.WARN, self.warn)):
            if bound is not None and sign * figure >= sign * bound:
                return severity
        return None
