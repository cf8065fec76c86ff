"""Every check of a run's signals on series made by hand: what it names, what it leaves alone, and when it knows too little."""

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.diagnosis.checks import CHECKS, ROLLOUT, SUPERVISED, TRAINED, diagnose
from pipeline.diagnosis.findings import Finding, Limit, Severity
from pipeline.diagnosis.signals import MIN_POINTS, Signals
from pipeline.diagnosis.still import still_metrics
from pipeline.tracking.records import Series
from pipeline.yaml_files import read_yaml

WARN, PROBLEM = Severity.WARN, Severity.PROBLEM
N = 30
ROOT = Path(__file__).parents[1]


def series(values: Sequence[float], first: int = 1) -> Series:
    return Series(list(range(first, first + len(values))), list(values))


def line(start: float, end: float, noise: float = 0.02, n: int = N) -> list[float]:
    """From start to end, with a ripple."""
    return [start + (end - start) * i / (n - 1) + noise * ((i * 7) % 5 - 2) for i in range(n)]


def level(value: float, n: int = N) -> list[float]:
    return line(value, value, 0.0, n)


HEALTHY: dict[str, list[float]] = {
    "reward/mean": line(0.1, 1.2),
    "reward/std": level(1.0),
    "reward/term/model": line(-0.2, 0.7),
    "reward/term/length": line(0.3, 0.5),
    "policy/entropy": line(0.4, 0.3, 0.01),
    "policy/ref_kl": line(0.0, 0.2, 0.005),
    "policy/clip_frac": level(0.1),
    "policy/ratio_first_update": level(1.00001),
    "rollout/logprob_diff_max": level(2e-5),
    "rollout/truncated_frac": level(0.05),
    "rollout/zero_std_frac": level(0.4),
    "tool/error_frac": level(0.02),
    "value/explained_variance": line(-0.4, 0.6),
    "train/grad_norm": line(2.0, 1.5, 0.1),
    "train/skipped_steps": level(0.0),
}
SUPERVISED_HEALTHY: dict[str, list[float]] = {
    "train/loss": line(4.0, 1.0),
    "train/grad_norm": line(2.0, 1.5, 0.1),
    "train/skipped_steps": level(0.0),
    "train/tokens_seen": line(100, 3000, 0),
}


def rollout(stage: str = "grpo", evaluation: Any = None, params: Any = None, **changes: list[float]) -> Signals:
    known = HEALTHY | {key.replace("__", "/"): values for key, values in changes.items()}
    return Signals(stage, {stage: params or {}}, {key: series(values) for key, values in known.items()}, True, evaluation or {})


def supervised(val: Sequence[float], params: Any = None, ended: bool = True, **changes: list[float]) -> Signals:
    known = SUPERVISED_HEALTHY | {key.replace("__", "/"): values for key, values in changes.items()}
    found = {key: series(values) for key, values in known.items()}
    steps = [round(i * N / max(len(val) - 1, 1)) for i in range(len(val))]
    found |= {"val/loss": Series(steps, list(val)), "val/loss_start": Series([0], list(val[:1]))}
    return Signals("full_sft", {"full_sft": params or {"epochs": 3}}, found, ended)


@pytest.mark.parametrize(
    ("stage", "params", "still"),
    [
        ("grpo", {"updates_per_rollout": 1, "batch_size": 8}, True),
        ("agent", {"updates_per_rollout": 2, "batch_size": 8}, False),
        ("ppo", {"updates_per_rollout": 1, "batch_size": 8, "mini_batch_size": 8}, True),
        ("ppo", {"updates_per_rollout": 1, "batch_size": 8, "mini_batch_size": 7}, False),
        ("ppo", {"updates_per_rollout": 2, "batch_size": 8, "mini_batch_size": 8}, False),
        ("grpo", {}, False),  # an older record
    ],
)
def test_metrics_that_cannot_move_are_named_with_what_lets_them(stage: str, params: dict[str, int], still: bool) -> None:
    lines = list(still_metrics(rollout(stage, params=params)))
    assert len(lines) == still
    for said in lines:
        assert "policy/approx_kl, policy/clip_frac, policy/ratio_max cannot move" in said
        assert f"{stage}.updates_per_rollout (now 1) above 1" in said and ("mini_batch_size (now 8)" in said) is (stage == "ppo")
    assert not list(still_metrics(supervised(level(1.0))))


