"""Experiments in isolated copies: overrides, the workspace left alone, what DVC then knows, and results shared between copies."""

import hashlib
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import small_lineage
from small_lineage import dvc, git, ran

from pipeline.errors import DataError, ParamsError, PipelineError
from pipeline.lineage.execute import bring_up
from pipeline.lineage.experiment import Experiment, describe_all, open_experiment
from pipeline.lineage.overrides import check_overrides, parse_overrides, slug, write_overrides
from pipeline.lineage.plan import Verdict, read_plan
from pipeline.lineage.sharing import sole_runner
from pipeline.params import load_params
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]


def test_values_are_yaml_and_names_are_short() -> None:
    texts = ["grpo.lr=1e-4", "model.use_moe=true", "grpo.max_steps=null", "lora.targets=[q_proj, o_proj]", "grpo.kl_coef=0.02"]
    overrides = parse_overrides(texts)
    assert list(overrides.items()) == [
        ("grpo.kl_coef", 0.02),
        ("grpo.lr", 1e-4),
        ("grpo.max_steps", None),
        ("lora.targets", ["q_proj", "o_proj"]),
        ("model.use_moe", True),
    ]
    assert slug({"grpo.lr": 1e-4}) == "grpo-lr-1e-4" == slug(parse_overrides(["grpo.lr=0.0001"]))
    assert slug({"grpo.kl_coef": 0.02, "grpo.loss": "dr_grpo"}) == "grpo-kl-coef-0.02-grpo-loss-dr-grpo"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("grpo.lrr=1", "override: grpo.lrr: unknown key; did you mean `lr`?"),
        ("grop.lr=1", "override: grop: unknown key; did you mean `grpo`?"),
        ("grpo.lr=fast", "override: grpo.lr='fast': input should be a valid number"),
        ("grpo.lr.x=1", "override: grpo.lr.x: grpo.lr has no keys below it"),
        ("grpo.lr", "override 'grpo.lr': must be KEY=VALUE"),
        ("grpo.lr=[1", "override 'grpo.lr=[1': the value is not YAML"),
        ("grpo.lr=" + "[" * 1200, "[': the value is not YAML"),
        ("reward.external=nowhere", "reward.external='nowhere': no such folder"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, line: str) -> None:
    with pytest.raises(ParamsError) as caught:
        check_overrides(ROOT, parse_overrides([override]))
    assert len(caught.value.lines) == 1 and line in caught.value.lines[0]


def test_only_the_lines_of_the_keys_change(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = (ROOT / "params.yaml").read_text()
    path.write_text(before)
    write_overrides(path, {"grpo.lr": 3e-4, "lora.targets": ["k_proj"], "ppo.max_steps": None})
    lines = list(zip(before.splitlines(), path.read_text().splitlines(), strict=True))
    assert [new.strip() for old, new in lines if old != new] == ["targets: [k_proj]", "max_steps: null", "lr: 0.0003"]
    params = load_params(path)
    assert params.grpo.lr == 3e-4 and params.lora.targets == ("k_proj",) and params.ppo.max_steps is None


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lineage.make(tmp_path_factory.mktemp("lineage"))


def run(experiment: Experiment, *stages: str) -> None:
    for stage in stages:
        planned = next(each for each in read_plan(experiment.workspace) if each.stage == stage)
        stop = threading.Event()
        with sole_runner(experiment.workspace, stage, planned.recipe, experiment.environment, stop):
            outcome = bring_up(experiment.workspace, stage, on_line=print, stop=stop, environment=experiment.environment)
        assert outcome.code == 0, outcome


def visible(root: Path) -> dict[str, bytes]:
    """Every file of the workspace that is a user's or a stage's, by path."""
    inner = (".git", ".dvc", ".runs")
    files = [path for path in root.rglob("*") if path.is_file() and path.relative_to(root).parts[0] not in inner]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files if "__pycache__" not in path.parts}


def assert_cache_is_intact(root: Path) -> None:
    for path in (root / ".dvc/cache/files/md5").glob("??/*"):
        if not path.name.endswith(".dir"):
            assert hashlib.md5(path.read_bytes()).hexdigest() == path.parent.name + path.name


