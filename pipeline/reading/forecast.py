"""The plan with times: which stages would run, why, and how long they took the last time.

A past time counts only where the work is the same: for what dvc.lock records, as far as all of these agree with it, for the stage
and for every stage before it:

- whole numbers, words and switches among the parameters (layers, epochs, batch sizes, lengths); rates, coefficients and seeds
  decide what comes out, not how long it takes
- the sources: equal, or within a tenth of the size. A recipe of the embedded world must be equal: its size says nothing.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.lineage.causes import FIRST
from pipeline.lineage.history import CODE, PLACEHOLDER, Lock, Made, lock_at
from pipeline.lineage.plan import Planned, Verdict
from pipeline.lineage.runs import run_that_made
from pipeline.reading.words import duration
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import read_json
from pipeline.tracking.usage import SECONDS

NEAR = 0.1
"""By how much of its size a source may have changed."""
UNKNOWN = "no past run"
NEW_TOKENIZER = """\
warning: the tokenizer is trained on the rows of pretrain and full_sft; a new one trains pretrain and all models behind it anew.
To keep the present one: `cp -r data/tokenizer external/tokenizer` and `tokenizer.init_from: tokenizer` (docs/data.md)"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A stage of the plan and the seconds that the same work took the last time (None where nobody knows)."""

    planned: Planned
    seconds: float | None


def forecast(plan: Sequence[Planned], root: Path, home: Path) -> list[Forecast]:
    """The plan with the times of past runs that did the same work.

    Args:
        plan: of `pipeline.lineage.plan.read_plan`, parents first.
        root: the repository.
        home: where `.runs` is.
    """
    lock = lock_at(root, None) or Lock(None, None, {})
    alike: dict[str, bool] = {}
    for planned in plan:
        made = lock.stages.get(planned.stage)
        before = all(alike[name] for name in planned.parents)
        alike[planned.stage] = planned.stage == "code" or (before and made is not None and _same_work(planned, made, lock, root))
    return [Forecast(each, past_seconds(home, lock.stages.get(each.stage)) if alike[each.stage] else None) for each in plan]


def _same_work(planned: Planned, made: Made, lock: Lock, root: Path) -> bool:
    """Whether a stage is going to do what it did for dvc.lock; those before it do."""
    if planned.params.keys() != made.params.keys() or not all(
        _same_amount(key, made.params[key], value) for key, value in planned.params.items()
    ):
        return False
    written = {path for name in planned.parents if name in lock.stages for path in lock.stages[name].outs}
    inputs = {path: md5 for path, md5 in planned.inputs.items() if not path.startswith(CODE) and path != PLACEHOLDER}
    sources = [path for path, md5 in inputs.items() if path not in written and md5 != made.deps.get(path)]
    return inputs.keys() == made.deps.keys() and all(_near(root / path, made.sizes.get(path)) for path in sources)


def _same_amount(key: str, before: Any, now: Any) -> bool:
    return before == now or key.endswith(".seed") or isinstance(before, float) or isinstance(now, float)


def _near(source: Path, before: int | None) -> bool:
    if before is None or source.suffix == ".yaml" or not source.is_file():
        return False
    return abs(source.stat().st_size - before) <= NEAR * before


def past_seconds(home: Path, made: Made | None) -> float | None:
    """How long it took to make something; None where no record is left. A stage without runs leaves the time in its exit.json."""
    if made is None:
        return None
    if (folder := run_that_made(made, home / ".runs")) is not None:
        return Record(folder).seconds
    scratch = home / ".runs" / made.stage
    end = read_json(scratch / "exit.json")
    return end.get("used", {}).get(SECONDS) if end.get("code") == 0 and not any(scratch.glob("*/*/run.json")) else None


def as_json(forecasts: Sequence[Forecast]) -> str:
    """Everything, for programs."""
    shown = ("stage", "verdict", "causes", "parents", "recipe")
    rows = [{name: getattr(each.planned, name) for name in shown} | {"seconds": each.seconds} for each in forecasts]
    return json.dumps(rows, ensure_ascii=False, allow_nan=False, indent=2)


def as_text(forecasts: Sequence[Forecast]) -> Iterator[str]:
    """A line per stage, further causes below it, a line that counts, and what may cost more than it seems."""
    for each in forecasts:
        stage, verdict, causes = each.planned.stage, each.planned.verdict, each.planned.causes
        time = _time(each) if verdict in (Verdict.RUNS, Verdict.MAY_RUN) and stage != "code" else ""
        yield f"{stage:<16} {verdict:<10} {time:>11}  {causes[0] if causes else ''}".rstrip()
        yield from (f"{'':<41}{cause}" for cause in causes[1:])
    counted = Counter(each.planned.verdict for each in forecasts)
    counts = ", ".join(f"{counted[verdict]} {verdict}" for verdict in Verdict if counted[verdict])
    yield f"\n{counts}{_total(forecasts)}"
    if _replaces_tokenizer({each.planned.stage: each.planned for each in forecasts}):
        yield NEW_TOKENIZER


def _replaces_tokenizer(plan: Mapping[str, Planned]) -> bool:
    """Whether a tokenizer that there is may give way to one of other data, and a model that was trained with it."""
    tokenizer, model = plan.get("tokenizer"), plan.get("pretrain")
    return (
        tokenizer is not None
        and tokenizer.verdict in (Verdict.RUNS, Verdict.MAY_RUN)
        and tokenizer.causes != [FIRST]
        and tokenizer.params.get("tokenizer.init_from") is None
        and model is not None
        and model.verdict in (Verdict.RUNS, Verdict.MAY_RUN)
        and model.causes != [FIRST]
    )


def _time(forecast: Forecast) -> str:
    return UNKNOWN if forecast.seconds is None else duration(forecast.seconds)


def _total(forecasts: Sequence[Forecast]) -> str:
    parts = []
    for verdict, words in ((Verdict.RUNS, "for what runs"), (Verdict.MAY_RUN, "for what may run")):
        chosen = [each for each in forecasts if each.planned.verdict is verdict and each.planned.stage != "code"]
        known = [each.seconds for each in chosen if each.seconds is not None]
        if known:
            unknown = f" and {len(chosen) - len(known)} of unknown length" if len(known) < len(chosen) else ""
            parts.append(f"about {duration(sum(known))}{unknown} {words}")
    return f"; {', '.join(parts)}, as long as it took the last time" if parts else ""