def greedy(*texts: str, cut: int = 0) -> list[dict[str, Any]]:
    """A panel of eight answers; the last `cut` never end."""
    rows = [*texts, *["It is red.<|im_end|>"] * (8 - len(texts))]
    return [
        {"step": 40, "prompt": "?", "completion": text, "stop": "length" if place >= 8 - cut else "eos"}
        for place, text in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        (greedy(), None),
        (greedy("I am the the the the the", "The keeper of the the the the"), WARN),
        (greedy(cut=4), PROBLEM),
        (greedy(*["我是海鸥海鸥海鸥海鸥"] * 2), WARN),
        (greedy(*["I live here.\nI live here.\nI live here.\nI live here.\n"] * 5), PROBLEM),
        (greedy(*["<think>\n\n</think>\n\n1111111 is 1111.<|im_end|>"] * 8), None),  # a number is no loop
        (greedy(*["It is red. It is red. It is red.<|im_end|>"] * 8), None),  # said thrice: a style, not a loop
        (greedy("the the the the")[:3], None),  # too few to tell
    ],
)
def test_greedy_answers_that_loop_or_never_end_are_named(samples: Any, found: Severity | None) -> None:
    for stage, asked in (("lora", True), ("pretrain", False)):
        run = Signals(stage, {stage: {"epochs": 5, "lr": 2e-3}}, {}, samples=samples)
        told = {finding.name: finding for finding in diagnose(run)}
        assert {name: finding.severity for name, finding in told.items()} == (
            {"degenerate_samples": found} if asked and found else {}
        )
        if asked and found:
            assert "lora.lr (now 0.002)" in told["degenerate_samples"].advice
            assert str(sum(row["stop"] == "length" or "ive here" in row["completion"] for row in samples) or 2) in str(
                told["degenerate_samples"]
            )


def names(run: Signals) -> dict[str, Severity]:
    return {finding.name: finding.severity for finding in diagnose(run)}


def the(run: Signals) -> Finding:
    (finding,) = diagnose(run)
    return finding


@pytest.mark.parametrize("stage", ROLLOUT)
def test_healthy_rollouts(stage: str) -> None:
    assert names(rollout(stage)) == {}


def test_healthy_supervision() -> None:
    assert names(supervised([4.1, 2.0, 1.2])) == {}


