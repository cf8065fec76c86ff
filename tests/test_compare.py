"""How runs differ: what is found by name, aligned, judged against the spread of seeds, and shown."""

import hashlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import HOSTILE, answers, curves, write_run
from typer.testing import CliRunner

from pipeline import __main__ as command_line
from pipeline.__main__ import app
from pipeline.errors import ParamsError
from pipeline.evaluation.results import METRICS
from pipeline.lineage.yardstick import yardstick
from pipeline.pages.compare_page import compare_page
from pipeline.reading.compare import as_json, compare
from pipeline.reading.compare_text import printable
from pipeline.reading.measured import direction, measure
from pipeline.reading.noise import repeats_of, spread, verdict
from pipeline.reading.samples import Parting, align
from pipeline.reading.sides import find_sides
from pipeline.reading.wording import verdicts
from pipeline.tracking.records import Record
from pipeline.tracking.run_folder import RunFolder
from pipeline.yaml_files import read_yaml


def record(path: Path) -> Record:
    return Record(RunFolder(path))


def steps(key: str, values: list[float | None]) -> list[tuple[int, dict[str, float | None]]]:
    return [(step, {key: value}) for step, value in enumerate(values, start=1)]


# Metrics


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train/loss", "down"),
        ("val/loss", "down"),
        ("policy/ref_kl", "down"),
        ("policy/approx_kl_k3", "down"),
        ("reward/mean", "up"),
        ("reward/term/length", "up"),
        ("dpo/accuracy", "up"),
        ("tool/success", "up"),
        ("grpo/bits_per_byte", "down"),
        ("grpo/reward_term_length", "up"),
        ("policy/entropy", None),
        ("policy/loss", None),
        ("rollout/length_mean", None),
        ("train/lr", None),
        ("reward/std", None),
    ],
)
def test_direction(key: str, expected: str | None) -> None:
    assert direction(key) == expected


def test_directions_are_those_of_the_evaluation() -> None:
    assert {name: direction(f"grpo/{name}") for name in METRICS} == {
        name: "up" if higher else "down" for name, (_, higher) in METRICS.items()
    }


def test_the_loss_of_reinforcement_has_no_best() -> None:
    assert direction("train/loss", reinforcement=True) is None


def test_last_and_best_have_their_steps(tmp_path: Path) -> None:
    rows = steps("reward/mean", [0.1, 0.7, None, 0.7, 0.3])
    measured = measure(record(write_run(tmp_path, 1, metrics=rows)))["reward/mean"]
    assert (measured.last, measured.last_step, measured.best, measured.best_step) == (0.3, 5, 0.7, 2)
    (loss,) = measure(record(write_run(tmp_path, 2, metrics=steps("val/loss", [3.0, 1.0, 2.0])))).values()
    assert (loss.best, loss.best_step) == (1.0, 2)


def test_the_final_level_is_the_last_tenth(tmp_path: Path) -> None:
    """Of 20 steps the last 2: (19 + 20) / 2; of val/*, and of what was not logged then, the last value."""
    rows = [(step, {"train/loss": float(step), "val/loss": float(step)}) for step in range(1, 21)]
    rows[9][1]["tool/success"] = 0.5
    measured = measure(record(write_run(tmp_path, 1, metrics=rows)))
    assert [measured[key].final for key in ("train/loss", "val/loss", "tool/success")] == [19.5, 20.0, 0.5]


# Spread of seeds


