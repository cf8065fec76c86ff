"""SIGKILL at random and at chosen moments: whatever is killed and how often, the run ends as an undisturbed one.

The stages are the real scripts in a lineage of tiny models. A chain starts a stage, kills it, starts it again with other
settings of `runtime`, and so on; at its end, weights, metrics, curves, samples and the history must be those of the twin
that nobody touched, byte for byte.
"""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from faults.trainers import Lineage, Moment, memory_folder, run_folders, start

from pipeline.curves import is_clocked
from pipeline.tracking.run_folder import RunFolder, read_json

DENSE: dict[str, Any] = {
    "model.dropout": 0.1,
    "pretrain": {"epochs": 2, "batch_size": 4, "accumulation_steps": 3, "val_every": 5},
    "full_sft": {"batch_size": 4, "accumulation_steps": 2, "val_every": 4},
    "lora": {"epochs": 2, "batch_size": 4, "val_every": 4},
    "dpo": {"epochs": 2, "val_every": 4},
    "reward": {"epochs": 2, "val_every": 3},
}
EXPERTS: dict[str, Any] = {"model.use_moe": True, "model.moe_intermediate_size": 24}
SAVING = ({"save_every_s": 0.001}, {"save_every_s": 0.2}, {"save_every_s": 1e9, "keep_every_steps": 2})
CHAIN = 6
"""Kills in a row before a run may end, at most."""


@dataclass(frozen=True)
class Case:
    """A training stage, in a lineage and with settings of its own."""

    stage: str
    kills: int
    experts: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(
            [self.stage, *map(str, self.changes.get(f"{self.stage}", {}).values()), *(["experts"] if self.experts else [])]
        )