@pytest.mark.slow
def test_an_experiment_leaves_the_workspace_alone_and_is_one_of_dvcs(lineage: Path) -> None:
    (lineage / "pipeline/factor.py").write_text("FACTOR = 20\n")  # an edit of code that is not committed
    (lineage / "pipeline/extra.py").write_text("")  # nor is this
    before = visible(lineage)
    with open_experiment(lineage, "grpo", ["grpo.lr=1e-3"], threading.Event()) as experiment:
        run(experiment, "code", "base", "grpo")
        experiment.save()
        experiment.discard()
    assert ran(lineage) == ["code 0.001", "base 0.001", "grpo 0.001"]
    before.pop("ran.txt")
    assert {name: content for name, content in visible(lineage).items() if name != "ran.txt"} == before
    assert not experiment.workspace.exists() and (experiment.folder / "grpo.log").read_text().startswith("Running stage 'grpo'")
    assert_cache_is_intact(lineage)

    assert experiment.name.startswith("grpo-lr-1e-3-")
    shown = json.loads(dvc(lineage, "exp", "show", "--json"))
    (found,) = shown[1]["experiments"]
    assert found["name"] == experiment.name
    revision = found["revs"][0]["data"]
    assert revision["metrics"]["metrics/grpo.json"]["data"]["reward/mean"] == 20 - 1e-3  # the copy's own code
    assert revision["params"]["params.yaml"]["data"]["grpo"]["lr"] == 1e-3
    changed = git(lineage, "diff", "--name-only", "HEAD", experiment.ref).split()
    assert changed == ["dvc.lock", "metrics/grpo.json", "params.yaml", "pipeline/extra.py", "pipeline/factor.py"]
    locked = read_yaml(lineage / "dvc.lock")["stages"]["eval"]
    (lineage / "lock").write_text(git(lineage, "show", f"{experiment.ref}:dvc.lock"))
    assert read_yaml(lineage / "lock")["stages"]["eval"] == locked  # it did not run, and nothing says so
    (lineage / "lock").unlink()

    with open_experiment(lineage, "grpo", ["grpo.lr=0.001"], threading.Event()) as again:  # the same, and finished
        assert again.name == experiment.name
        assert {planned.verdict for planned in read_plan(again.workspace, again.targets)} == {Verdict.UP_TO_DATE}
        again.discard()

    dvc(lineage, "gc", "--workspace", "--all-experiments", "--force")
    dvc(lineage, "exp", "apply", experiment.name)
    assert load_params(lineage / "params.yaml").grpo.lr == 1e-3 and (lineage / "grpo.txt").read_text().endswith("0.001")
    assert {planned.stage: planned.verdict for planned in read_plan(lineage)}["grpo"] is Verdict.UP_TO_DATE
    git(lineage, "checkout", "--", ".")
    (lineage / "pipeline/extra.py").unlink()
    dvc(lineage, "checkout", "--quiet")
    (lineage / "ran.txt").write_text("")


def test_a_source_that_git_ignores_is_taken_along_and_an_absent_one_named(lineage: Path) -> None:
    rows = lineage / "data/raw/rows.jsonl"
    with open_experiment(lineage, "base", ["pretrain.lr=2e-3"], threading.Event()) as experiment:
        taken = experiment.workspace / "data/raw/rows.jsonl"
        assert taken.read_text() == "{}\n" and taken.stat().st_ino == rows.stat().st_ino
        experiment.discard()
    rows.unlink()
    with (
        pytest.raises(DataError, match="^data/raw/rows.jsonl: no such file, and stage base reads it; put it there$"),
        open_experiment(lineage, "grpo", ["pretrain.lr=2e-3"], threading.Event()),
    ):
        pass
    assert not [path for path in (lineage / ".runs/experiments").glob("*2e-3*/*") if path.name != "lock"]
    rows.write_text("{}\n")
    with (
        pytest.raises(ParamsError, match="'grop': dvc.yaml has no such stage; did you mean `grpo`"),
        open_experiment(lineage, "grop", ["grpo.lr=1"], threading.Event()),
    ):
        pass


def test_other_sources_make_another_experiment(lineage: Path, tmp_path: Path) -> None:
    """Git ignores them; a link to a folder, which git does not look into, and files elsewhere count, too."""
    rows, linked, elsewhere = lineage / "data/raw/rows.jsonl", tmp_path / "folder/rows.jsonl", tmp_path / "rows.jsonl"
    dvc_yaml = (lineage / "dvc.yaml").read_text()
    linked.parent.mkdir()
    (lineage / "data/raw/linked").symlink_to(linked.parent)
    (lineage / "dvc.yaml").write_text(dvc_yaml.replace("data/raw/rows.jsonl", f"data/raw, {elsewhere}"))

    def experiment_and_its_sources() -> tuple[str, list[str]]:
        with open_experiment(lineage, "base", ["pretrain.lr=3e-3"], threading.Event()) as experiment:
            found = [experiment.workspace / name for name in ("data/raw/rows.jsonl", "data/raw/linked/rows.jsonl")]
            return experiment.name, [path.read_text() for path in found]

    try:
        seen = []
        for path in (rows, linked, elsewhere):
            path.write_text("{}\n")
        for path in (rows, linked, elsewhere):
            seen.append(experiment_and_its_sources())
            path.unlink()  # an editor puts a new file in the place of the old one
            path.write_text('{"mended": true}\n')
        seen.append(experiment_and_its_sources())
        assert len({name for name, _ in seen}) == 4
        assert [texts for _, texts in seen[:2]] == [["{}\n"] * 2, ['{"mended": true}\n', "{}\n"]]
        assert experiment_and_its_sources() == seen[-1]
    finally:
        rows.write_text("{}\n")
        (lineage / "data/raw/linked").unlink()
        (lineage / "dvc.yaml").write_text(dvc_yaml)