def write_seeds(home: Path, first: int, values: list[float], **params: Any) -> list[Record]:
    return [
        record(write_run(home, first + seed, params={"seed": seed} | params, metrics=[(1, {"reward/mean": value})]))
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(("other", "expected"), [(6.9, "inside"), (7.0, "outside"), (-2.9, "inside"), (-3.0, "outside")])
def test_one_run_against_three_seeds(tmp_path: Path, other: float, expected: str) -> None:
    """Seeds 1, 2, 3: mean 2, std 1, 2 degrees of freedom. t(0.975; 2) = 4.3027, times sqrt(1/3 + 1/1), is 4.968."""
    left = repeats_of(write_seeds(tmp_path, 1, [1.0, 2.0, 3.0])[1], tmp_path)
    right = repeats_of(write_seeds(tmp_path, 10, [other], lr=9.0)[0], tmp_path)
    assert verdict(left, right, "reward/mean") == verdict(right, left, "reward/mean") == expected
    three = spread(left.values["reward/mean"])
    assert three is not None and (three.mean, three.std, three.seeds) == (2.0, 1.0, 3)


@pytest.mark.parametrize(("apart", "expected"), [(2.2, "inside"), (2.4, "outside")])
def test_both_recipes_have_seeds(tmp_path: Path, apart: float, expected: str) -> None:
    """Two groups of three with std 1: 4 degrees of freedom, t = 2.7764, times sqrt(2/3), is 2.267."""
    left = repeats_of(write_seeds(tmp_path, 1, [1.0, 2.0, 3.0])[0], tmp_path)
    right = repeats_of(write_seeds(tmp_path, 10, [1.0 + apart, 2.0 + apart, 3.0 + apart], lr=9.0)[0], tmp_path)
    assert verdict(left, right, "reward/mean") == expected


def test_without_repeated_seeds_nothing_is_known(tmp_path: Path) -> None:
    left = repeats_of(write_seeds(tmp_path, 1, [1.0])[0], tmp_path)
    right = repeats_of(write_seeds(tmp_path, 10, [2.0], lr=9.0)[0], tmp_path)
    assert verdict(left, right, "reward/mean") == verdict(None, right, "reward/mean") == "unknown"
    assert spread(left.values["reward/mean"]) is None
    comparison = compare(tmp_path, tmp_path, ["mlflow1", "mlflow10"])
    assert comparison.hint == "no repeated seeds, run `dvc exp run -S grpo.seed=1`"


def test_seeds_alone_are_no_other_recipe(tmp_path: Path) -> None:
    """1, 2 and 3: mean 2, standard deviation 1."""
    first, second, _ = (repeats_of(each, tmp_path) for each in write_seeds(tmp_path, 1, [1.0, 2.0, 3.0]))
    assert verdict(first, second, "reward/mean") == "same recipe"
    assert verdicts(compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]).metrics[0]) == ["seeds: 2 ± 1"]


def test_only_finished_runs_of_the_recipe_count(tmp_path: Path) -> None:
    asked, _ = write_seeds(tmp_path, 1, [1.0, 2.0])
    write_run(tmp_path, 10, params={"seed": 1})  # the same seed again: one run per seed
    write_run(tmp_path, 11, params={"seed": 5}, code=143)
    write_run(tmp_path, 12, params={"seed": 6}, code=None)
    write_run(tmp_path, 13, params={"seed": 7, "lr": 2.0})
    write_run(tmp_path, 14, params={"seed": 8}, inputs={"data/in": "b" * 32})
    write_run(tmp_path, 15, params={"seed": 9}, stage="ppo")
    found = repeats_of(asked, tmp_path)
    assert len(found.runs) == 2 and {run.params["grpo"]["seed"] for run in found.runs} == {0, 1}
    unfinished = repeats_of(record(tmp_path / ".runs/grpo/key12/1"), tmp_path)
    assert len(unfinished.runs) == 1  # its level is not yet comparable


@pytest.mark.slow
def test_300_repeated_seeds_are_read_in_time(tmp_path: Path) -> None:
    for seed in range(299):
        write_run(tmp_path, seed, params={"seed": seed}, metrics=curves(seed, 100, 1.0))
    write_run(tmp_path, 1000, params={"lr": 2.0}, metrics=curves(1000, 100, 5.0))
    started = time.process_time()
    found = compare(tmp_path, tmp_path, ["mlflow7", "mlflow1000"])
    assert time.process_time() - started < 10
    assert [len(each.runs) for each in found.repeats if each] == [299, 1] and found.metrics[0].verdicts == ("outside",)


