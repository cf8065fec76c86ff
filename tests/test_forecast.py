"""How long stages will take: past runs count where they did the same work."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import write_run

from pipeline.lineage.causes import FIRST
from pipeline.lineage.plan import Planned, Verdict
from pipeline.reading.forecast import Forecast, as_json, as_text, forecast

LOCK = """
schema: '2.0'
stages:
  code: {cmd: x, outs: [{path: data/code/grpo.json, md5: c}]}
  data@dpo:
    cmd: x
    deps: [{path: data/code/data.json, md5: c}, {path: raw/dpo.jsonl, md5: raw, size: 100}]
    params: {params.yaml: {data.held_out_frac: 0.1}}
    outs: [{path: data/prepared/dpo, md5: rows}]
  data@world:
    cmd: x
    deps: [{path: world.yaml, md5: recipe, size: 100}]
    outs: [{path: data/prepared/world, md5: rows2}]
  pretrain:
    cmd: x
    deps: [{path: data/prepared/dpo, md5: rows}, {path: external/None, md5: none}]
    params: {params.yaml: {model: {width: 64, dropout: 0}, pretrain.lr: 0.1, pretrain.epochs: 2, pretrain.seed: 1}}
    outs: [{path: base.pth, md5: base}]
  grpo:
    cmd: x
    deps: [{path: data/code/grpo.json, md5: c}, {path: base.pth, md5: base}]
    params: {params.yaml: {grpo.lr: 0.0001, grpo.seed: 42}}
    outs: [{path: grpo.pth, md5: g}]
"""
PRETRAIN = {"model.width": 64, "model.dropout": 0, "pretrain.lr": 0.1, "pretrain.epochs": 2, "pretrain.seed": 1}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A lineage that is up to date: data took 3 s, pretrain 10 s, grpo 60 s; a later run of grpo, of other parameters, 999 s."""
    (tmp_path / "dvc.lock").write_text(LOCK)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/dpo.jsonl").write_text("x" * 100)
    (tmp_path / "world.yaml").write_text("x" * 100)
    for stage in ("data@dpo", "data@world"):
        (tmp_path / ".runs" / stage).mkdir(parents=True)
        (tmp_path / ".runs" / stage / "exit.json").write_text('{"code": 0, "used": {"seconds": 3.0}}')
    base = write_run(tmp_path, 1, stage="pretrain", inputs={"data/prepared/dpo": "rows", "external/None": "none"})
    about = json.loads((base / "run.json").read_text())
    about["params"] = {"model": {"width": 64, "dropout": 0.0}, "pretrain": {"lr": 0.1, "epochs": 2, "seed": 1}}
    (base / "run.json").write_text(json.dumps(about))
    group = write_run(tmp_path, 2, inputs={"base.pth": "base", "data/code/grpo.json": "c"})
    other = write_run(tmp_path, 3, params={"group_size": 64}, inputs={"base.pth": "base"})
    ends = ((base, 10.0, {"base.pth": "base"}), (group, 60.0, {"grpo.pth": "g"}), (other, 999.0, {"grpo.pth": "o"}))
    for folder, seconds, outputs in ends:
        end = {"code": 0, "time_s": 1.0, "used": {"seconds": seconds}, "outputs": outputs}
        (folder / "exit.json").write_text(json.dumps(end))
    return tmp_path


def plan(*, source: str = "raw/dpo.jsonl", digest: str = "raw", recipe: str = "recipe", **pretrain: Any) -> list[Planned]:
    """What runs when pretrain gets other parameters, or the rows another source."""
    params = PRETRAIN | {key.replace("__", "."): value for key, value in pretrain.items()}
    data: Mapping[str, str | None] = {"data/code/data.json": "d", source: digest}
    read: Mapping[str, str | None] = {"data/prepared/dpo": None, "external/None": "none"}
    group: Mapping[str, str | None] = {"data/code/grpo.json": "d", "base.pth": None}
    return [
        Planned("code", Verdict.RUNS, [], []),
        Planned("data@dpo", Verdict.RUNS, ["x"], ["code"], None, {"data.held_out_frac": 0.2}, data),
        Planned("data@world", Verdict.RUNS, ["x"], ["code"], None, {}, {"world.yaml": recipe}),
        Planned("pretrain", Verdict.RUNS, ["x"], ["data@dpo"], None, params, read),
        Planned("grpo", Verdict.MAY_RUN, ["x"], ["code", "pretrain"], None, {"grpo.lr": 2e-4, "grpo.seed": 7}, group),
    ]


