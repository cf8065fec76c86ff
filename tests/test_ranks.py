"""Data-parallel ranks: 2 and 3 processes under torchrun (gloo, CPU) against one process, for every stage that trains.

Run as a script, this file is one of the processes.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_group_loop import Run as GroupRun
from test_group_loop import make_settings as group_settings
from test_ppo_loop import Run as PpoRun
from test_ppo_loop import make_settings as ppo_settings
from test_supervised_loop import language_task, make_dpo, make_language, make_reward
from test_supervised_loop import make_settings as supervised_settings
from tiny_runs import (
    CPU,
    MOE,
    MemoryRecorder,
    assert_bits_equal,
    assert_near,
    chats,
    documents,
    even,
    make_model,
    make_set,
    make_tokenizer,
    moments,
    pairs,
    prompts,
    snapshot,
)
from torch import Tensor, nn

from pipeline.curves import is_clocked
from pipeline.data.batches import Batch, SupervisedBatches
from pipeline.data.prompts import PromptTask
from pipeline.model.lora import add_lora
from pipeline.params.schema import Agent, Group, Ppo, Runtime, Supervised
from pipeline.rewards.scoring import Scored
from pipeline.rollout.records import StopReason, Trajectory
from pipeline.text.tokenizer import Tokenizer, load_tokenizer
from pipeline.tools.registry import ToolResult
from pipeline.training.device import Device, open_device
from pipeline.training.group_loop import train_group
from pipeline.training.ppo_loop import train_ppo
from pipeline.training.ranks import ALONE, Ranks, _pack, _unpack
from pipeline.training.rollouts import Rollout
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, train_supervised, validate
from pipeline.training.updater import seed_for
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
SIZES = (2, 3)
EMPTY = (1, 3, 4, 5)  # of six completions: all that rank 1 of 2 or of 3 samples, and fewer are left than three ranks
# AdamW divides a gradient by its size, so that rounding in a tiny one moves its weight by a share of the rate
SLOW: dict[str, Any] = {"lr": 3e-4, "max_steps": 3}
Outcome = dict[str, Any]


def outcome(state: TrainState, recorder: MemoryRecorder, summary: dict[str, float]) -> Outcome:
    """What a run leaves: the gradients of each update, weights and moments, and everything that was logged."""
    updaters: dict[str, Any] = state.updaters
    return {
        "gradients": {name: updater.gradients for name, updater in updaters.items()},
        "weights": {
            f"{part}/{name}": value for part, module in state.modules.items() for name, value in snapshot(module).items()
        },
        "moments": {f"{part}/{name}": value for part, updater in updaters.items() for name, value in moments(updater).items()},
        "lines": [(step, {k: v for k, v in metrics.items() if not is_clocked(k)}) for step, metrics in recorder.lines],
        "samples": recorder.samples,
        "summary": summary,
    }


def train_one(task: SupervisedTask, settings: Supervised, device: Device) -> Outcome:
    recorder = MemoryRecorder()
    return outcome(task.state, recorder, train_supervised(task, settings, device, recorder))


def train_pretrain(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """Batches of two rows: the third rank never has one."""
    settings = supervised_settings(accumulation_steps=3, val_every=1, max_grad_norm=0.5)
    return train_one(language_task(sets, tokenizer, settings, make_model(tokenizer, sharpness=4.0))[0], settings, device)


def train_full_sft(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    settings = supervised_settings(accumulation_steps=2, val_every=1, epochs=2)
    return train_one(make_language(sets, tokenizer, settings, sharpness=4.0, dropout=0.0), settings, device)


def train_lora(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    settings = supervised_settings(accumulation_steps=2, val_every=1)
    model = make_model(tokenizer, sharpness=4.0)
    add_lora(model, rank=4, alpha=8.0, targets=["q_proj", "down_proj"], seed=2)
    return train_one(language_task(sets, tokenizer, settings, model, name="full_sft", batch_size=4)[0], settings, device)


def train_dpo(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    settings = supervised_settings(accumulation_steps=2, val_every=1)
    return train_one(make_dpo(sets, tokenizer, settings, sharpness=4.0, dropout=0.1), settings, device)


def train_reward(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    settings = supervised_settings(accumulation_steps=2, val_every=1)
    return train_one(make_reward(sets, tokenizer, settings, sharpness=4.0, dropout=0.1), settings, device)


def train_policy(
    sets: Path,
    tokenizer: Tokenizer,
    device: Device,
    settings: Group | Ppo,
    change: Callable[[Rollout], Rollout] = lambda rollout: rollout,
    *,
    equal_after_first: bool = False,
) -> Outcome:
    """Of a stage that samples; beside the outcome how many trajectories of the first step this process sampled."""
    recorder = MemoryRecorder()
    run: Any = (PpoRun if isinstance(settings, Ppo) else GroupRun)(sets, tokenizer, settings)
    run.task.rollout = change(run.task.rollout)
    if equal_after_first:
        rows = {prompt.row for prompt in run.prompts.batch(0, 0)}
        run.task.score = lambda tasks, trajectories: [
            scored if task.row in rows else Scored(0.7, {}, True)
            for task, scored in zip(tasks, even(tasks, trajectories), strict=True)
        ]
    train: Any = train_ppo if isinstance(settings, Ppo) else train_group
    found = outcome(run.task.state, recorder, train(run.task, settings, device, recorder))
    return found | {"sampled": len(run.trajectories[0])}


def train_grpo(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """Old logprobs of the trainer itself, further sampling for groups without signal, cut completions left out."""
    settings = group_settings(
        **SLOW,
        loss="dapo",
        updates_per_rollout=2,
        old_logprobs="recomputed",
        dynamic_sampling={"max_rounds": 2},
        overlong={"buffer": 2, "penalty": 0.5, "train_truncated": False},
    )
    return train_policy(sets, tokenizer, device, settings)


def train_grpo_empty(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    settings = group_settings(**SLOW, batch_size=3, group_size=2, loss="grpo")
    keys = [[seed_for(1, "rollout", step, place, member) for place in range(3) for member in range(2)] for step in range(3)]
    return train_policy(sets, tokenizer, device, settings, lambda rollout: without_ids(rollout, keys))


def train_grpo_kl(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """After a step with a signal KL alone is left to learn from."""
    settings = group_settings(**SLOW, kl_coef=0.5, dynamic_sampling={"max_rounds": 1})
    return train_policy(sets, tokenizer, device, settings, equal_after_first=True)


def train_agent(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """What tools wrote lies between sampled tokens; sums are divided by the most tokens an episode may have."""
    plain = group_settings(**SLOW, loss="dr_grpo", entropy_coef=0.01)
    settings = Agent(**plain.model_dump(), max_turns=2, max_total_len=200)
    return train_policy(sets, tokenizer, device, settings, with_tools)


def train_ppo_whole(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """A step whose critic alone moves, mini-batches that leave ranks without rows, values for cut completions."""
    settings = ppo_settings(
        **SLOW,
        critic_lr=3e-4,
        mini_batch_size=4,
        max_rows=64,
        cache_gib=1.0,
        micro_batch_size=2,
        updates_per_rollout=2,
        critic_warmup_steps=1,
        bootstrap_truncated=True,
        entropy_coef=0.01,
    )
    return train_policy(sets, tokenizer, device, settings)


def train_ppo_stopped(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """The KL of the whole mini-batch ends the step."""
    settings = ppo_settings(**SLOW, critic_lr=3e-4, updates_per_rollout=4, warmup_steps=0, early_stop_kl=1e-4)
    return train_policy(sets, tokenizer, device, settings)


def train_ppo_empty(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    keys = [[seed_for(1, "rollout", step, place) for place in range(6)] for step in range(3)]
    settings = ppo_settings(**SLOW, critic_lr=3e-4, updates_per_rollout=2)
    return train_policy(sets, tokenizer, device, settings, lambda rollout: without_ids(rollout, keys))


def train_ppo_kl(sets: Path, tokenizer: Tokenizer, device: Device) -> Outcome:
    """After a step with a signal the KL in the rewards is all that tells tokens apart."""
    settings = ppo_settings(**SLOW, critic_lr=3e-4, kl_coef=0.5, kl_in_reward=True)
    return train_policy(sets, tokenizer, device, settings, equal_after_first=True)


CASES: dict[str, Callable[[Path, Tokenizer, Device], Outcome]] = {
    "pretrain": train_pretrain,
    "full_sft": train_full_sft,
    "lora": train_lora,
    "dpo": train_dpo,
    "reward": train_reward,
    "grpo": train_grpo,
    "grpo_empty": train_grpo_empty,
    "grpo_kl": train_grpo_kl,
    "agent": train_agent,
    "ppo": train_ppo_whole,
    "ppo_stopped": train_ppo_stopped,
    "ppo_empty": train_ppo_empty,
    "ppo_kl": train_ppo_kl,
}


def without_ids(rollout: Rollout, keys: Sequence[Sequence[int]]) -> Rollout:
    """A rollout whose completions at the places `EMPTY` of each step are empty."""
    empty = {of_step[place] for of_step in keys for place in EMPTY}

    def sample(tasks: Sequence[PromptTask], own_keys: Sequence[int]) -> list[Trajectory]:
        sampled = zip(own_keys, rollout(tasks, own_keys), strict=True)
        return [replace(t, ids=[], sampled=[], logprobs=[]) if key in empty else t for key, t in sampled]

    return sample


def with_tools(rollout: Rollout) -> Rollout:
    """A rollout whose trajectories go on, some of them, with ids of tools and then with sampled ones."""

    def sample(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        longer = []
        for key, t in zip(keys, rollout(tasks, keys), strict=True):
            n = key % 4
            ids = t.ids + [11] * n + [60 + key % 7] * n
            flags, logprobs = t.sampled + [False] * n + [True] * n, t.logprobs + [0.0] * n + [-1.5] * n
            longer.append(replace(t, ids=ids, sampled=flags, logprobs=logprobs))
        return longer

    return sample


class Parted:
    """Batches as ranks cut them, the parts one after another."""

    def __init__(self, batches: SupervisedBatches, size: int) -> None:
        self._batches, self._size = batches, size
        self.batches_per_epoch = batches.batches_per_epoch * size

    def batch(self, epoch: int, index: int) -> Batch | None:
        whole, part = divmod(index, self._size)
        return self._batches.batch(epoch, whole).part(part, self._size)

    def in_order(self) -> Iterator[Batch]:
        return self._batches.in_order()


def train_moe(sets: Path, tokenizer: Tokenizer, device: Device, parts: int = 1) -> Outcome:
    """Batches of five rows, on one process whole or in `parts`."""
    settings = supervised_settings(accumulation_steps=parts, batch_size=5)
    model = make_model(tokenizer, sharpness=4.0, **MOE)
    task, _ = language_task(sets, tokenizer, settings, model, batch_size=5)
    task.train = Parted(task.train, parts) if parts > 1 else task.train  # type: ignore[arg-type]
    return train_one(task, settings, device)


def sums_by_hand(ranks: Ranks) -> dict[str, Tensor | None]:
    """Gradients after summation of: rank + 1 everywhere; 5 on rank 0 alone; none at all; 2 in float64."""
    everywhere, on_first, nowhere = (nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    double = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    everywhere.grad = torch.full((2, 3), ranks.rank + 1.0)
    on_first.grad = torch.full((2, 3), 5.0) if ranks.rank == 0 else None
    double.grad = torch.full((4,), 2.0, dtype=torch.float64)
    ranks.sum_gradients([everywhere, double, on_first, nowhere])
    return {"everywhere": everywhere.grad, "on_first": on_first.grad, "nowhere": nowhere.grad, "double": double.grad}


def main(folder: Path, out: Path) -> None:
    """One rank: every case, its outcomes in `out/<rank>.pt`."""
    device = open_device(runtime())
    tokenizer, ranks = load_tokenizer(folder / "tokenizer"), device.ranks
    found: dict[str, Any] = {name: case(folder, tokenizer, device) for name, case in CASES.items()}
    found["moe"] = train_moe(folder, tokenizer, device)
    found["sums"] = sums_by_hand(ranks)
    found["gathered"] = [ranks.gather(list(ranks.mine(range(count)))) for count in range(8)]
    found["ranks"] = (ranks.rank, ranks.size)
    torch.save(found, out / f"{ranks.rank}.pt")


def runtime() -> Runtime:
    own = {"device": "cpu", "dtype": "float32", "threads": 1}
    return Runtime.model_validate(read_yaml(ROOT / "params.yaml")["runtime"] | own)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    tokenizer = make_tokenizer(folder / "tokenizer")
    rows = {"pretrain": documents(13), "full_sft": chats(13), "dpo": pairs(16), "rlaif": prompts(24)}
    for name, of_set in rows.items():
        make_set(folder, name, of_set, tokenizer)
    return folder


@pytest.fixture(scope="module")
def tokenizer(sets: Path) -> Tokenizer:
    return load_tokenizer(sets / "tokenizer")


@pytest.fixture(scope="module", params=SIZES)
def together(request: pytest.FixtureRequest, sets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 2 or 3 processes found."""
    out, size = tmp_path_factory.mktemp(f"ranks{request.param}"), request.param
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, __file__, str(sets), str(out)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def alone(sets: Path, tokenizer: Tokenizer) -> dict[str, Outcome]:
    return {name: case(sets, tokenizer, CPU) for name, case in CASES.items()}