# Samples


def row(step: int, prompt: str, completion: str, **facts: Any) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "completion": completion, **facts}


def test_samples_meet_at_prompt_step_and_turn() -> None:
    left = [row(1, "p", "one", reward=1.0), row(1, "p", "two"), row(1, "q", "only left"), row(5, "p", "late")]
    right = [row(1, "p", "once", reward=2.0), row(5, "p", "late"), row(1, "p", "two!"), row(1, "r", "only right")]
    found = [(each.prompt, [a.text for a in each.answers], each.parting) for each in align([left, right])]
    assert found == [
        ("p", ["one", "once"], Parting(2)),
        ("p", ["two", "two!"], Parting(3)),
        ("p", ["late", "late"], None),
    ]
    assert [answer.facts for answer in align([left, right])[0].answers] == [{"reward": 1.0}, {"reward": 2.0}]


def test_without_a_common_step_the_last_ones_meet() -> None:
    (found,) = align([[row(1, "p", "a"), row(4, "p", "ab")], [row(2, "p", "x"), row(6, "p", "ac")]])
    assert [(answer.step, answer.text) for answer in found.answers] == [(4, "ab"), (6, "ac")] and found.parting == Parting(1)


def test_models_and_tasks_of_an_evaluation_stay_apart() -> None:
    table = [row(0, "p", "x", model="dpo", task="question"), row(0, "p", "y", model="grpo", task="question")]
    assert [(each.subject, each.answers[0].text) for each in align([table, table])] == [
        ("dpo question", "x"),
        ("grpo question", "y"),
    ]


def test_three_sides_differ_where_the_first_two_do_not() -> None:
    (found,) = align([[row(1, "p", "abc")], [row(1, "p", "abc")], [row(1, "p", "abX")]])
    assert found.parting == Parting(2)


def test_lone_surrogates_can_be_written() -> None:
    (found,) = align([[row(1, "p\ud800", "a\udfff")], [row(1, "p\ud800", "a\udfff")]])
    assert found.answers[0].text == "a?" and found.prompt.encode() == b"p?"


# Names


LOCK = """schema: '2.0'
stages:
  base:
    cmd: make base
    deps:
    - path: corpus
      hash: md5
      md5: {corpus}
    params:
      params.yaml:
        base.lr: {base_lr}
    outs:
    - path: base.pth
      md5: {base}
  grpo:
    cmd: make grpo
    deps:
    - path: base.pth
      hash: md5
      md5: {base}
    params:
      params.yaml:
        grpo.lr: {lr}
        grpo.seed: 42
    outs:
    - path: grpo.pth
      hash: md5
      md5: {grpo}
  eval:
    cmd: make eval
    deps:
    - path: grpo.pth
      md5: {grpo}
    outs:
    - path: reports
      md5: {grpo}.dir
"""


def md5(*values: float) -> str:
    return hashlib.md5(repr(values).encode()).hexdigest()


