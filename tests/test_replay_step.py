"""Steps of ppo, grpo and agent computed again from what they sampled: agreement to 1e-6, and what is noticed or refused."""

import hashlib
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_group_loop import AgentRun, agent_settings
from test_group_loop import Run as GroupRun
from test_group_loop import make_settings as group_settings
from test_ppo_loop import Run as PpoRun
from test_ppo_loop import make_settings as ppo_settings
from tiny_runs import CPU, Score, even, prompts, sets_fixture, tokenizer_fixture

from pipeline.data.prompts import PromptTask
from pipeline.errors import DataError, DiskSpaceError, ParamsError, PipelineError
from pipeline.lineage.code_hash import write_code_hashes
from pipeline.lineage.recipe import check_recipe
from pipeline.params import load_params
from pipeline.params.load import parse_params
from pipeline.reading.agreement import Compared, Replayed, as_json, compare, print_replayed, summary
from pipeline.reading.replayed import params_of, replay, replay_step
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import Trajectory
from pipeline.stage import stage_run
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.registry import ToolResult
from pipeline.tracking import space
from pipeline.tracking.records import Record
from pipeline.tracking.rollouts import read_rollouts, write_rollouts
from pipeline.tracking.run_folder import RunFolder
from pipeline.training.group_loop import train_group
from pipeline.training.ppo_loop import train_ppo
from pipeline.training.rollouts import RolloutTask
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[1]
KINDS = ("grpo", "agent", "ppo")
tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(24))  # 18 + 6 prompts


def worded(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """What the text says decides, and every third prompt earns the same whatever the policy writes."""
    scored = []
    for task, trajectory, of_ids in zip(tasks, trajectories, even(tasks, trajectories), strict=True):
        text = trajectory.turns[-1].text if trajectory.turns else ""
        terms = of_ids.terms | {"text": 0.25 * (text.count("e") - text.count("a"))}
        total = 0.7 if task.row % 3 == 0 else sum(terms.values())
        scored.append(Scored(total, terms, total > 0))
    return scored


SETTINGS: dict[str, Any] = {
    "grpo": group_settings(
        loss="grpo",
        updates_per_rollout=2,
        lr=0.003,
        max_steps=4,
        epochs=2,
        dynamic_sampling={"max_rounds": 2},
    ),
    "agent": agent_settings(epochs=4, lr=0.003),
    "ppo": ppo_settings(updates_per_rollout=3, mini_batch_size=3, lr=0.01, early_stop_kl=0.01, max_steps=4, epochs=2),
}


@dataclass(frozen=True)
class Trained:
    """A finished run, and how its task is opened anew."""

    folder: RunFolder
    kind: str
    open: Callable[..., Any]

    def replay(self, step: int, **changes: Any) -> Replayed:
        return replay(Record(self.folder), step, self.open(**changes).task, SETTINGS[self.kind], CPU, self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.open.tokenizer  # type: ignore[attr-defined]

    def copy(self, path: Path) -> "Trained":
        return replace(self, folder=RunFolder(shutil.copytree(self.folder.path, path / self.kind / self.folder.recipe / "1")))


class Opener:
    """Opens a fresh task of a kind."""

    def __init__(self, kind: str, sets: Path, tokenizer: Tokenizer, folder: Path) -> None:
        self.kind, self.sets, self.tokenizer, self.folder = kind, sets, tokenizer, folder

    def __call__(self, score: Score = worded) -> Any:
        settings = SETTINGS[self.kind]
        if self.kind == "agent":
            return AgentRun(self.folder, self.tokenizer, settings)
        run: Any = PpoRun if self.kind == "ppo" else GroupRun
        return run(self.sets, self.tokenizer, settings, score=score)


def train(root: Path, kind: str, task: RolloutTask, **runtime: Any) -> RunFolder:
    """Trains a task as its stage does; saves after steps 2 and 4 stay."""
    quiet = {"device": "cpu", "threads": 1, "save_every_s": 1e9, "progress": "off", "mlflow": False, "replay_every_steps": 2}
    settings = load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet | runtime)
    trainer: Any = train_ppo if kind == "ppo" else train_group
    with stage_run(kind, params={}, inputs=[], runtime=settings, root=root) as run:
        trainer(task, SETTINGS[kind], CPU, run)
    return run.folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, sets: Path, tokenizer: Tokenizer) -> dict[str, Trained]:
    """A run of four steps of each kind, and what it sampled."""
    trained = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        opener = Opener(kind, sets, tokenizer, root / "sets")
        trained[kind] = Trained(train(root, kind, opener().task), kind, opener)
    return trained


