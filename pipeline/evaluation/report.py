"""The evaluation as files: `metrics/eval.json`, a Markdown table with intervals and verdicts, and learning curves."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.evaluation.catalogue import METRICS, OFFERED, PARENTS
from pipeline.evaluation.panel import RowValues
from pipeline.evaluation.results import chance_of, estimates_of, verdicts_of
from pipeline.evaluation.statistics import Estimate, Verdict
from pipeline.params.schema import Eval

# What the report draws of each stage's plot file.
CURVES = {
    "pretrain": ("train/loss", "val/loss", "train/grad_norm"),
    "full_sft": ("train/loss", "val/loss", "train/grad_norm"),
    "lora": ("train/loss", "val/loss"),
    "dpo": ("train/loss", "dpo/accuracy", "dpo/margin"),
    "reward": ("train/loss", "reward_model/accuracy", "reward_model/margin"),
    "ppo": ("reward/mean", "policy/ref_kl", "policy/entropy", "value/explained_variance"),
    "grpo": ("reward/mean", "policy/ref_kl", "policy/entropy", "rollout/length_mean"),
    "agent": ("reward/mean", "tool/success", "policy/ref_kl", "policy/entropy"),
}


def metrics_tree(estimates: Mapping[str, Mapping[str, Estimate]]) -> dict[str, dict[str, float]]:
    """`{model: {metric: value, metric_low: ..., metric_high: ..., metric_n: ...}}`, as metrics/eval.json holds it."""
    tree: dict[str, dict[str, float]] = {}
    for model, metrics in estimates.items():
        tree[model] = {}
        for name, estimate in metrics.items():
            tree[model] |= {
                name: estimate.value,
                f"{name}_low": estimate.low,
                f"{name}_high": estimate.high,
                f"{name}_n": float(estimate.n),
            }
    return tree


def write_json(path: Path, tree: Mapping[str, Mapping[str, float]]) -> None:
    """Strict JSON, sorted, rounded to 6 decimals: equal results give equal bytes."""
    rounded = {model: {name: round(value, 6) for name, value in metrics.items()} for model, metrics in tree.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def write_report(
    measured: Mapping[str, RowValues], params: Eval, *, metrics: Path, folder: Path, plots: Path = Path("plots")
) -> dict[str, dict[str, Estimate]]:
    """Writes metrics/eval.json, eval.md and one PNG of curves per stage; returns the estimates by model."""
    estimates = {model: estimates_of(values, params.confidence) for model, values in measured.items()}
    verdicts = verdicts_of(measured, params.confidence)
    write_json(metrics, metrics_tree(estimates))
    curves = []
    for stage, keys in CURVES.items():
        draw_curves(plots / f"{stage}.csv", folder / "curves" / f"{stage}.png", keys)
        curves.append(f"curves/{stage}.png")
    text = markdown(estimates, verdicts, PARENTS, params.confidence, curves, chance_of(measured))
    (folder / "eval.md").write_text(text, encoding="utf-8")
    return estimates


def markdown(
    estimates: Mapping[str, Mapping[str, Estimate]],
    verdicts: Mapping[str, Mapping[str, Verdict]],
    parents: Mapping[str, str],
    confidence: float,
    curves: Sequence[str],
    chance: Mapping[str, str],
) -> str:
    """The report: one table per metric family would hide comparisons, so it is one table, then verdicts, then curves."""
    shown = [name for name in METRICS if any(name in metrics for metrics in estimates.values())]
    lines = [
        "# Evaluation",
        "",
        f"Every model on the same held-out rows; brackets are {100 * confidence:g}% intervals. Definitions: docs/evaluation.md.",
        "",
        "| model | " + " | ".join(shown) + " |",
        "| --- |" + " --- |" * len(shown),
    ]
    for model, metrics in estimates.items():
        cells = [_cell(metrics.get(name)) for name in shown]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    lines += _chance_row(shown, chance)
    lines += ["", "## Tool tasks by number of tools offered, greedy", "", *_family(estimates, OFFERED, chance)]
    lines += ["", "## Reward terms", "", *_family(estimates, "reward_term_", chance)]
    lines += [
        "",
        "## Against the parent",
        "",
        "Paired on the same rows: the interval of the mean difference excludes 0, or not.",
        "",
    ]
    lines += ["| model | parent | better | worse | no clear difference |", "| --- | --- | --- | --- | --- |"]
    for model, metric_verdicts in verdicts.items():
        groups = [
            ", ".join(name for name, verdict in metric_verdicts.items() if verdict == wanted) or "-"
            for wanted in ("better", "worse", "no clear difference")
        ]
        lines.append(f"| {model} | {parents[model]} | " + " | ".join(groups) + " |")
    lines += ["", "## Metrics", "", *(f"- `{name}`: {METRICS[name][0]}" for name in shown)]
    lines += ["", "## Learning curves", "", *(f"![{Path(name).stem}]({name})" for name in curves), ""]
    return "\n".join(lines)


def _chance_row(names: Sequence[str], chance: Mapping[str, str]) -> list[str]:
    """The last row of a table; none where no metric of it has a chance level."""
    return ["| *chance* | " + " | ".join(chance.get(name, "-") for name in names) + " |"] if chance.keys() & set(names) else []


def _family(estimates: Mapping[str, Mapping[str, Estimate]], prefix: str, chance: Mapping[str, str]) -> list[str]:
    """A table of the metrics that begin so; nothing where no model has one."""
    names = sorted({name for metrics in estimates.values() for name in metrics if name.startswith(prefix)})
    if not names:
        return []
    return [
        "| model | " + " | ".join(name.removeprefix(prefix) for name in names) + " |",
        "| --- |" + " --- |" * len(names),
        *(
            f"| {model} | " + " | ".join(_cell(metrics.get(name)) for name in names) + " |"
            for model, metrics in estimates.items()
        ),
        *_chance_row(names, chance),
    ]


def _cell(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}] n={estimate.n}"


def draw_curves(csv_path: Path, png_path: Path, keys: Sequence[str]) -> None:
    """One PNG with a panel per key of a stage's plot file; deterministic bytes (no software or date in the metadata)."""
    import matplotlib  # deferred: only eval draws, and the import is slow

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with csv_path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    present = [key for key in keys if rows and any(row.get(key) for row in rows)]
    figure, axes = pyplot.subplots(1, max(len(present), 1), figsize=(4 * max(len(present), 1), 3), squeeze=False)
    for axis, key in zip(axes[0], present, strict=False):
        points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key)]
        axis.plot([x for x, _ in points], [y for _, y in points], marker="." if len(points) < 30 else None)
        axis.set(title=key, xlabel="step")
        axis.grid(alpha=0.3)
    figure.suptitle(csv_path.stem)
    figure.tight_layout()
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)