ROLLOUT = {"epochs": 2, "max_steps": 6, "updates_per_rollout": 2, "sample_every": 2}
CASES = [
    Case("pretrain", 12),
    Case("pretrain", 10, experts=True),
    Case("full_sft", 12),
    Case("lora", 10),
    Case("dpo", 10, changes={"dpo": {"reference": "cached"}}),
    Case("dpo", 10, changes={"dpo": {"reference": "live"}}),
    Case("reward", 10),
    Case("ppo", 16, experts=True, changes={"ppo": {**ROLLOUT, "mini_batch_size": 2}}),
    Case("grpo", 12, changes={"grpo": {**ROLLOUT, "dynamic_sampling": {"max_rounds": 1}}}),
    Case("grpo", 10, experts=True, changes={"grpo": ROLLOUT}),
    Case("agent", 12, changes={"agent": {**ROLLOUT, "max_turns": 3}}),
]
PHASES = (
    "pipeline.rollout.torch_engine:TorchRolloutEngine.generate",  # sampling, and the tables of greedy samples
    "pipeline.rewards.scoring:CompletionScorer.__call__",
    "pipeline.rewards.scoring:EpisodeScorer.__call__",
    "pipeline.tools.toolbox:Toolbox.call",
    "torch:Tensor.backward",  # within an accumulation window or a pass over mini-batches
    "pipeline.training.updater:Updater.update",
    "pipeline.training.supervised:validate",
    "pipeline.training.state:TrainState.state_dict",  # the beginning of a save
    "pipeline.tracking.recorder:JsonLines.append",
    "os:fsync",  # saves and outputs, step by step
    "os:replace",
    "os:unlink",
    "pipeline.checkpoint.files:write_atomically",
    "pipeline.curves:_read_lines",  # metrics are written, the curve is not yet
    "pipeline.tracking.run_folder:write_json",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def lineages(folder: Path) -> dict[bool, Lineage]:
    return {experts: Lineage(folder / f"lineage {experts}", DENSE | (EXPERTS if experts else {})) for experts in (False, True)}


def outputs(root: Path, stage: str) -> list[Path]:
    names = (f"checkpoints/{stage}.pth", f"checkpoints/{stage}.json", f"metrics/{stage}.json", f"plots/{stage}.csv")
    return [root / name for name in names]


@dataclass(frozen=True)
class Result:
    """What a finished run leaves, without what a clock decides."""

    files: dict[str, bytes]
    history: list[tuple[int, dict[str, float]]]

    @classmethod
    def of(cls, root: Path, stage: str) -> "Result":
        *earlier, folder = run_folders(root, stage)
        # one that ended before its first save was due leaves nothing to go on from
        assert all(read_json(before / "exit.json").get("code") == 0 and not RunFolder(before).commits() for before in earlier)
        outputs = [
            *sorted((root / "checkpoints").glob(f"{stage}.*")),
            root / f"metrics/{stage}.json",
            root / f"plots/{stage}.csv",
        ]
        files = {path.name: path.read_bytes() for path in [*outputs, folder / "samples.jsonl"]}
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        history = [
            (line["step"], {key: value for key, value in line["metrics"].items() if not is_clocked(key)}) for line in lines
        ]
        return cls(files, history)

    def check_steps(self) -> None:
        """Every step stands there, and each of its keys once."""
        keys = Counter((step, key) for step, metrics in self.history for key in metrics)
        assert max(keys.values()) == 1
        last = max(step for step, _ in self.history)
        trained = [step for step, metrics in self.history if "train/loss" in metrics or "reward/mean" in metrics]
        assert trained == list(range(1, last + 1))


class Twin:
    """An undisturbed run: its result, how long it took, and how often it passed each phase."""

    def __init__(self, lineage: Lineage, case: Case, folder: Path) -> None:
        self.lineage, self.case, self.folder = lineage, case, folder
        project = lineage.copy_for(case.stage, folder / "twin", case.changes)
        started = time.monotonic()
        trainer = start(project.root, case.stage, count=PHASES)
        assert trainer.wait() == 0, trainer.said()
        self.seconds = time.monotonic() - started
        self.result = Result.of(project.root, case.stage)
        self.result.check_steps()
        self.calls = {name: calls for name, calls in json.loads((project.root / "calls.json").read_text()).items() if calls}

    def chain(self, name: str, kills: Iterator[float | Moment]) -> int:
        """Kills a run again and again, at seconds after its start or at moments, lets it end, and compares; how often it died."""
        project = self.lineage.copy_for(self.case.stage, self.folder / name, self.case.changes)
        rng = random.Random(name)
        died, told, code = 0, [], -9
        for kill in kills:
            project.set_params({"runtime": {"keep_saves": rng.randint(1, 3), **rng.choice(SAVING)}})
            for output in outputs(project.root, self.case.stage):  # as DVC does
                output.unlink(missing_ok=True)
            trainer = start(project.root, self.case.stage, at=kill if isinstance(kill, Moment) else None)
            if isinstance(kill, float):
                trainer.process.join(kill)
                trainer.process.kill()
            code = trainer.wait()
            told.append((kill, code))
            assert code in (0, -9), (told, trainer.said())
            died += code == -9
            if code == 0:  # it was quicker: the next kill is for a run that goes on after its end
                continue
        if code:
            trainer = start(project.root, self.case.stage)
            assert trainer.wait() == 0, (told, trainer.said())
        found = Result.of(project.root, self.case.stage)
        assert found.history == self.result.history, told
        assert found.files.keys() == self.result.files.keys() and not list(project.root.glob("checkpoints/.*")), told
        for file, content in self.result.files.items():
            assert found.files[file] == content, (file, told)
        return died


def kill_at_random(twin: Twin, kills: int, seed: str) -> int:
    """At least `kills` SIGKILLs, in chains, at moments that are uniform over the duration of the run."""
    rng, died = random.Random(seed), 0
    for number in count():
        if died >= kills:
            return died
        died += twin.chain(f"random {number}", (rng.uniform(0.0, twin.seconds) for _ in range(min(CHAIN, kills - died))))
    raise AssertionError("unreachable")


def kill_in_phases(twin: Twin, seed: str) -> int:
    """SIGKILLs in every phase that the stage has, before or after one of its first calls, most of them in a resumed process."""
    rng = random.Random(seed)
    moments = [Moment(name, rng.randint(1, 1 + calls // 8), rng.random() < 0.5) for name, calls in twin.calls.items()]
    rng.shuffle(moments)
    chains = [iter(moments[start : start + CHAIN]) for start in range(0, len(moments), CHAIN)]
    return sum(twin.chain(f"phases {number}", chain) for number, chain in enumerate(chains))


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_kills_at_any_moment_changes_nothing(lineages: dict[bool, Lineage], folder: Path, case: Case) -> None:
    twin = Twin(lineages[case.experts], case, folder / str(case))
    random_kills, chosen_kills = kill_at_random(twin, case.kills, str(case)), kill_in_phases(twin, str(case))
    print(f"{case}: {random_kills} kills at random, {chosen_kills} in phases; undisturbed {twin.seconds:.1f} s")
    assert random_kills >= case.kills and chosen_kills >= len(twin.calls) // 3
    shutil.rmtree(twin.folder)


def test_a_few_kills_change_nothing(folder: Path) -> None:
    """The part of all this that every change runs."""
    small = {"model.dropout": 0.1, "pretrain": {"epochs": 2, "batch_size": 8, "accumulation_steps": 2, "val_every": 100}}
    twin = Twin(Lineage(folder / "small", small), Case("pretrain", 3), folder / "few")
    assert kill_at_random(twin, 3, "few") >= 3
    moments = [Moment("os:replace", 2), Moment("pipeline.training.updater:Updater.update", 2, after=True)]
    assert twin.chain("moments", iter(moments)) == 2