def files(folder: RunFolder) -> dict[str, tuple[bytes, int]]:
    found = [path for path in sorted(folder.path.rglob("*")) if path.is_file()]
    return {path.relative_to(folder.path).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


# Agreement


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_agrees_and_the_run_folder_is_only_read(runs: dict[str, Trained], kind: str, tmp_path: Path) -> None:
    run, starts = runs[kind].copy(tmp_path), {1: 0, 2: 0, 3: 2, 4: 2}
    before = files(run.folder)
    assert set(starts) == {line["step"] for line in Record(run.folder).lines()}
    logged = {line["step"]: line["metrics"] for line in Record(run.folder).lines()}
    for step, start in starts.items():
        replayed = run.replay(step)
        assert replayed.apart == [] and replayed.first_apart is None and replayed.start == start
        names = {each.name for each in replayed.metrics}
        clocked = {name for name in logged[step] if name.startswith(("time/", "memory/")) or name.endswith("_per_s")}
        assert names == logged[step].keys() - clocked and {"train/grad_norm", "policy/loss", "reward/mean"} <= names
        assert all(each.logged is not None for each in replayed.metrics)
    assert files(run.folder) == before
    for save in run.folder.path.glob("state-*"):
        save.unlink()
    whole = run.replay(4)
    assert whole.apart == [] and whole.start == 0


def test_the_runs_took_the_turns_that_are_to_be_tested(runs: dict[str, Trained]) -> None:
    metrics = {kind: Record(run.folder).metrics for kind, run in runs.items()}
    assert max(metrics["grpo"]["rollout/resample_rounds"].values) >= 1
    assert metrics["agent"]["tool/calls_mean"].values == [1.0] * 4
    assert metrics["ppo"]["policy/approx_kl_at_stop"].values and metrics["ppo"]["value/loss"].values


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_sample_table(runs: dict[str, Trained], kind: str) -> None:
    """Samples are logged at steps 1, 3 and 4, ppo's of 16 rows and the others' of two groups."""
    for step, logged in ((1, True), (2, False), (3, True)):
        replayed = runs[kind].replay(step)
        assert all({"reward", "advantage", "completion"} <= row.keys() for row in replayed.rows)
        assert len(replayed.samples) == (min(len(replayed.rows), 6 if kind == "ppo" else 8) if logged else 0)
        for row in replayed.samples:
            assert {"reward", "advantage"} <= {each.name for each in row} and all(each.agrees for each in row)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_every_trajectory_that_was_sampled(
    kind: str, tmp_path: Path, sets: Path, tokenizer: Tokenizer, runs: dict[str, Trained]
) -> None:
    run = Opener(kind, sets, tokenizer, tmp_path / "sets")()
    sampled: list[Trajectory] = []
    inner = run.task.rollout

    def rollout(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        sampled.extend(inner(tasks, keys))
        return sampled[-len(tasks) :]

    run.task.rollout = rollout
    folder = train(tmp_path, kind, run.task)
    kept = [one for step in range(1, 5) for one in read_rollouts(folder.rollout(step), tokenizer).values()]
    assert kept == sampled and len(sampled) > 4 * 5
    assert any(one.tool_results for one in sampled) == (kind == "agent")
    for step in range(1, 5):  # another process with the same draws
        assert folder.rollout(step).read_bytes() == runs[kind].folder.rollout(step).read_bytes()


def test_lone_surrogates_errors_and_empty_trajectories_come_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    odd = Trajectory([1, 2], [], [], [], [], [[ToolResult("\ud800 \u00fc", is_error=True)], []])
    for rollouts in ({}, {2**63 - 1: odd, 0: odd}):
        write_rollouts(tmp_path / "rollouts" / "1.npz", rollouts)
        assert read_rollouts(tmp_path / "rollouts" / "1.npz", tokenizer) == rollouts
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["1.npz"]


def test_a_resume_writes_the_same_files(runs: dict[str, Trained], tmp_path: Path) -> None:
    open_task, calls = runs["grpo"].open, []

    def breaks(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        calls.append(len(tasks))
        if len(calls) == 7:
            raise RuntimeError("a fault")
        return worded(tasks, trajectories)

    with pytest.raises(SystemExit):
        train(tmp_path, "grpo", open_task(score=breaks).task)
    (path,) = (tmp_path / ".runs/grpo").glob("*/1")
    broken = RunFolder(path)
    assert broken.commits() == [2] and broken.rollout(2).exists() and not broken.rollout(4).exists()
    broken.rollout(3).write_bytes(b"torn")
    assert train(tmp_path, "grpo", open_task().task) == broken
    for step in range(1, 5):
        assert broken.rollout(step).read_bytes() == runs["grpo"].folder.rollout(step).read_bytes()


# What is noticed


def rewrite(path: Path, **arrays: Callable[[Any], Any]) -> None:
    """Changes arrays of a rollout file."""
    with np.load(path) as archive:
        found = {name: archive[name].copy() for name in archive.files}
    with path.open("wb") as file:
        np.savez(file, **{name: arrays[name](values) if name in arrays else values for name, values in found.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_a_tampered_logprob_is_noticed(runs: dict[str, Trained], kind: str, tmp_path: Path) -> None:
    run = runs[kind].copy(tmp_path)
    rewrite(run.folder.rollout(1), logprobs=lambda values: values - np.float32(1e-3))
    replayed = run.replay(1)
    apart = {each.name for each in replayed.apart}
    assert "rollout/logprob_diff_max" in apart and not apart & {"reward/mean", "rollout/length_mean"}


def test_a_tampered_record_is_noticed(runs: dict[str, Trained], tmp_path: Path) -> None:
    """And a difference just below 1e-6 is none."""
    run = runs["ppo"].copy(tmp_path)
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    lines[0]["metrics"]["reward/mean"] += 5e-7
    lines[2]["metrics"]["reward/mean"] += 5e-6
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [json.loads(line) for line in run.folder.samples.read_text().splitlines()]
    rows[1]["advantage"] += 1e-3
    run.folder.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.name for each in run.replay(1).apart] == ["row 1 advantage"]
    replayed = run.replay(3)  # the records before its save are damaged, so it begins at the start
    assert [each.name for each in replayed.apart] == ["reward/mean"] and replayed.start == 0
    later = run.replay(4)
    assert later.apart == [] and later.first_apart == 3


def test_other_rewards_are_noticed(runs: dict[str, Trained]) -> None:
    def paid(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return [replace(scored, total=scored.total + 1e-4) for scored in worded(tasks, trajectories)]

    replayed = runs["grpo"].replay(2, score=paid)
    assert "reward/mean" in {each.name for each in replayed.apart} and replayed.first_apart == 1
    assert "it begins at step 1" in summary(replayed)

    def same(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        return [Scored(0.0, {}, False) for _ in tasks]

    with pytest.raises(PipelineError, match=r"00000001\.npz: lacks trajectories that the replay asks for"):
        runs["grpo"].replay(1, score=same)


def test_the_rule_of_agreement() -> None:
    """1e-6, of the logged value where that is above 1; what was not finite agrees with what is not finite."""
    logged = {"a": 1000.0, "b": 1000.0, "c": 0.1, "d": None, "e": None, "f": 1.0, "step": 1, "text": "x", "time/a_s": 1.0}
    replayed = {"a": 1000.0009, "b": 1000.0011, "c": 0.1000011, "d": math.nan, "e": 1.0, "g": 1.0, "text": "y", "time/a_s": 2.0}
    agrees = {each.name: each.agrees for each in compare(logged, replayed)}
    assert agrees == {"a": True, "b": False, "c": False, "d": True, "e": False, "f": False, "g": False}


def test_both_ways_to_show_it(runs: dict[str, Trained], capsys: pytest.CaptureFixture[str]) -> None:
    replayed = runs["agent"].replay(3)
    assert summary(replayed).startswith("agent step 3, replayed from the save of step 2: ")
    assert "8 logged rows agree within 1e-06" in summary(replayed)
    broken = replace(replayed, metrics=[Compared("train/loss", 1.0, math.pi), Compared("x", None, 1.0), *replayed.metrics])
    tree = json.loads(as_json(broken, rows=True), parse_constant=pytest.fail)
    assert tree["agrees"] is False and tree["metrics"][1]["difference"] is None and tree["start"] == 2
    assert len(tree["rows"]) == len(replayed.rows) and tree["rows"][0]["compared"] and tree["rows"][-1]["compared"] is None
    assert "rows" not in json.loads(as_json(replayed, rows=False))
    assert "2 values differ by more than 1e-06: train/loss, x" in summary(broken)
    print_replayed(broken, rows=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["train/loss", "1", "3.141593", "2"] and lines[2].endswith("one side only")
    assert len(lines) == 2 + len(broken.metrics) + len(replayed.rows)


# What is refused


def damaged(whole: bytes) -> list[bytes]:
    """Cut, emptied, flipped, and no zip file at all."""
    places = range(0, len(whole), max(1, len(whole) // 60))
    flipped = [whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :] for place in places]
    return [b"", whole[:-1], whole[: len(whole) // 2], b"\0" * len(whole), b"\x93NUMPY", *flipped]


def test_torn_and_missing_files_are_one_line(runs: dict[str, Trained], tmp_path: Path) -> None:
    run = runs["grpo"].copy(tmp_path)
    path, known = run.folder.rollout(1), read_rollouts(run.folder.rollout(1), run.tokenizer)
    refused, whole = 0, path.read_bytes()
    for content in damaged(whole):
        path.write_bytes(content)
        try:
            assert read_rollouts(path, run.tokenizer) == known  # a flipped bit of a date, say
        except DataError as error:
            refused += 1
            assert str(error).startswith(f"{path}: torn or damaged") and "\n" not in str(error)
    assert refused > 50
    path.unlink()
    with pytest.raises(DataError, match=r"00000001\.npz: no such file, .*keep_rollouts: false, or `python -m pipeline gc`"):
        run.replay(2)


def test_nothing_is_kept_where_nobody_wants_it(runs: dict[str, Trained], tmp_path: Path) -> None:
    folder = train(tmp_path, "ppo", runs["ppo"].open().task, keep_rollouts=False)
    assert not folder.rollouts.exists() and folder.commits() == []  # no replay will begin there
    lines = [[line["metrics"]["train/loss"] for line in Record(each).lines()] for each in (folder, runs["ppo"].folder)]
    assert lines[0] == lines[1]


def test_a_step_that_was_not_logged_and_a_run_that_samples_nothing(runs: dict[str, Trained], tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="step 5 is not logged; it has steps 1 to 4$"):
        runs["grpo"].replay(5)
    with pytest.raises(ParamsError, match="a run of grpo; only steps of agent, ppo can be replayed"):
        replay_step(tmp_path, tmp_path, runs["grpo"].folder, 1, {"agent": runs["agent"].open, "ppo": runs["ppo"].open})


def test_a_run_brings_its_own_parameters(tmp_path: Path) -> None:
    tree = read_yaml(ROOT / "params.yaml")
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    folder = RunFolder(tmp_path / ".runs/grpo/key/1")
    folder.path.mkdir(parents=True)
    own = {"grpo": tree["grpo"] | {"lr": 0.125}, "rewards": {"length": tree["rewards"]["length"] | {"weight": 0.75}}}
    folder.about.write_text(json.dumps({"params": own}))
    params = params_of(Record(folder), tmp_path)
    assert params.grpo.lr == 0.125 and params.rewards.length.weight == 0.75
    changed = {"grpo": {**params.grpo.model_dump(mode="json"), "lr": tree["grpo"]["lr"]}}
    assert changed["grpo"] == parse_params(tree).grpo.model_dump(mode="json")
    assert params.rewards.model_dump(exclude={"length"}) == parse_params(tree).rewards.model_dump(exclude={"length"})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A commit with a script, a module, and an input."""
    for name, text in {
        "stages/grpo.py": "import pipeline.loss\n",
        "pipeline/loss.py": "def loss():\n    return 1\n",
        "prompts.jsonl": "{}\n",
        "dvc.yaml": "stages:\n  grpo:\n    cmd: x\n    deps: [prompts.jsonl, data/code/grpo.json]\n    params: [grpo.lr]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_other_inputs_and_code_are_refused_with_the_way_back(repository: Path) -> None:
    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()

    write_code_hashes(repository, repository / "data/code")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()
    read = {f"dvc.{name}": md5(repository / name) for name in ("prompts.jsonl", "data/code/grpo.json")}
    about = {"tags": read | {"dvc.stage": "grpo", "git.commit": commit, "git.dirty": "true"}, "params": {}}
    params = load_params(ROOT / "params.yaml")

    def refusal() -> str:
        with pytest.raises(DataError) as refused:
            check_recipe(repository, repository, "grpo", about, params)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    check_recipe(repository, repository, "grpo", about, params)
    (repository / "pipeline/loss.py").write_text("def loss():  # a comment\n    return 1\n")
    check_recipe(repository, repository, "grpo", about, params)
    (repository / "prompts.jsonl").write_text("{} \n")
    assert refusal().startswith("grpo: differs from what the run was made with: prompts.jsonl modified; ")
    (repository / "prompts.jsonl").unlink()
    assert "prompts.jsonl is not there" in refusal()
    (repository / "prompts.jsonl").write_text("{}\n")
    cached = repository / ".dvc/cache/files/md5" / read["dvc.data/code/grpo.json"][:2] / read["dvc.data/code/grpo.json"][2:]
    cached.parent.mkdir(parents=True)
    cached.write_bytes((repository / "data/code/grpo.json").read_bytes())
    (repository / "pipeline/loss.py").write_text("def loss():\n    return 2\n")
    assert refusal() == (
        "grpo: differs from what the run was made with: pipeline.loss changed: loss; "
        f"`git checkout {commit[:12]} && dvc checkout` brings it back, but not the edits that were never committed"
    )


# Space


def test_rollouts_are_part_of_what_a_disk_must_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 prompts by 8 are 13 steps of 8 x 4 rows of 50 tokens, 7 bytes each: 145600 bytes; 20 are there already."""
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared/report.json").write_text('{"train": 100}')
    (tmp_path / "full_sft.pth").write_bytes(b"x" * 1000)
    folder = RunFolder(tmp_path / "run")
    folder.rollouts.mkdir(parents=True)
    folder.rollout(1).write_bytes(b"x" * 20)
    own = {"lr": 0.1, "epochs": 1, "max_steps": None, "batch_size": 8, "group_size": 4, "max_new_tokens": 50}
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update={"keep_saves": 1, "replay_every_steps": None})
    needed = 2 * 3000 + 145_600 - 20 + 2 * 1000  # and of 13 steps every fourth may keep a state: three

    def check(free: int, **changes: Any) -> None:
        monkeypatch.setattr(space.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))  # type: ignore[attr-defined]
        with_changes = runtime.model_copy(update=changes)
        space.check_space("grpo", folder, tmp_path, {"grpo": own}, ["prepared", "full_sft.pth"], with_changes)

    check(needed)
    with pytest.raises(DiskSpaceError, match=r"rollouts of 0\.1 MB and outputs.*, or set runtime\.keep_rollouts: false$"):
        check(needed - 1)
    check(needed - 145_600, keep_rollouts=False, replay_every_steps=4)
    check(needed + 3 * 3000, replay_every_steps=4)
    with pytest.raises(DiskSpaceError):
        check(needed + 3 * 3000 - 1, replay_every_steps=4)
