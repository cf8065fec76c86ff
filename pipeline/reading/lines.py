"""What `doctor` prints: one line per thing that was looked at."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.diagnosis.findings import Severity

NAMED = 5
"""Names that a line lists; of more it gives the number."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was looked at, how it is, and, unless it is well, how to mend it."""

    what: str
    severity: Severity
    text: str

    def __str__(self) -> str:
        return f"{self.severity:<8} {self.what:<16} {self.text}"


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
