"""The plan with times: which stages would run, why, and about how long they took the last time."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.lineage.plan import Planned, Verdict
from pipeline.reading.words import duration
from pipeline.tracking.records import past_seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage of the plan and the seconds that it took the last time (None where nobody knows)."""

    planned: Planned
    seconds: float | None


def forecast(plan: Sequence[Planned], home: Path) -> list[Forecast]:
    """The plan with the times of past runs.

    Args:
        plan: of `pipeline.lineage.plan.read_plan`.
        home: where `.runs` is.
    """
    return [Forecast(planned, past_seconds(home, planned.stage)) for planned in plan]


def as_json(forecasts: Sequence[Forecast]) -> str:
    """Everything, for programs."""
    rows = [asdict(each.planned) | {"seconds": each.seconds} for each in forecasts]
    return json.dumps(rows, ensure_ascii=False, allow_nan=False, indent=2)


def as_text(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """A line per stage, further causes below it, and a last line that counts."""
    for each in forecasts:
        stage, verdict, causes = each.planned.stage, each.planned.verdict, each.planned.causes
        time = duration(each.seconds) if each.seconds is not None and verdict in (Verdict.RUNS, Verdict.MAY_RUN) else ""
        yield f"{stage:<16} {verdict:<10} {time:>8}  {causes[0] if causes else ''}".rstrip()
        yield from (f"{'':<38}{cause}" for cause in causes[1:])
    counted = Counter(each.planned.verdict for each in forecasts)
    counts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in Verdict if counted[verdict])
    yield f"\n{counts}{_total(forecasts)}"


def _total(forecasts: Sequence[Forecast]) -> str:
    parts = []
    for verdict, words in ((Verdict.RUNS, "for what runs"), (Verdict.MAY_RUN, "for what may run")):
        chosen = [each for each in forecasts if each.planned.verdict is verdict and each.planned.stage != "code"]
        known = [each.seconds for each in chosen if each.seconds is not None]
        if known:
            unknown = f" and {len(chosen) - len(known)} of unknown length" if len(known) < len(chosen) else ""
            parts.append(f"about {duration(sum(known))}{unknown} {words}")
    return f"; {', '.join(parts)}, as long as it took the last time" if parts else ""
