"""The plan against what `dvc repro` then does."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dvc_here
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.digests import digest
from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.plan import Planned, Verdict, read_plan

ROOT = Path(__file__).parents[1]
# Each stage notes in `ran` that it ran. `halve` gives the same for 2n and 2n + 1: what is behind it need not run.
STAGES = """
stages:
  code:
    cmd: echo code >> ran && cat script > code.txt
    deps: [script]
    outs: [code.txt]
  data:
    foreach: [a, b]
    do:
      cmd: echo data@${item} >> ran && cat ${item}.src > ${item}.txt
      deps:
        - code.txt
        - ${item}.src
      outs:
        - ${item}.txt
  halve:
    cmd: echo halve >> ran && echo $(( $(cat a.txt) / 2 )) > half.txt
    deps: [a.txt]
    outs: [half.txt]
  train:
    cmd: echo train >> ran && (cat half.txt b.txt; grep -o 'lr. [0-9]*' params.yaml) > model.txt
    deps: [half.txt, b.txt]
    params: [train.lr]
    outs: [model.txt]
  eval:
    cmd: echo eval >> ran && cat model.txt > metric.txt
    deps: [model.txt]
    params: [eval.n]
    outs: [metric.txt]
  gate:
    cmd: echo gate >> ran
    deps: [metric.txt]
    params: [eval.gate]
"""
ALL = ["code", "data@a", "data@b", "halve", "train", "eval", "gate"]
EDITS = {
    "script": ["x\n", "y\n"],
    "a.src": ["4\n", "5\n", "6\n"],
    "b.src": ["1\n", "2\n"],
    "params.yaml": [
        f"train: {{lr: {lr}}}\neval: {{n: {n}, gate: {gate}}}\n" for lr in (1, 2) for n in (1, 2) for gate in ("null", "[a]")
    ],
}
edits = st.lists(st.one_of([st.tuples(st.just(name), st.sampled_from(texts)) for name, texts in EDITS.items()]), max_size=3)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lineage that is up to date."""
    folder = tmp_path_factory.mktemp("project")
    dvc_here.init(folder)
    (folder / "dvc.yaml").write_text(STAGES)
    for name, texts in EDITS.items():
        (folder / name).write_text(texts[0])
    assert [(planned.stage, planned.verdict) for planned in read_plan(folder)][0] == ("code", Verdict.RUNS)
    assert repro(folder) == ALL
    return folder


def repro(folder: Path, *targets: str, run_cache: bool = False, single_item: bool = False) -> list[str]:
    """The stages that ran, in order."""
    (folder / "ran").write_text("")
    dvc_here.reproduce(folder, *targets, run_cache=run_cache, single_item=single_item)
    return (folder / "ran").read_text().split()


def by_verdict(plan: list[Planned], verdict: Verdict) -> set[str]:
    return {planned.stage for planned in plan if planned.verdict is verdict}


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits)
def test_what_is_certain_runs_and_nothing_else_does(project: Path, changes: list[tuple[str, str]]) -> None:
    for name, text in changes:
        (project / name).write_text(text)
    plan = read_plan(project)
    assert sorted(planned.stage for planned in plan) == sorted(ALL)
    ran = set(repro(project))
    certain = by_verdict(plan, Verdict.RUNS) | by_verdict(plan, Verdict.RESTORED)
    assert certain <= ran, plan
    assert ran <= certain | by_verdict(plan, Verdict.MAY_RUN)
    assert by_verdict(read_plan(project), Verdict.UP_TO_DATE) == set(ALL)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits)
def test_what_the_run_cache_has_is_restored_and_nothing_else(project: Path, changes: list[tuple[str, str]]) -> None:
    for name, text in changes:
        (project / name).write_text(text)
    plan = read_plan(project)
    ran = set(repro(project, *(planned.stage for planned in plan), run_cache=True, single_item=True))
    known = {planned.stage for planned in plan if planned.recipe}  # what its parents are still to make may have been there before
    assert by_verdict(plan, Verdict.RUNS) & known <= ran <= by_verdict(plan, Verdict.RUNS) | by_verdict(plan, Verdict.MAY_RUN)
    assert by_verdict(read_plan(project), Verdict.UP_TO_DATE) == set(ALL)


def test_behind_what_is_restored_all_is_certain(project: Path) -> None:
    (project / "a.src").write_text("400\n")
    repro(project)
    (project / "a.src").write_text("500\n")
    repro(project)
    (project / "a.src").write_text("400\n")
    plan = {planned.stage: planned.verdict for planned in read_plan(project, ["eval"])}
    restored = ["data@a", "halve", "train", "eval"]
    assert plan == {"code": "up to date", "data@b": "up to date"} | dict.fromkeys(restored, "restored")
    (project / "half.txt").unlink()
    assert {planned.stage: planned.verdict for planned in read_plan(project, ["eval"])} == plan
    assert repro(project, "eval", run_cache=True) == []


def test_overrides_are_planned_without_an_edit(project: Path) -> None:
    (project / "params.yaml").write_text("train: {lr: 1}\neval: {n: 1, gate: null}\n")
    repro(project)
    before = (project / "params.yaml").read_text()
    plan = {planned.stage: planned for planned in read_plan(project, overrides={"train.lr": 0.0003})}
    assert plan["train"].causes == ["train.lr 1 → 3e-4"] and plan["train"].verdict is Verdict.RUNS
    assert plan["eval"].causes == ["unless train comes out unchanged"]
    assert (project / "params.yaml").read_text() == before
    assert by_verdict(read_plan(project), Verdict.UP_TO_DATE) == set(ALL)