def git(root: Path, *arguments: str) -> str:
    author = {f"GIT_{who}_{what}": "nobody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True, env=os.environ | author)
    return done.stdout.strip()


def write_lock(root: Path, lr: float, base_lr: float, score: float) -> None:
    base, grpo = md5(base_lr), md5(lr, base_lr)
    (root / "dvc.lock").write_text(LOCK.format(corpus="c" * 32, base=base, grpo=grpo, lr=lr, base_lr=base_lr))
    (root / "metrics").mkdir(exist_ok=True)
    bounds = {"reward_mean": score, "reward_mean_low": score - 0.1, "reward_mean_high": score + 0.1, "reward_mean_n": 9.0}
    (root / "metrics/eval.json").write_text(json.dumps({"grpo": bounds}))


@pytest.fixture
def lineage(tmp_path: Path) -> Path:
    """A commit with rate 0.1, an experiment of it with rate 0.2, one with another base; a run of each."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("/.runs\n")
    for number, (name, lr, base_lr, score) in enumerate(
        [("", 0.1, 1.0, 0.5), ("faster", 0.2, 1.0, 0.9), ("based", 0.1, 2.0, 0.55)]
    ):
        write_lock(tmp_path, lr, base_lr, score)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name or "lineage")
        if name:
            git(tmp_path, "update-ref", f"refs/exps/{'a' * 2}/{'b' * 38}/{name}", "HEAD")
            git(tmp_path, "reset", "-q", "--hard", "HEAD^")
        rows = [(1, {"reward/mean": score})]
        made = {"inputs": {"base.pth": md5(base_lr)}, "outputs": {"grpo.pth": md5(lr, base_lr)}}
        write_run(tmp_path, number, params={"lr": lr}, metrics=rows, experiment=name, **made)
    return tmp_path


def test_experiments_are_found_by_name(lineage: Path) -> None:
    own, faster = find_sides(lineage, lineage, ["grpo", "faster"])  # the newest run is that of `based`
    assert [side.place for side in (own, faster)] == [".runs/grpo/key0/1", ".runs/grpo/key1/1"]
    assert own.upstream == {"base.lr": 1.0}
    plain, faster = find_sides(lineage, lineage, [".runs/grpo/key0/1", "faster"])
    assert plain.upstream == faster.upstream == {"base.lr": 1.0}
    assert (plain.params["grpo.lr"], faster.params["grpo.lr"], faster.stage) == (0.1, 0.2, "grpo")
    assert (plain.evaluation["reward_mean"], faster.evaluation["reward_mean"]) == (0.5, 0.9)


def test_a_stage_is_what_the_workspace_has(lineage: Path) -> None:
    (side,) = find_sides(lineage, lineage, ["grpo"])
    assert side.place == ".runs/grpo/key0/1" and side.evaluation["reward_mean"] == 0.5 and not side.notes
    shutil.rmtree(lineage / ".runs/grpo/key0")
    (side,) = find_sides(lineage, lineage, ["grpo"])
    assert (side.place, side.record, side.params["grpo.lr"]) == ("dvc.lock", None, 0.1)
    write_run(lineage, 9, stage="ppo")
    (side,) = find_sides(lineage, lineage, ["ppo"])
    assert side.place == ".runs/ppo/key9/1" and side.notes == ["ppo: not in the workspace's dvc.lock; this is its newest run"]


def test_what_nobody_knows_of_a_side_without_a_folder_is_no_difference(lineage: Path) -> None:
    """Its code stands in dvc.lock; its commit and libraries stood in the run folder alone."""
    shutil.rmtree(lineage / ".runs/grpo/key0")
    code = {"data/code/grpo.json": "c" * 32}
    tree = read_yaml(lineage / "dvc.lock")
    tree["stages"]["grpo"]["deps"] += [{"path": path, "md5": md5} for path, md5 in code.items()]
    (lineage / "dvc.lock").write_text(json.dumps(tree))
    folder = write_run(lineage, 7, params={"lr": 0.3}, inputs={"base.pth": md5(1.0), **code})
    about = json.loads((folder / "run.json").read_text())
    about["tags"] |= {"version.torch": "2", "git.commit": "d" * 40}
    (folder / "run.json").write_text(json.dumps(about))
    found = {row.key: row.values for row in compare(lineage, lineage, ["grpo", ".runs/grpo/key7/1"]).config}
    assert found["grpo.lr"] == (0.1, 0.3)
    assert not [key for key in found if key.startswith(("input", "version", "commit"))]


def test_equal_sides_are_said_in_one_line(lineage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lineage)
    text = CliRunner().invoke(app, ["compare", "grpo", ".runs/grpo/key0/1"]).stdout
    assert "A and B are the same run of grpo, .runs/grpo/key0/1." in text and "configuration" not in text
    made = {"params": {"lr": 0.1}, "inputs": {"base.pth": md5(1.0)}, "outputs": {"grpo.pth": md5(0.1, 1.0)}}
    write_run(lineage, 9, **made)
    text = CliRunner().invoke(app, ["compare", ".runs/grpo/key0/1", "grpo", "faster"]).stdout
    assert "A and B made the same bytes: .runs/grpo/key0/1 and .runs/grpo/key9/1 of grpo." in text and "configuration" in text


def test_it_ends_with_what_is_better_or_why_that_cannot_be_said(lineage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lineage)
    (said,) = compare(lineage, lineage, ["grpo", "faster"]).conclusions
    assert said == (
        "B has the better reward/mean, B has 0.9 against 0.5, but one seed cannot tell: no repeated seeds, run "
        "`dvc exp run -S grpo.seed=43`. On the held-out panel B is better in reward_mean: B has 0.900 [0.800, 1.000] against "
        "0.500 [0.400, 0.600]."
    )
    assert CliRunner().invoke(app, ["compare", "grpo", "faster"]).stdout.replace(" \n", " ").rstrip().endswith("0.600].")
    for seed, score in ((43, 0.51), (44, 0.49)):
        known = {"inputs": {"base.pth": md5(1.0)}, "metrics": [(1, {"reward/mean": score})]}
        write_run(lineage, seed, params={"lr": 0.1, "seed": seed}, **known)
    better, worse = (compare(lineage, lineage, names).conclusions[0] for names in (["grpo", "faster"], ["faster", "grpo"]))
    assert better.startswith("B is better in reward/mean: B has 0.9 against 0.5, more than seeds differ (4 runs). ")
    assert worse.startswith("A is better in reward/mean: B has 0.5 against 0.9, more than seeds differ (4 runs). ")
    (alike,) = compare(lineage, lineage, ["grpo", ".runs/grpo/key43/1"]).conclusions
    assert alike == "A and B differ by seed alone, which moves reward/mean by 0.02 over 3 runs."
    write_run(lineage, 7, params={"lr": 0.3}, inputs={"base.pth": md5(1.0)}, metrics=[(1, {"reward/mean": 0.505})])
    (alike,) = compare(lineage, lineage, ["grpo", ".runs/grpo/key7/1"]).conclusions
    assert alike == "Neither is better in reward/mean: B has 0.505 against 0.5, and other seeds differ as much (4 runs)."
    write_run(lineage, 8, stage="other")
    (none,) = compare(lineage, lineage, ["grpo", "other"]).conclusions
    assert none == "Nothing that says which is better was measured of both A (grpo) and B (other)."


def test_runs_that_were_measured_differently_are_not_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"data/prepared/rlaif": "a" * 32, "checkpoints/full_sft.pth": "b" * 32, "checkpoints/reward.pth": "c" * 32}
    for number, changed in enumerate([{}, {"checkpoints/reward.pth": "d" * 32}, {"checkpoints/full_sft.pth": "e" * 32}], start=1):
        write_run(tmp_path, number, inputs=known | changed, metrics=[(1, {"reward/mean": float(number)})])
    paid = write_run(tmp_path, 4, inputs=known, metrics=[(1, {"reward/mean": 4.0})])
    about = json.loads((paid / "run.json").read_text())
    (paid / "run.json").write_text(json.dumps(about | {"params": about["params"] | {"rewards": {"answer": 9.0}}}))
    write_run(tmp_path, 5, inputs=known, metrics=[(1, {"reward/mean": 5.0})], code=143)
    said = compare(tmp_path, tmp_path, [f"mlflow{number}" for number in (1, 2, 3, 4, 5)]).conclusions
    another = "reward/mean does not say which is better: {} has {} against 1, but measured with another {}."
    assert said[0] == another.format("B", 2, "checkpoints/reward.pth")
    assert said[1].startswith("C has the better reward/mean, C has 3 against 1, but one seed cannot tell")
    assert said[2] == another.format("D", 4, "rewards.answer")
    assert said[3] == "reward/mean does not say yet which is better: E has 5 against 1, and E did not finish."


def test_one_recipe_and_seed_run_twice_is_no_difference_of_seeds(tmp_path: Path) -> None:
    """Forced on another device, say, which gives other bytes."""
    for number, made in ((1, "a"), (2, "b")):
        write_run(tmp_path, number, outputs={"grpo.pth": made * 32}, metrics=[(1, {"reward/mean": float(number)})])
    (said,) = compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]).conclusions
    assert said == (
        "A and B are one recipe with one seed, run twice: B has 2 against 1 in reward/mean, by machine, libraries or `runtime`."
    )


@pytest.mark.parametrize(
    ("stage", "metric", "counts", "does_not"),
    [
        (
            "grpo",
            "reward/mean",
            ["rewards.answer", "checkpoints/reward.pth", "data/prepared/rlaif"],
            ["grpo.lr", "data/tokenizer"],
        ),
        ("full_sft", "val/loss", ["data/encoded/full_sft"], ["full_sft.lr", "checkpoints/pretrain.pth"]),
        ("eval", "reward_mean", ["eval.temperature", "rewards.answer", "checkpoints/reward.pth"], ["checkpoints/grpo.pth"]),
        ("eval", "preference_accuracy", ["data/prepared/dpo"], ["rewards.answer", "checkpoints/reward.pth", "plots/dpo.csv"]),
        ("eval", "tool_success", ["tools.extra", "external/mine.py"], ["checkpoints/reward.pth", "external/None"]),
    ],
)
def test_what_a_number_is_measured_with(stage: str, metric: str, counts: list[str], does_not: list[str]) -> None:
    keys = [*counts, *does_not]
    params, inputs = {key: 1 for key in keys if "/" not in key}, {key: "a" * 32 for key in keys if "/" in key}
    assert sorted(yardstick(stage, metric, params, inputs)) == sorted(counts)


def test_evaluations_on_other_panels_are_not_ranked(lineage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lineage)
    lock = lineage / "dvc.lock"
    panel = "    params:\n      params.yaml:\n        eval.temperature: {}\n    outs:\n    - path: reports\n"
    lock.write_text(lock.read_text().replace("    outs:\n    - path: reports\n", panel.format(0.8)))
    (said,) = compare(lineage, lineage, ["grpo", "faster"]).conclusions
    assert said.endswith(
        "On the held-out panel: reward_mean does not say which is better: B has 0.900 [0.800, 1.000] against 0.500 [0.400, "
        "0.600], but measured with another eval.temperature."
    )


def test_metrics_that_matter_come_first(tmp_path: Path) -> None:
    values = {"time/step_s": 1.0, "policy/entropy": 2.0, "policy/ref_kl": 0.1, "reward/mean": 0.5}
    for number in (1, 2):
        write_run(tmp_path, number, metrics=[(1, values)], params={"lr": float(number)})
    found = [row.key for row in compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]).metrics]
    assert found == ["reward/mean", "policy/ref_kl", "policy/entropy", "time/step_s"]


def test_intervals_overlap_or_not(lineage: Path) -> None:
    comparison = compare(lineage, lineage, [".runs/grpo/key0/1", "faster", "based"])
    (judged,) = comparison.judged
    assert judged.key == "reward_mean" and judged.overlaps == (False, True)  # [0.4, 0.6] and [0.8, 1.0], [0.45, 0.65]


def test_parameters_of_parents_differ_too(lineage: Path) -> None:
    found = {row.key: row.values for row in compare(lineage, lineage, [".runs/grpo/key0/1", "based"], "grpo").config}
    assert found["base.lr"] == (1.0, 2.0) and "grpo.lr" not in found and "input base.pth" in found


def test_a_parent_that_one_side_lacks_is_no_difference(lineage: Path) -> None:
    write_run(lineage, 9, stage="base", params={"lr": 1.0, "seed": 1}, inputs={"corpus": "c" * 32})
    found = {row.key: row.values for row in compare(lineage, lineage, [".runs/grpo/key0/1", "base"]).config}
    assert found["lr"] == (0.1, 1.0) and "base.lr" not in found


def test_an_experiment_that_changes_a_parent_is_asked_for_by_stage(lineage: Path) -> None:
    with pytest.raises(ParamsError, match="based: no stage with a run has other parameters in this experiment; say whose"):
        find_sides(lineage, lineage, ["based", "faster"])  # `base` has no run
    with pytest.raises(ParamsError, match="based: the experiment has no stage ppo; it has base, grpo, eval"):
        find_sides(lineage, lineage, ["based", "faster"], "ppo")
    assert [side.stage for side in find_sides(lineage, lineage, ["faster", "based"])] == ["grpo", "grpo"]


def test_a_run_that_nothing_records_still_compares(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    write_run(tmp_path, 2, params={"lr": 2e-4})
    comparison = compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"])
    assert [(row.key, row.values) for row in comparison.config] == [("grpo.lr", (1e-4, 2e-4))] and comparison.judged == []


def test_stages_are_compared_by_their_own_parameters(tmp_path: Path) -> None:
    write_run(tmp_path, 1, stage="ppo", params={"lr": 3e-4})
    write_run(tmp_path, 2)
    found = {row.key: row.values for row in compare(tmp_path, tmp_path, ["ppo", "grpo"]).config}
    assert found == {"stage": ("ppo", "grpo"), "lr": (3e-4, 1e-4)}


@pytest.mark.parametrize("name", ["nothing", "*", ".runs/grpo/key1/9"])
def test_unknown_names_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_run(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pipeline", "compare", "grpo", name])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"{name}: no run folder") and said.count("\n") == 1


def test_one_thing_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="needs 2 to 26 things to compare, got 1"):
        compare(tmp_path, tmp_path, ["grpo"])


# Output


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three seeds of one recipe, one run of another, an unfinished one."""
    for seed in (42, 43, 44):
        write_run(tmp_path, seed, params={"seed": seed}, metrics=curves(seed, 40, 1.0), samples=answers(seed, [1, 40]))
    write_run(tmp_path, 1, params={"lr": 3e-4}, metrics=curves(1, 40, 2.0), samples=answers(1, [1, 40]))
    write_run(tmp_path, 2, params={"note": HOSTILE}, metrics=curves(2, 20, 1.0), samples=answers(2, [1]), code=None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("names", [["mlflow42", "mlflow1"], ["mlflow42", "mlflow1", "mlflow2"]])
def test_text_is_plain_and_fits_100_columns(store: Path, names: list[str]) -> None:
    printed = CliRunner().invoke(app, ["compare", *names]).stdout
    assert "grpo.lr" in printed and "outside (3)" in printed and "Samples: the same prompt at step" in printed
    assert max(map(len, printed.splitlines())) <= 100 and "\x1b" not in printed


def test_zero_has_no_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        write_run(tmp_path, number, metrics=steps("reward/term/repetition", [-0.5, -0.0]))
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["compare", "mlflow1", "mlflow2"]).stdout
    assert "0, best 0 @2" in printed and "-0," not in printed and "-0 " not in printed
    page = compare_page(compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]))
    assert '<td class="number">0 @2</td>' in page and "-0 @2" not in page


def test_generated_text_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31mb\nc\r\u202e小") == "a·[31mb⏎c··小"


def test_json_is_strict(store: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    printed = CliRunner().invoke(app, ["compare", "mlflow42", "mlflow1", "--json"]).stdout
    found = json.loads(printed, parse_constant=refuse)
    assert found == json.loads(as_json(compare(store, store, ["mlflow42", "mlflow1"])))
    assert [side["seeds"] for side in found["sides"]] == [3, 1] and found["config"][0]["values"] == [1e-4, 3e-4]
    reward = next(each for each in found["metrics"] if each["key"] == "reward/mean")
    assert reward["verdicts"] == ["outside"] and reward["spreads"][0]["seeds"] == 3 and reward["spreads"][1] is None
