"""A comparison in a sentence or two: which side is better, in what, by how much, or why that cannot be said."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from pipeline.lineage.headlines import EVAL_HEADLINES, HEADLINES, JUDGED_BY, Goal
from pipeline.lineage.whence import JUDGE
from pipeline.lineage.yardstick import differing, yardstick
from pipeline.reading.judged import Interval, Judged
from pipeline.reading.lines import listed
from pipeline.reading.noise import Repeats, verdict
from pipeline.reading.sides import Side
from pipeline.reading.words import figure


def labels(number: int) -> list[str]:
    """A, B, C, ..., one per side."""
    return [chr(ord("A") + index) for index in range(number)]


def conclude(sides: Sequence[Side], repeats: Sequence[Repeats | None], judged: Sequence[Judged], index: int, hint: str) -> str:
    """What is to be said of a side against the first.

    Args:
        sides: what is compared.
        repeats: per side, the runs of its recipe with other seeds.
        judged: what `eval` measured of the sides.
        index: of the side.
        hint: how to learn the spread of seeds.
    """
    first, other, label = sides[0], sides[index], labels(len(sides))[index]
    if first.record is not None and first.record == other.record:
        return f"A and {label} are the same run of {first.stage}, {first.place}."
    if first.equals(other):
        return f"A and {label} made the same bytes: {first.place} and {other.place} of {first.stage}."
    goals = HEADLINES.get(first.stage, {}) if first.stage == other.stage else {}
    said = [*_of_runs(goals, sides, repeats, index, hint), *_of_evaluation(sides, judged, index)]
    return (
        " ".join(said) or f"Nothing that says which is better was measured of both A ({first.stage}) and {label} ({other.stage})."
    )


def _of_runs(
    goals: Mapping[str, Goal], sides: Sequence[Side], repeats: Sequence[Repeats | None], index: int, hint: str
) -> Iterator[str]:
    """By the first headline metric of the stage that both measured, against the spread of seeds."""
    first, other, label = repeats[0], repeats[index], labels(len(sides))[index]
    if first is None or other is None:
        return
    key = next((key for key in goals if key in first.values and key in other.values), None)
    if key is None:
        return
    before, after = fmean(first.values[key]), fmean(other.values[key])
    values = f"{label} has {figure(after)} against {figure(before)}"
    if apart := differing(*(yardstick(side.stage, key, side.params, side.inputs) for side in (sides[0], sides[index]))):
        yield _incomparable(key, values, apart)
        return
    if at_work := [name for name, each in zip((label, "A"), (other, first), strict=True) if not each.finished]:
        yield f"{key} does not say yet which is better: {values}, and {' and '.join(at_work)} did not finish."
        return
    better = label if (after > before) == (goals[key] == "max") else "A"
    seeds = f"{len(first.runs) + len(other.runs)} runs"
    match verdict(first, other, key):
        case "same recipe" if first.seeds == other.seeds:
            yield f"A and {label} are one recipe with one seed, run twice: {values} in {key}, by machine, libraries or `runtime`."
        case "same recipe":
            moved = figure(max(first.values[key]) - min(first.values[key]))
            yield f"A and {label} differ by seed alone, which moves {key} by {moved} over {len(first.values[key])} runs."
        case _ if before == after:
            yield f"A and {label} are equal in {key}: {figure(before)}."
        case "outside":
            yield f"{better} is better in {key}: {values}, more than seeds differ ({seeds})."
        case "inside":
            yield f"Neither is better in {key}: {values}, and other seeds differ as much ({seeds})."
        case _:
            yield f"{better} has the better {key}, {values}, but one seed cannot tell: {hint or 'repeat it with others'}."


def _of_evaluation(sides: Sequence[Side], judged: Sequence[Judged], index: int) -> Iterator[str]:
    """By what models of the stage are ranked by, on the held-out panel."""
    label, ranked_by = labels(len(sides))[index], JUDGED_BY.get(sides[0].stage)
    row = next((row for row in judged if row.key == ranked_by), None)
    if row is None or (first := row.values[0]) is None or (other := row.values[index]) is None:
        return
    values = f"{label} has {_shown(other)} against {_shown(first)}"
    better = label if (other.value > first.value) == (EVAL_HEADLINES[row.key] == "max") else "A"
    judges = [side.judge for side in (sides[0], sides[index]) if side.judge is not None]
    if len(judges) == 2 and (apart := differing(*(yardstick(JUDGE, row.key, judge.params, judge.deps) for judge in judges))):
        yield f"On the held-out panel: {_incomparable(row.key, values, apart)}"
    elif row.overlaps[index - 1]:
        yield f"On the held-out panel neither is clearly better in {row.key}: {values}, and the intervals overlap."
    else:
        yield f"On the held-out panel {better} is better in {row.key}: {values}."


def _incomparable(key: str, values: str, apart: Sequence[str]) -> str:
    return f"{key} does not say which is better: {values}, but measured with another {listed(apart)}."


def _shown(interval: Interval) -> str:
    return f"{interval.value:z.3f} [{interval.low:z.3f}, {interval.high:z.3f}]"