def test_causes_and_what_waits(project: Path) -> None:
    repro(project)
    (project / "a.src").write_text("40\n" if (project / "a.src").read_text() != "40\n" else "60\n")
    (project / "params.yaml").write_text("train: {lr: 7}\neval: {n: 1, gate: null}\n")
    plan = {planned.stage: planned for planned in read_plan(project, ["train"])}
    assert "eval" not in plan
    assert plan["data@a"].causes == ["a.src modified"] and plan["data@a"].verdict is Verdict.RUNS
    assert plan["data@b"].verdict is Verdict.UP_TO_DATE and plan["data@b"].causes == []
    assert plan["halve"].verdict is Verdict.MAY_RUN and plan["halve"].causes == ["unless data@a comes out unchanged"]
    assert (
        plan["train"].verdict is Verdict.RUNS
        and plan["train"].causes[0].startswith("train.lr ")
        and plan["train"].causes[0].endswith(" → 7")
    )
    assert plan["train"].parents == ["data@b", "halve"]
    repro(project)


def test_what_is_running_says_nothing_about_what_is_behind_it(project: Path) -> None:
    repro(project)
    plan = {planned.stage: planned for planned in read_plan(project, unsettled=["halve"])}
    assert plan["halve"].verdict is Verdict.RUNS and plan["train"].verdict is Verdict.MAY_RUN
    (project / "half.txt").unlink()  # DVC removes outputs before a stage runs
    assert {planned.stage: planned for planned in read_plan(project, unsettled=["halve"])} == plan
    dvc_here.checkout(project)


@pytest.mark.parametrize("stage", ["{cmd: echo 1 > o.txt, outs: [o.txt]}", "{cmd: 'true', deps: [d.txt]}"])
def test_a_stage_without_inputs_or_outputs_is_planned(tmp_path: Path, stage: str) -> None:
    dvc_here.init(tmp_path)
    (tmp_path / "dvc.yaml").write_text(f"stages: {{only: {stage}}}")
    (tmp_path / "d.txt").touch()
    assert by_verdict(read_plan(tmp_path), Verdict.RUNS) == {"only"}
    dvc_here.reproduce(tmp_path)
    (tmp_path / "d.txt").write_text("2")
    (tmp_path / "o.txt").unlink(missing_ok=True)
    assert by_verdict(read_plan(tmp_path), Verdict.RUNS) == {"only"}


def test_targets_are_groups_too_and_unknown_ones_are_named(project: Path) -> None:
    assert {planned.stage for planned in read_plan(project, ["data"])} == {"code", "data@a", "data@b"}
    with pytest.raises(ParamsError, match="'trane': dvc.yaml has no such stage; did you mean `train`"):
        read_plan(project, ["trane"])


@pytest.mark.parametrize(("targets", "expected"), [([], ALL), (["data"], ["code", "data@a", "data@b"])])
def test_the_order_is_that_of_the_file(project: Path, targets: list[str], expected: list[str]) -> None:
    """DVC's own order of stages that do not read each other follows Python's hash seed, which differs between processes."""
    said = f"from pipeline.lineage.plan import *; print(*(each.stage for each in read_plan(Path('.'), {targets})))"
    for seed in "1234":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", said], cwd=project, env=environment, check=True, capture_output=True, text=True
        )
        assert ended.stdout.split() == expected


def test_what_is_not_there_is_missing(project: Path) -> None:
    """In a new clone nobody has deleted it."""
    repro(project)
    source = project / "a.src"
    text = source.read_text()
    source.unlink()
    (project / "model.txt").unlink()
    plan = {planned.stage: planned for planned in read_plan(project)}
    assert plan["data@a"].causes == ["a.src missing"] and plan["train"].causes == ["model.txt missing"]
    assert plan["data@a"].inputs["a.src"] is None
    source.write_text(text)
    repro(project)


def test_what_a_stage_is_going_to_read_is_told(project: Path) -> None:
    repro(project)
    (project / "b.src").write_text("77\n")
    (project / "params.yaml").write_text("train: {lr: 9}\neval: {n: 1, gate: null}\n")
    plan = {planned.stage: planned for planned in read_plan(project)}
    assert plan["data@b"].inputs == {"code.txt": digest(project / "code.txt"), "b.src": digest(project / "b.src")}
    assert plan["train"].inputs == {"half.txt": digest(project / "half.txt"), "b.txt": None}  # data@b is still to write it
    assert plan["train"].params == {"train.lr": 9} and plan["gate"].params == {"eval.gate": None}
    repro(project)


def test_a_lock_file_that_is_being_written_is_waited_for(project: Path) -> None:
    from dvc.repo import Repo

    lock = project / "dvc.lock"
    whole = lock.read_bytes()
    with ThreadPoolExecutor(1) as pool:
        with Repo(str(project)).lock:
            lock.write_bytes(whole[: len(whole) // 2])  # DVC writes it in place
            plan = pool.submit(read_plan, project)
            with pytest.raises(TimeoutError):
                plan.result(4)  # longer than DVC itself waits
            lock.write_bytes(whole)
        assert [planned.stage for planned in plan.result(60)] == [planned.stage for planned in read_plan(project)]


@pytest.mark.parametrize("size", [0, 300, 700])
def test_half_a_lock_file_is_one_line_or_a_plan(project: Path, size: int) -> None:
    """DVC writes it in place: when it is killed at that moment, this is left."""
    lock = project / "dvc.lock"
    whole = lock.read_bytes()
    try:
        lock.write_bytes(whole[:size])
        assert all(planned.verdict is not Verdict.UP_TO_DATE for planned in read_plan(project)[3:])
    except PipelineError as error:
        assert len(error.lines) == 1 and "`git checkout dvc.lock` brings the committed one back" in error.lines[0]
    finally:
        lock.write_bytes(whole)
