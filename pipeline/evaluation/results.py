"""From row values to estimates and verdicts, and the scratch cache that lets only changed models be measured again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from pipeline.checkpoint.files import write_atomically
from pipeline.evaluation.catalogue import BASELINE, METRICS, PARENTS, RULES
from pipeline.evaluation.panel import BY_LENGTH, Examination, RowValues
from pipeline.evaluation.statistics import Estimate, Verdict, mean, proportion, ratio, verdict


def estimates_of(values: RowValues, confidence: float) -> dict[str, Estimate]:
    """Estimates by metric: 0/1 rows as proportions, `bits` over `bytes` as a ratio, everything else as a mean."""
    estimates = {}
    for name, rows in values.items():
        if not rows or name == "bytes" or BASELINE in name:
            continue
        if name == "bits":
            estimates["bits_per_byte"] = ratio(rows, values["bytes"], confidence)
        elif name.startswith("reward_"):
            estimates[name] = mean(rows, confidence)
        else:
            estimates[name] = proportion([row == 1.0 for row in rows], confidence)
    return estimates


def chance_of(measured: Mapping[str, RowValues]) -> dict[str, str]:
    """By metric, what is earned without a model, in words; baselines are the same for all models."""
    baselines = {name: rows for values in measured.values() for name, rows in values.items() if BASELINE in name and rows}
    said: dict[str, list[str]] = {}
    for name, rows in baselines.items():
        metric, _, rule = name.rpartition(BASELINE)
        share = sum(rows) / len(rows)
        found = _by_length(share) if name == BY_LENGTH else [f"{share:.3f} {RULES[rule]}"]
        for own in (metric, f"{metric}_greedy"):
            said.setdefault(own, []).extend(found)
    return {metric: "; ".join(found) for metric, found in said.items()}


def _by_length(share: float) -> list[str]:
    """The same of pairs, where `share` of the chosen answers are the shorter ones."""
    rule = "shorter" if share >= 0.5 else "longer"
    return [f"{max(share, 1 - share):.3f} {RULES['length']} (always the {rule})", "0.500 by position", "0 by equal scores"]


def verdicts_of(measured: Mapping[str, RowValues], confidence: float) -> dict[str, dict[str, Verdict]]:
    """For every model with a measured parent, the paired verdict on each metric that both have."""
    verdicts: dict[str, dict[str, Verdict]] = {}
    for model, parent in PARENTS.items():
        if model not in measured or parent not in measured:
            continue
        verdicts[model] = {}
        for name, (_, higher_is_better) in METRICS.items():
            rows = "bits" if name == "bits_per_byte" else name  # bytes are the same rows for both
            if measured[model].get(rows) and measured[parent].get(rows):
                verdicts[model][name] = verdict(
                    measured[model][rows], measured[parent][rows], confidence, higher_is_better=higher_is_better
                )
    return verdicts


def cached(folder: Path, identity: str, measure: Callable[[], Examination]) -> Examination:
    """What is stored for `identity` (everything that decides it), or newly measured and stored.

    A torn, rotten or foreign file counts as absent. Any number of processes may use the folder at once.
    """
    path = folder / f"{sha256(identity.encode()).hexdigest()[:32]}.json"
    try:
        checksum, _, stored = path.read_text(encoding="utf-8").partition("\n")
        if sha256(stored.encode()).hexdigest() != checksum:
            raise ValueError("other bytes than were written")
        return Examination(**json.loads(stored))
    except (FileNotFoundError, ValueError, TypeError):
        measured = measure()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(measured), sort_keys=True, allow_nan=False)
    content = f"{sha256(text.encode()).hexdigest()}\n{text}".encode()
    write_atomically(path, lambda file: file.write(content))
    return measured