@pytest.mark.parametrize(
    ("stage", "changes", "expected"),
    [
        ("grpo", {"rollout__zero_std_frac": line(0.2, 1.0, 0)}, {"no_signal": WARN}),
        ("agent", {"rollout__zero_std_frac": level(0.95)}, {"no_signal": PROBLEM}),
        ("ppo", {"reward__std": [1.0] * 20 + [3e-7] * 10, "rollout__zero_std_frac": []}, {"no_signal": PROBLEM}),
        ("grpo", {"reward__term__length": line(0.6, 0.2)}, {"reward_hacked": WARN}),  # 0.27 of 0.6
        ("grpo", {"reward__term__length": line(0.9, 0.0), "reward__mean": line(0.1, 0.4)}, {"reward_hacked": PROBLEM}),
        ("grpo", {"policy__entropy": line(0.4, 0.0, 0)}, {"entropy_collapse": WARN}),
        ("grpo", {"policy__entropy": [0.4] * 10 + [0.02] * 20}, {"entropy_collapse": PROBLEM}),
        ("grpo", {"policy__entropy": [0.4] * 10 + [0.9] * 20, "reward__mean": line(0.6, 0.62)}, {"entropy_rise": WARN}),
        ("ppo", {"policy__entropy": [0.4] * 10 + [3.0] * 20, "reward__mean": line(0.6, 0.62)}, {"entropy_rise": PROBLEM}),
        ("grpo", {"policy__ref_kl": line(0.0, 0.5, 0), "reward__mean": line(0.6, 0.6)}, {"kl_runaway": WARN}),
        ("grpo", {"policy__ref_kl": line(0.0, 5.0, 0), "reward__mean": line(0.6, 0.6)}, {"kl_runaway": PROBLEM}),
        ("grpo", {"policy__ref_kl": line(0.0, 0.5, 0), "reward__mean": line(0.6, 0.1)}, {"kl_runaway": PROBLEM}),
        # up, then down again below its best
        ("grpo", {"reward__mean": line(0, 1, n=15) + line(1, 0.4, n=15), "policy__ref_kl": line(0, 2)}, {"kl_runaway": WARN}),
        ("agent", {"rollout__truncated_frac": level(0.2)}, {"length_cap": WARN}),
        ("ppo", {"rollout__truncated_frac": line(0.0, 0.9)}, {"length_cap": PROBLEM}),
        ("ppo", {"value__explained_variance": line(-0.1, -0.12)}, {"dead_critic": PROBLEM}),
        ("grpo", {"policy__ratio_first_update": [1.0] * 12 + [0.998] + [1.0] * 17}, {"first_ratio": WARN}),
        ("ppo", {"policy__ratio_first_update": [1.3]}, {"first_ratio": PROBLEM}),  # one step is enough
        ("ppo", {"policy__clip_frac": level(0.4)}, {"clip_frac": WARN}),
        ("grpo", {"rollout__logprob_diff_max": level(0.3)}, {"logprob_diff": WARN}),
        ("grpo", {"rollout__logprob_diff_max": level(3.0)}, {"logprob_diff": PROBLEM}),
        ("grpo", {"rollout__logprob_diff_max": [1e-5] * 20 + [5e-3] * 10}, {"logprob_diff": WARN}),
        ("grpo", {"reward__mean": line(0.6, 0.6)}, {"kl_runaway": WARN}),
        ("grpo", {"reward__mean": line(0.6, 0.6), "policy__ref_kl": level(1e-4)}, {"reward_flat": WARN}),
        ("agent", {"tool__error_frac": level(0.08)}, {"tool_errors": WARN}),
        ("agent", {"tool__error_frac": level(0.8)}, {"tool_errors": PROBLEM}),
        ("grpo", {"train__grad_norm": [2.0] * 25 + [45.0] + [2.0] * 4}, {"gradient_spikes": WARN}),
        ("grpo", {"train__skipped_steps": [0.0] * 29 + [1.0]}, {"skipped_steps": WARN}),
        ("grpo", {"train__skipped_steps": [0.0] * 25 + [1.0, 2.0, 3.0, 4.0, 5.0]}, {"skipped_steps": PROBLEM}),
    ],
)
def test_a_rollout_gone_wrong_is_named(stage: str, changes: dict[str, list[float]], expected: dict[str, Severity]) -> None:
    assert names(rollout(stage, **changes)) == expected


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("grpo", {"reward__term__length": line(0.5, 0.4)}),  # less than a quarter of what another term gains
        ("grpo", {"policy__entropy": line(0.4, 2.0)}),  # the reward gains by it
        ("grpo", {"policy__ref_kl": line(0.0, 5.0)}),
        ("ppo", {"value__explained_variance": line(-2.0, -0.1)}),  # it gets better
        ("ppo", {"value__explained_variance": [-1.0] * 10 + line(0.0, 0.3, n=20)}),
        ("agent", {"tool__error_frac": line(0.06, 0.06, 0.03)}),  # within its noise of 5%
        ("grpo", {"train__grad_norm": [40.0] + [2.0] * 29}),  # in warm-up
        ("grpo", {"train__grad_norm": [0.01] * 29 + [0.5]}),  # not clipped
        ("grpo", {"policy__entropy": level(1e-3)}),
    ],
)
def test_what_looks_alike_is_left_alone(stage: str, changes: dict[str, list[float]]) -> None:
    assert names(rollout(stage, params={"warmup_steps": 1, "max_grad_norm": 1.0, "critic_warmup_steps": 10}, **changes)) == {}