def assert_same_run(left: Outcome, right: Outcome, tolerance: float = 1e-5) -> None:
    for name, gradients in right["gradients"].items():
        assert len(left["gradients"][name]) == len(gradients) > 0
        for own, other in zip(left["gradients"][name], gradients, strict=True):
            assert_near(own, other, tolerance)
    assert_near(left["weights"], right["weights"], tolerance)
    assert [step for step, _ in left["lines"]] == [step for step, _ in right["lines"]]
    for (step, own), (_, other) in zip(left["lines"], right["lines"], strict=True):
        assert own == pytest.approx(other, abs=tolerance, rel=tolerance, nan_ok=True), step
    assert left["summary"] == pytest.approx(right["summary"], abs=tolerance, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process(together: list[dict[str, Any]], alone: dict[str, Outcome], name: str) -> None:
    """Summed gradients of each update, weights, and every metric."""
    assert_same_run(together[0][name], alone[name])
    for other in together[1:]:  # the same bits on all, so that none drifts
        assert_bits_equal(other[name]["weights"], together[0][name]["weights"])
        assert_bits_equal(other[name]["moments"], together[0][name]["moments"])
        assert other[name]["summary"] == together[0][name]["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "agent", "ppo"])
def test_each_rank_samples_its_share(together: list[dict[str, Any]], alone: dict[str, Outcome], name: str) -> None:
    shares = [found[name]["sampled"] for found in together]
    assert sum(shares) == alone[name]["sampled"] and max(shares) - min(shares) <= 1
    assert [step for step, _ in together[0][name]["samples"]] == [step for step, _ in alone[name]["samples"]]
    for (_, own), (_, other) in zip(together[0][name]["samples"], alone[name]["samples"], strict=True):
        assert [row["completion"] for row in own] == [row["completion"] for row in other]


def test_the_cases_are_what_they_say(alone: dict[str, Outcome]) -> None:
    assert alone["ppo_stopped"]["summary"]["train/early_stops"] > 0
    grpo = [metrics for _, metrics in alone["grpo"]["lines"]]
    assert 0 < max(metrics["rollout/truncated_frac"] for metrics in grpo) < 1
    for name in ("grpo_empty", "ppo_empty"):
        rows = alone[name]["samples"][0][1]
        assert [place for place, row in enumerate(rows[:4]) if not row["completion"]] == [1, 3]


@pytest.mark.slow
def test_sums_are_those_of_hand_arithmetic(together: list[dict[str, Any]]) -> None:
    size = len(together)
    for rank, found in enumerate(together):
        sums = found["sums"]
        assert found["ranks"] == (rank, size)
        assert sums["everywhere"].tolist() == [[{2: 3.0, 3: 6.0}[size]] * 3] * 2  # 1 + 2 (+ 3)
        assert sums["on_first"].tolist() == [[5.0] * 3] * 2
        assert sums["nowhere"] is None
        assert sums["double"].dtype == torch.float64 and sums["double"].tolist() == [2.0 * size] * 4
        assert found["gathered"] == [list(range(count)) for count in range(8)]


@pytest.mark.slow
def test_routers_balance_per_rank(together: list[dict[str, Any]], sets: Path, tokenizer: Tokenizer) -> None:
    """With experts, ranks are one process whose micro-batches are the ranks' parts: each part's routers take statistics of its
    own. Against whole batches that moves the balance loss alone: here, over 5 rows, by less than 5 %.
    """
    size = len(together)
    parted, whole = train_moe(sets, tokenizer, CPU, parts=size), train_moe(sets, tokenizer, CPU)
    assert_same_run(together[0]["moe"], parted)
    own, other = together[0]["moe"]["lines"][1][1], whole["lines"][1][1]
    assert 1e-4 < abs(own["moe/aux_loss"] / other["moe/aux_loss"] - 1) < 0.05
    language = [metrics["train/loss"] - metrics["moe/aux_loss"] for metrics in (own, other)]
    assert language[0] == pytest.approx(language[1], abs=1e-5)


def test_what_ranks_send_comes_back_and_nothing_else_is_built() -> None:
    trajectory = Trajectory([1, 2], [3], [True], [-0.5], [], [[ToolResult("{}", True)]], StopReason.CONTEXT, True)
    scored = [{"loss": 0.5, "all": (1, None, "é")}, torch.arange(3), torch.zeros(2, dtype=torch.bfloat16), {4, 5}, b"x"]
    received = _unpack(_pack([trajectory, *scored]))
    assert received[0] == trajectory and received[0].stop is StopReason.CONTEXT and received[1] == scored[0]
    assert all(torch.equal(left, right) for left, right in zip(received[2:4], scored[1:3], strict=True))
    assert received[4:] == scored[3:]


@pytest.mark.parametrize("call", [(os.system, ("touch taken-over",)), (read_yaml, ("params.yaml",)), (eval, ("1",))])
def test_bytes_that_would_call_something_are_refused(
    call: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process of the machine could send them to a rank's port."""

    class Attack:
        def __reduce__(self) -> Any:
            return call

    monkeypatch.chdir(tmp_path)
    for bytes_ in (_pack([Attack()]), torch.frombuffer(bytearray(pickle.dumps(Attack())), dtype=torch.uint8)):
        with pytest.raises((pickle.UnpicklingError, AttributeError)):
            _unpack(bytes_)
    assert not list(tmp_path.iterdir())


def test_one_process_is_left_as_it_is(sets: Path, tokenizer: Tokenizer) -> None:
    assert open_device(runtime()).ranks == ALONE and ALONE.key == () and Ranks(1, 3).key == (1,)
    assert seed_for(1, "dropout", 4, *ALONE.key) == seed_for(1, "dropout", 4) != seed_for(1, "dropout", 4, *Ranks(0, 2).key)
    items = [object(), object()]
    assert ALONE.gather(items) == items == list(ALONE.mine(items))
    parameter = nn.Parameter(torch.zeros(2))
    ALONE.sum_gradients([parameter])
    assert parameter.grad is None
    task, _ = language_task(sets, tokenizer, supervised_settings(), make_model(tokenizer))
    assert validate(task, ALONE) == validate(task)


@pytest.mark.parametrize("name", ["pretrain", "dpo"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_hold_every_row_once(sets: Path, tokenizer: Tokenizer, name: str, size: int) -> None:
    settings = supervised_settings()
    if name == "dpo":
        batch = make_dpo(sets, tokenizer, settings).train.batch(0, 0)
    else:
        batch = language_task(sets, tokenizer, settings, make_model(tokenizer), batch_size=4)[0].train.batch(0, 0)
    parts = [batch.part(rank, size) for rank in range(size)]
    assert [part is None for part in parts] == [rank >= 4 for rank in range(size)]
    present = [part for part in parts if part is not None]
    assert sorted(row for part in present for row in part.rows) == sorted(batch.rows)
    assert sum(part.num_trained for part in present) == batch.num_trained
    for part in present:
        for place, row in enumerate(part.rows):
            where, sides = batch.rows.index(row), 2 if name == "dpo" else 1
            for side in range(sides):
                at, of = side * len(part.rows) + place, side * len(batch.rows) + where
                assert torch.equal(part.input_ids[at], batch.input_ids[of]) and torch.equal(part.labels[at], batch.labels[of])
            field = "dropped" if name == "dpo" else "row_bytes"
            assert getattr(part, field)[place] == getattr(batch, field)[where]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