def seconds(repository: Path, planned: list[Planned]) -> dict[str, float | None]:
    return {each.planned.stage: each.seconds for each in forecast(planned, repository, repository)}


def test_rates_and_seeds_leave_the_work_as_it_was(repository: Path) -> None:
    found = seconds(repository, plan(pretrain__lr=0.2, model__dropout=0.1, pretrain__seed=5))
    assert found == {"code": None, "data@dpo": 3.0, "data@world": 3.0, "pretrain": 10.0, "grpo": 60.0}


@pytest.mark.parametrize("change", [{"model__width": 512}, {"pretrain__epochs": 3}, {"pretrain__epochs": None}])
def test_more_work_is_not_compared_and_neither_is_what_stands_behind_it(repository: Path, change: dict[str, Any]) -> None:
    found = seconds(repository, plan(**change))
    assert found == {"code": None, "data@dpo": 3.0, "data@world": 3.0, "pretrain": None, "grpo": None}


@pytest.mark.parametrize(("size", "near"), [(109, True), (91, True), (112, False), (80, False), (None, False)])
def test_a_source_may_change_a_little(repository: Path, size: int | None, near: bool) -> None:
    (repository / "raw/dpo.jsonl").unlink()
    if size is not None:
        (repository / "raw/dpo.jsonl").write_text("x" * size)
    found = seconds(repository, plan(digest="edited"))
    assert [found[stage] for stage in ("data@dpo", "pretrain", "grpo")] == ([3.0, 10.0, 60.0] if near else [None, None, None])


def test_another_source_and_another_recipe_are_other_work(repository: Path) -> None:
    (repository / "raw/own.jsonl").write_text("x" * 100)
    assert seconds(repository, plan(source="raw/own.jsonl"))["pretrain"] is None
    found = seconds(repository, plan(recipe="edited"))
    assert found["data@world"] is None and found["pretrain"] == 10.0


def test_a_failed_attempt_is_no_past(repository: Path) -> None:
    (repository / ".runs/data@dpo/exit.json").write_text('{"code": 3, "used": {"seconds": 1.0}}')
    assert seconds(repository, plan())["data@dpo"] is None
    (repository / "dvc.lock").write_text("")
    assert set(seconds(repository, plan()).values()) == {None}


def test_the_text_says_where_no_run_is_known(repository: Path) -> None:
    lines = list(as_text(forecast(plan(pretrain__epochs=9), repository, repository)))
    assert [line.split("  ")[-2].strip() for line in lines[1:5]] == ["3 s", "3 s", "no past run", "no past run"]
    assert lines[0].split() == ["code", "runs"]  # a second
    assert lines[-1].startswith("\n4 runs, 1 may run; about 6 s and 1 of unknown length for what runs")
    (row, *_) = json.loads(as_json(forecast(plan(), repository, repository)))
    assert sorted(row) == ["causes", "parents", "recipe", "seconds", "stage", "verdict"]


def test_a_tokenizer_that_would_be_trained_anew_is_a_warning() -> None:
    """Only where a model stands on the present one, and nothing pins it."""

    def warned(verdict: Verdict, cause: str, pinned: str | None, model: Verdict = Verdict.MAY_RUN) -> bool:
        planned = [
            Planned("tokenizer", verdict, [cause], [], None, {"tokenizer.init_from": pinned}),
            Planned("pretrain", model, ["unless tokenizer comes out unchanged"], ["tokenizer"]),
        ]
        return "warning: " in "\n".join(as_text([Forecast(each, None) for each in planned]))

    runs, up_to_date = Verdict.RUNS, Verdict.UP_TO_DATE
    assert warned(runs, "data/prepared/full_sft modified", None)
    assert warned(Verdict.MAY_RUN, "unless data@full_sft comes out unchanged", None)
    assert not warned(runs, "data/prepared/full_sft modified", "tokenizer")
    assert not warned(runs, FIRST, None)
    assert not warned(up_to_date, "", None, up_to_date)
    assert not warned(Verdict.RESTORED, "data/prepared/full_sft modified", None, Verdict.RESTORED)