@pytest.mark.parametrize(
    ("val", "changes", "expected"),
    [
        ([4.0, 1.5, 1.4, 1.6], {}, {"overfitting": WARN}),
        ([4.0, 1.5, 1.0, 1.6], {}, {"overfitting": PROBLEM}),
        ([4.0, 1.2, 1.2], {"train__loss": [4.0] * 10 + [0.3] * 20}, {"data_too_small": WARN}),
        ([4.0, 3.97], {"train__loss": line(4.0, 3.9)}, {"nothing_learned": WARN}),
        ([4.0, 4.2], {"train__loss": line(4.0, 4.0)}, {"nothing_learned": PROBLEM}),
        ([4.0, 1.5, 5.0], {}, {"overfitting": PROBLEM, "data_too_small": WARN}),  # and not nothing_learned beside it
    ],
)
def test_a_supervised_run_gone_wrong_is_named(
    val: list[float], changes: dict[str, list[float]], expected: dict[str, Severity]
) -> None:
    assert names(supervised(val, **changes)) == expected


def test_some_questions_wait_for_the_end() -> None:
    assert names(supervised([4.0, 4.2], ended=False, train__loss=line(4.0, 3.9))) == {}
    flat = rollout(reward__mean=line(0.6, 0.6), policy__ref_kl=level(1e-4))
    assert names(Signals(flat.stage, flat.params, flat.series, ended=False)) == {}


def test_one_epoch_knows_no_row_by_heart() -> None:
    assert names(supervised([4.0, 1.2, 1.2], {"epochs": 1}, train__loss=[4.0] * 10 + [0.3] * 20)) == {}


def test_weights_that_are_taken_over_have_nothing_to_learn() -> None:
    assert (
        names(
            Signals("pretrain", {"pretrain": {"epochs": 0}}, {"val/loss": series([2.0], 0), "val/loss_start": series([2.0], 0)})
        )
        == {}
    )


@pytest.mark.parametrize(
    ("stage", "own", "expected"),
    [
        ("grpo", 0.9, {}),
        ("grpo", 0.25, {"reward_overfit": WARN}),  # within full_sft's interval
        ("grpo", -0.2, {"reward_overfit": PROBLEM}),
        ("agent", 0.25, {"reward_overfit": WARN}),
    ],
)
def test_the_held_out_reward_is_asked(stage: str, own: float, expected: dict[str, Severity]) -> None:
    metric = "tool_earned" if stage == "agent" else "reward_mean"
    evaluation = {
        model: {metric: value, f"{metric}_low": value - 0.2, f"{metric}_high": value + 0.2}
        for model, value in (("full_sft", 0.1), (stage, own))
    }
    assert names(rollout(stage, evaluation)) == expected
    flat = rollout(stage, evaluation, reward__mean=line(0.6, 0.6), policy__ref_kl=level(1e-4))
    assert "reward_overfit" not in names(flat)  # a reward that does not rise is no over-fitting


def test_a_critic_without_differences_to_explain_is_not_blamed() -> None:
    run = rollout("ppo", rollout__zero_std_frac=[], value__explained_variance=[0.0] * N, reward__std=[1.0] * 5 + [0.0] * 25)
    assert names(run) == {"no_signal": PROBLEM}


def test_recomputed_logprobs_need_no_sampler() -> None:
    run = rollout("grpo", rollout__logprob_diff_max=level(0.3), params={"old_logprobs": "recomputed"})
    assert names(run) == {}


def test_a_finding_says_what_where_and_what_to_change() -> None:
    finding = the(rollout("grpo", rollout__truncated_frac=level(0.25), params={"max_new_tokens": 96}))
    assert str(finding) == (
        "length_cap: 25% of the answers are cut at the length limit (rollout/truncated_frac, steps 21-30); raise "
        "grpo.max_new_tokens (now 96), or charge for length with grpo.overlong.buffer; where the reward grows with length, mend "
        "the reward"
    )
    one = the(rollout("grpo", policy__ratio_first_update=[1.0] * 12 + [0.998] + [1.0] * 17))
    assert "(policy/ratio_first_update, step 13)" in str(one)


