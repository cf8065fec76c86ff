"""What differs between runs: their configuration, what they measured, what they said; and whether seeds differ as much."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.curves import is_clocked
from pipeline.errors import ParamsError
from pipeline.lineage.headlines import HEADLINES
from pipeline.reading.conclusion import conclude, labels
from pipeline.reading.judged import Judged, judge, rank
from pipeline.reading.measured import Measured, measure
from pipeline.reading.noise import Repeats, Spread, Verdict, repeats_of, spread, verdict
from pipeline.reading.samples import Aligned, align
from pipeline.reading.sides import Side, find_sides
from pipeline.reading.tokens import part_by_token


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of the configuration with its value on every side; None where a side does not have it."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric on every side.

    Attributes:
        key: its name.
        values: per side; None where it was not measured.
        spreads: per side, over the seeds of its recipe; None with one seed.
        verdicts: per side after the first, against the first.
    """

    key: str
    values: tuple[Measured | None, ...]
    spreads: tuple[Spread | None, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that is said about the sides.

    Attributes:
        sides: what is compared, the first being what the others are held against.
        repeats: per side, the runs of its recipe with other seeds; None without a run folder.
        config: keys that differ: parameters, inputs, code and library versions.
        metrics: what they measured while they ran: the stage's headlines first, clocked metrics last.
        judged: what `eval` measured, what models of the stage are ranked by first.
        samples: what they said to the same prompts.
        conclusions: a sentence or two per side after the first: which is better, or why that cannot be said.
        hint: how to learn the spread of seeds where it is unknown; else empty.
    """

    sides: Sequence[Side]
    repeats: Sequence[Repeats | None]
    config: Sequence[Difference]
    metrics: Sequence[Metric]
    judged: Sequence[Judged]
    samples: Sequence[Aligned]
    conclusions: Sequence[str]
    hint: str

    @property
    def labels(self) -> list[str]:
        """A, B, C, ..., one per side."""
        return labels(len(self.sides))

    @property
    def equal(self) -> list[str]:
        """The sides that are the first one, or made the same bytes, by label."""
        return [label for label, side in zip(self.labels[1:], self.sides[1:], strict=True) if side.equals(self.sides[0])]


def compare(root: Path, home: Path, names: Sequence[str], stage: str | None = None) -> Comparison:
    """Compares what the names mean; see `find_sides`.

    Raises:
        ParamsError: fewer than two names or more than 26, or a name that means nothing.
    """
    if not 2 <= len(names) <= 26:
        raise ParamsError(f"compare: needs 2 to 26 things to compare, got {len(names)}")
    sides = find_sides(root, home, names, stage)
    repeats = [repeats_of(side.record, home) if side.record else None for side in sides]
    judged, hint = judge(sides), _hint(sides[0], repeats)
    return Comparison(
        sides=sides,
        repeats=repeats,
        config=_config(sides),
        metrics=_metrics(sides, repeats),
        judged=judged,
        samples=align([side.record.samples() if side.record else () for side in sides], part_by_token(root, sides)),
        conclusions=[conclude(sides, repeats, judged, index, hint) for index in range(1, len(sides))],
        hint=hint,
    )


def _config(sides: Sequence[Side]) -> list[Difference]:
    one_stage = all(side.stage == sides[0].stage for side in sides)
    parents = [set(side.upstream or ()) for side in sides]
    tables = [_identity(side, one_stage=one_stage, upstream=set.intersection(*parents)) for side in sides]
    keys = dict.fromkeys(key for table in tables for key in table)
    if not all(side.record for side in sides):  # of the others nobody knows
        keys = {key: None for key in keys if key != "commit" and not key.startswith("version ")}
    rows = [Difference(key, tuple(table.get(key) for table in tables)) for key in keys]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def _identity(side: Side, *, one_stage: bool, upstream: Collection[str]) -> dict[str, Any]:
    """All that decided the result, of the stages before only the parameters `upstream`, which all sides have.

    A stage's own parameters lose its name where stages differ, so that rate stands beside rate.
    """
    prefix = "" if one_stage else f"{side.stage}."
    params = {key.removeprefix(prefix): value for key, value in side.params.items()}
    before = {key: value for key, value in (side.upstream or {}).items() if key in upstream}
    found = {"stage": side.stage} | before | params
    found |= {f"input {path}": md5[:7] for path, md5 in side.inputs.items() if not path.startswith("external/None")}
    tags = side.record.about.get("tags", {}) if side.record else {}
    found |= {key.replace(".", " ", 1): value for key, value in tags.items() if key.startswith("version.")}
    if commit := tags.get("git.commit"):
        found["commit"] = commit[:7] + (" and edits" if tags.get("git.dirty") == "true" else "")
    return found


def _metrics(sides: Sequence[Side], repeats: Sequence[Repeats | None]) -> list[Metric]:
    tables = [measure(side.record) if side.record else {} for side in sides]
    headlines = list(HEADLINES.get(sides[0].stage, {}))
    keys = sorted(
        dict.fromkeys(key for table in tables for key in table), key=lambda key: (rank(key, headlines), is_clocked(key))
    )
    return [
        Metric(
            key,
            tuple(table.get(key) for table in tables),
            tuple(spread(each.values.get(key, [])) if each else None for each in repeats),
            tuple(verdict(repeats[0], other, key) for other in repeats[1:]),
        )
        for key in keys
    ]


def _hint(side: Side, repeats: Sequence[Repeats | None]) -> str:
    if any(each and len(each.runs) > 1 for each in repeats):
        return ""
    key = f"{side.stage}.seed"
    seed = side.params.get(key)
    return f"no repeated seeds, run `dvc exp run -S {key}={seed + 1}`" if isinstance(seed, int) else "no repeated seeds"


def as_json(comparison: Comparison) -> str:
    """The whole comparison as strict JSON."""
    sides = [
        {
            "label": label,
            "given": side.given,
            "run": side.title,
            "place": side.place,
            "stage": side.stage,
            "mlflow": side.record.mlflow_id if side.record else None,
            "seeds": len(repeats.runs) if repeats else 0,
            "notes": list(side.notes),
        }
        for label, side, repeats in zip(comparison.labels, comparison.sides, comparison.repeats, strict=True)
    ]
    found = {
        "sides": sides,
        "config": [asdict(row) for row in comparison.config],
        "metrics": [asdict(row) for row in comparison.metrics],
        "evaluation": [asdict(row) for row in comparison.judged],
        "samples": [asdict(row) for row in comparison.samples],
        "equal": comparison.equal,
        "conclusions": list(comparison.conclusions),
        "hint": comparison.hint,
    }
    return json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2)