def test_a_source_that_an_override_names_counts(lineage: Path) -> None:
    dvc_yaml = (lineage / "dvc.yaml").read_text()
    (lineage / "dvc.yaml").write_text(dvc_yaml.replace("data/raw/rows.jsonl", "'data/raw/${reward.seed}.jsonl'"))
    try:
        names = []
        for text in ("1", "2"):
            (lineage / "data/raw/7.jsonl").write_text(text)
            names += [experiment.name for experiment in describe_all(lineage, "base", [["reward.seed=7"], ["ppo.seed=7"]])]
    finally:
        (lineage / "data/raw/7.jsonl").unlink()
        (lineage / "dvc.yaml").write_text(dvc_yaml)
    assert names[0] != names[2] and names[1] == names[3]


def test_many_choices_take_a_moment(lineage: Path) -> None:
    choices = [[f"grpo.seed={seed}", f"grpo.lr={lr}"] for seed in range(20) for lr in (0.1, 0.2, 0.3, 0.4, 0.5)]
    started = time.process_time()
    assert len({experiment.name for experiment in describe_all(lineage, "grpo", choices)}) == 100
    assert time.process_time() - started < 2.0  # 0.05 s per choice before params.yaml was read once


def test_edits_of_any_kind_reach_the_copy(lineage: Path) -> None:
    (lineage / "metrics/README.md").unlink()
    (lineage / "metrics/README.md").mkdir()
    (lineage / "metrics/README.md/new").write_text("file became folder")
    (lineage / "stages/run.py").rename(lineage / "run.py")
    (lineage / "stages/__init__.py").unlink()
    shutil.rmtree(lineage / "stages/__pycache__", ignore_errors=True)
    (lineage / "stages").rmdir()
    (lineage / "run.py").rename(lineage / "stages")
    named_otherwise = os.fsencode(lineage) + b"/caf\xe9"
    with open(named_otherwise, "w") as file:
        file.write("no UTF-8")
    try:
        with open_experiment(lineage, "code", ["pretrain.lr=4e-3"], threading.Event()) as experiment:
            assert (experiment.workspace / "metrics/README.md/new").exists() and (experiment.workspace / "stages").is_file()
            assert os.path.exists(os.fsencode(experiment.workspace) + b"/caf\xe9")
    finally:
        os.unlink(named_otherwise)
        (lineage / "stages").unlink()
        shutil.rmtree(lineage / "metrics/README.md")
        git(lineage, "reset", "--quiet", "--hard")


def test_what_a_workspace_lacks_is_one_line(lineage: Path) -> None:
    def fault(**files: str | None) -> str:
        before = {name: (lineage / name).read_text() for name in ("params.yaml", "dvc.yaml")}
        for name, text in files.items():
            (lineage / f"{name}.yaml").unlink()
            if text is not None:
                (lineage / f"{name}.yaml").write_text(text)
        try:
            with pytest.raises(PipelineError) as caught, open_experiment(lineage, "base", ["pretrain.lr=1"], threading.Event()):
                pass
        finally:
            for name, text in before.items():
                (lineage / name).write_text(text)
        (line,) = caught.value.lines
        return line

    dvc_yaml = (lineage / "dvc.yaml").read_text()
    assert "params.yaml: no such file" in fault(params=None)
    assert "params.yaml: must be a mapping of sections" in fault(params="")
    assert "YAML file structure is corrupted" in fault(dvc="stages: [")
    line = fault(dvc=dvc_yaml.replace("data/raw/rows.jsonl", "../rows.jsonl"))
    assert line == "../rows.jsonl: stage base reads it, but it leads elsewhere from an isolated copy; give its absolute path"


@pytest.mark.faults
def test_two_copies_run_a_common_recipe_once(lineage: Path) -> None:
    def one(lr: str) -> None:
        with open_experiment(lineage, "grpo", ["pretrain.lr=7e-4", f"grpo.lr={lr}"], threading.Event()) as experiment:
            run(experiment, "base", "grpo")
            experiment.discard()

    with ThreadPoolExecutor(2) as both:
        list(both.map(one, ["0.25", "0.5"]))
    stages = [line.partition(" ")[0] for line in ran(lineage)]
    assert sorted(stages) == ["base", "grpo", "grpo"]