def test_problems_come_first() -> None:
    run = rollout("grpo", rollout__truncated_frac=level(0.2), rollout__zero_std_frac=level(1.0))
    assert list(names(run).values()) == [PROBLEM, WARN]
    worse = rollout("grpo", rollout__truncated_frac=level(0.9), tool__error_frac=level(0.1))
    assert list(names(worse)) == ["length_cap", "tool_errors"]


def test_limits() -> None:
    rising, falling = Limit(0.1, 0.5, ""), Limit(None, 0.0, "", below=True)
    assert [rising.reached(x) for x in (0.09, 0.1, 0.5)] == [None, WARN, PROBLEM]
    assert [falling.reached(x) for x in (0.01, 0.0, -5)] == [None, PROBLEM, PROBLEM]


@pytest.mark.parametrize("stage", TRAINED)
def test_short_runs_and_missing_metrics_are_no_fault(stage: str) -> None:
    bad = {
        "reward/mean": line(1.0, 0.0),
        "policy/entropy": line(1.0, 0.0),
        "policy/ref_kl": line(0, 9),
        "rollout/truncated_frac": level(1.0),
        "rollout/zero_std_frac": level(1.0),
        "value/explained_variance": level(-1.0),
        "train/loss": line(1.0, 3.0),
        "train/grad_norm": line(0.0, 100.0),
    }
    for few in range(MIN_POINTS):
        assert names(Signals(stage, {}, {key: series(values[:few]) for key, values in bad.items()})) == {}
    for key in HEALTHY.keys() | SUPERVISED_HEALTHY.keys():
        whole = rollout(stage) if stage in ROLLOUT else Signals(stage, {}, {})
        assert names(Signals(stage, {}, {name: values for name, values in whole.series.items() if name != key})) == {}


VALUES = st.lists(st.floats(-1e9, 1e9) | st.sampled_from([0.0, 1.0, math.pi]), max_size=40)


@given(st.sampled_from(TRAINED), st.dictionaries(st.sampled_from(sorted({*HEALTHY, *SUPERVISED_HEALTHY, "val/loss"})), VALUES))
def test_nothing_breaks_a_check(stage: str, values: dict[str, list[float]]) -> None:
    """Whatever the figures: zero, negative losses, series of different lengths, none."""
    for finding in diagnose(Signals(stage, {stage: {"epochs": 2}}, {key: series(row) for key, row in values.items()})):
        assert finding.sentence and finding.advice and finding.evidence.first_step <= finding.evidence.last_step


@pytest.mark.parametrize("stage", TRAINED)
def test_the_committed_runs_are_healthy(stage: str) -> None:
    """The curves in plots/ are those of the committed lineage."""
    found: dict[str, Series] = {}
    with (ROOT / f"plots/{stage}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key != "step" and value:
                    one = found.setdefault(key, Series())
                    one.steps.append(int(row["step"]))
                    one.values.append(float(value))
    evaluation = json.loads((ROOT / "metrics/eval.json").read_text(encoding="utf-8"))
    run = Signals(stage, read_yaml(ROOT / "params.yaml"), found, True, evaluation)
    assert [str(finding) for finding in diagnose(run)] == []
    read = {key for check in CHECKS if stage in check.stages for key in check.keys}
    known = [key for key in read if key in found or any(name.startswith(key) for name in found if key.endswith("/"))]
    assert len(known) >= (4 if stage in SUPERVISED else 10)  # the keys are those that stages log


def test_the_page_tells_the_codes_limits() -> None:
    """docs/diagnosis.md: name, metrics, warn and problem of every check, in the order of the code."""
    text = (ROOT / "docs/diagnosis.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    told = [(name, tuple(re.findall(r"`([^`]+)`", keys)), _figure(warn), _figure(problem)) for name, keys, warn, problem in rows]
    assert told == [(c.name, c.keys, c.limit.warn, c.limit.problem) for c in CHECKS]


def _figure(cell: str) -> float | None:
    """The number that a cell begins with; `-` is none."""
    return None if cell.strip() == "-" else float(cell.split()[0].rstrip(":,;"))
