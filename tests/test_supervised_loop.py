"""The supervised loop over tiny real sets and models: gradients of whole windows, validation, resume, and every objective."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    CPU,
    MOE,
    OPTIMIZER,
    Killed,
    MemoryRecorder,
    RouterSpy,
    SpoilingRecorder,
    SpyUpdater,
    assert_bits_equal,
    assert_near,
    chats,
    documents,
    make_model,
    make_set,
    moments,
    one_module,
    pairs,
    sets_fixture,
    snapshot,
    tokenizer_fixture,
    twin_adamw,
    twin_step,
    up_to,
)
from torch import Tensor

from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.errors import NumericsError
from pipeline.model.heads import RewardModel
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Dpo, Supervised
from pipeline.rewards.model import Reply, TrainedRewardModel
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.panels import chat_prompts, document_prompts, greedy_panel, pair_prompts
from pipeline.training.preference_objective import DirectPreference, cached_reference, live_reference
from pipeline.training.reward_objective import RewardModelling, score_scale, scored_panel
from pipeline.training.supervised import SupervisedTask, total_steps, train_supervised, train_window, validate

Rows = list[dict[str, Any]]


tokenizer = tokenizer_fixture
sets = sets_fixture(pretrain=documents(13), full_sft=chats(13), dpo=pairs(16))  # 10 + 3 documents and chats, 12 + 4 pairs


def make_settings(**changes: Any) -> Supervised:
    return Supervised(**(OPTIMIZER | {"batch_size": 2, "accumulation_steps": 1, "val_every": 100} | changes))


def open_text(sets: Path, tokenizer: Tokenizer, split: str, name: str = "pretrain", **changes: Any) -> SupervisedBatches:
    path = sets / "encoded" / name / f"{split}.arrow"
    return SupervisedBatches(path, **({"batch_size": 2, "seed": 5, "tokenizer": tokenizer} | changes))


def open_pairs(sets: Path, tokenizer: Tokenizer, split: str, **changes: Any) -> PairBatches:
    path = sets / "encoded" / "dpo" / f"{split}.arrow"
    return PairBatches(path, **({"batch_size": 4, "seed": 5, "tokenizer": tokenizer} | changes))


def language_task(
    sets: Path, tokenizer: Tokenizer, settings: Supervised, model: CausalLM, **batches: Any
) -> tuple[SupervisedTask, SpyUpdater]:
    train = open_text(sets, tokenizer, "train", **batches)
    state, updater = one_module(model, settings, total_steps(settings, train))
    held_out = open_text(sets, tokenizer, "held_out", **batches)
    task = SupervisedTask(state, LanguageModelling(model, CPU), train, held_out, "train", lambda: [{"prompt": "p"}])
    return task, updater


def row_loss(model: CausalLM, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of one row, padding cut off, by torch's own function."""
    length = int((labels != -100).nonzero().max()) + 1
    return F.cross_entropy(model(input_ids[None, :length])[0], labels[:length], ignore_index=-100, reduction="sum")


def batch_rows(batches: list[Any]) -> list[tuple[Tensor, Tensor]]:
    return [(ids, labels) for batch in batches for ids, labels in zip(batch.input_ids, batch.labels, strict=True)]


def test_a_window_is_one_batch_and_the_partial_last_one_is_applied(sets: Path, tokenizer: Tokenizer) -> None:
    """Two windows of 3 and 2 micro-batches, against row-by-row cross-entropy over each window's union and torch's AdamW."""
    settings = make_settings(accumulation_steps=3, max_grad_norm=0.5, weight_decay=0.1, lr=0.01)
    task, updater = language_task(sets, tokenizer, settings, make_model(tokenizer, sharpness=4.0))
    recorder = MemoryRecorder()
    summary = train_supervised(task, settings, CPU, recorder)

    twin = make_model(tokenizer, sharpness=4.0)
    optimizer, expected_losses = twin_adamw(twin, settings), []
    counts = [[task.train.batch(0, index).num_trained for index in window] for window in ([0, 1, 2], [3, 4])]
    assert all(len(set(window)) > 1 for window in counts)  # a mean of means would be something else
    for step, window in enumerate([[0, 1, 2], [3, 4]]):
        rows = batch_rows([task.train.batch(0, index) for index in window])
        loss = sum(row_loss(twin, *row) for row in rows) / sum(counts[step])
        loss.backward()
        expected_losses.append(float(loss.detach()))
        gradients = {name: p.grad.clone() for name, p in twin.named_parameters()}
        assert_near(updater.gradients[step], gradients)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert norm > 0.5 and recorder.at(step + 1)["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        twin_step(twin, optimizer, [0.005, 0.01][step], 0.5)
    assert [recorder.at(step)["train/loss"] for step in (1, 2)] == pytest.approx(expected_losses, abs=1e-5)
    assert [recorder.at(step)["train/lr"] for step in (1, 2)] == pytest.approx([0.005, 0.01])
    assert_near(snapshot(task.state.modules["model"]), snapshot(twin), 2e-6)
    assert summary["train/steps"] == 2 and summary["train/skipped_steps"] == 0
    assert summary["train/tokens_seen"] == recorder.at(2)["train/tokens_seen"] == sum(map(sum, counts))


def test_every_epoch_takes_every_batch_once_in_its_own_order(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(accumulation_steps=3, epochs=2)
    task, _ = language_task(sets, tokenizer, settings, make_model(tokenizer))
    taken, original = [], task.train.batch

    def spy(epoch: int, index: int) -> Any:
        taken.append((epoch, index))
        return original(epoch, index)

    task.train.batch = spy
    train_supervised(task, settings, CPU, MemoryRecorder())
    assert taken == [(epoch, index) for epoch in (0, 1) for index in range(5)]


def test_validation_is_the_mean_over_all_held_out_tokens(sets: Path, tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, sharpness=4.0, dropout=0.3)
    task, _ = language_task(sets, tokenizer, make_settings(), model)
    model.train()  # validation switches dropout off itself
    metrics = validate(task)
    batches = list(task.held_out.in_order())
    with torch.no_grad():
        total = sum(float(row_loss(model.eval(), *row)) for row in batch_rows(batches))
    tokens, num_bytes = sum(b.num_trained for b in batches), sum(sum(b.row_bytes) for b in batches)
    assert len(batches) > 1 and len({b.num_trained for b in batches}) > 1
    assert metrics["val/loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert metrics["val/bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, abs=1e-5)
    assert set(metrics) == {"val/loss", "val/bits_per_byte"}


def test_chats_are_validated_over_what_is_written_as_well(sets: Path, tokenizer: Tokenizer) -> None:
    """Row by row: behind the empty think block and before the newline after <|im_end|>, by torch's own function."""
    task, _ = language_task(sets, tokenizer, make_settings(), make_model(tokenizer, sharpness=4.0), name="full_sft")
    metrics, model = validate(task), task.state.modules["model"]
    total, tokens, num_bytes, everything = 0.0, 0, 0, 0
    with torch.no_grad():
        for ids, labels in batch_rows(list(task.held_out.in_order())):
            trained = (labels != -100).nonzero().flatten()
            close = (labels == tokenizer.control_id("</think>")).nonzero().flatten()[0]
            shown = labels.clone()
            shown[: close + 3] = -100  # the tag and two newlines
            shown[trained[-1]] = -100
            total += float(row_loss(model, ids, shown))
            kept = shown[shown != -100]
            tokens, everything = tokens + len(kept), everything + len(trained)
            num_bytes += len(tokenizer.decode(kept.tolist()).encode())
    assert everything - tokens == 7 * sum(len(batch.rows) for batch in task.held_out.in_order())
    assert metrics["val/loss_written"] == pytest.approx(total / tokens, abs=1e-5)
    assert metrics["val/bits_per_byte_written"] == pytest.approx(total / math.log(2) / num_bytes, abs=1e-5)
    assert set(metrics) == {"val/loss", "val/bits_per_byte", "val/loss_written", "val/bits_per_byte_written"}


def test_no_epochs_take_the_weights_over(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings().model_copy(update={"epochs": 0})
    task, _ = language_task(sets, tokenizer, settings, make_model(tokenizer))
    before, recorder = snapshot(task.state.modules["model"]), MemoryRecorder()
    summary = train_supervised(task, settings, CPU, recorder)
    assert_bits_equal(snapshot(task.state.modules["model"]), before)
    assert summary["train/steps"] == 0
    assert 0 < summary["val/loss"] == summary["val/loss_start"] == recorder.at(0)["val/loss"]
    assert [step for step, _ in recorder.samples] == [0]


def test_the_loss_falls_and_the_record_is_complete(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=6, lr=0.01, val_every=10)
    task, _ = language_task(sets, tokenizer, settings, make_model(tokenizer))
    recorder = MemoryRecorder()
    summary = train_supervised(task, settings, CPU, recorder)
    assert summary["val/loss_start"] == pytest.approx(math.log(tokenizer.vocab_size), rel=0.05)  # nothing known yet
    assert summary["val/loss"] < 0.8 * summary["val/loss_start"]
    assert [step for step, metrics in recorder.lines if "val/loss" in metrics] == [0, 10, 20, 30]
    assert recorder.samples == [(step, [{"prompt": "p"}]) for step in (0, 10, 20, 30)]
    loss, speed = recorder.at(7)["train/loss"], recorder.at(7)["train/tokens_per_s"]
    assert recorder.shown[6] == (7, {"loss": loss, "tokens_per_s": speed})
    names = {"loss", "lr", "grad_norm", "tokens_per_s", "tokens_seen", "skipped_steps"}
    assert {f"train/{name}" for name in names} | {"time/step_s", "memory/peak_bytes"} == set(recorder.at(7))
    tail = [recorder.at(step)["train/loss"] for step in (28, 29, 30)]
    assert summary["train/loss"] == pytest.approx(sum(tail) / 3)
    assert summary["val/loss"] == recorder.at(30)["val/loss"]


def test_batches_without_finite_loss_are_skipped_and_named(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings()
    task, updater = language_task(sets, tokenizer, settings, make_model(tokenizer))
    before = snapshot(task.state.modules["model"])
    good = task.objective

    class Poisoned(LanguageModelling):
        def __call__(self, batch: Any) -> Any:
            part = good(batch)
            part.loss = part.loss * math.nan
            return part

    task.objective = Poisoned(task.state.modules["model"], CPU)
    metrics = train_window(task, settings, CPU, 0)
    assert metrics["train/skipped_steps"] == updater.skipped == 1
    assert_bits_equal(snapshot(task.state.modules["model"]), before)


@pytest.mark.parametrize("make", ["language", "lora", "dpo", "reward"])
def test_a_run_that_diverges_ends_with_the_numerics_code(sets: Path, tokenizer: Tokenizer, make: str) -> None:
    makers = {"language": make_language, "lora": make_lora, "dpo": make_dpo, "reward": make_reward}
    settings = make_settings(lr=1e10, epochs=2)
    task, recorder = makers[make](sets, tokenizer, settings), MemoryRecorder()
    with pytest.raises(NumericsError, match="lower the learning rate") as caught:
        train_supervised(task, settings, CPU, recorder)
    assert caught.value.exit_code == 4 and len(caught.value.lines) == 1


def test_a_final_validation_that_is_not_finite_is_named(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=1)
    task, recorder = make_language(sets, tokenizer, settings), MemoryRecorder()
    good, last = task.objective, total_steps(settings, task.train)

    class Overflows(LanguageModelling):
        def __call__(self, batch: Any) -> Any:
            part = good(batch)
            if task.state.step == last - 1 and not torch.is_grad_enabled():
                part.sums["loss"] = math.inf
            return part

    task.objective = Overflows(task.state.modules["model"], CPU)
    with pytest.raises(NumericsError, match=rf"after {last} steps val/loss is inf"):
        train_supervised(task, settings, CPU, recorder)
    assert recorder.at(last)["val/loss"] == math.inf  # what it was is recorded


def test_end_weights_that_are_not_finite_are_named(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=1)
    task = make_language(sets, tokenizer, settings)
    last = total_steps(settings, task.train)
    recorder = SpoilingRecorder(task.state.modules["model"], last, math.nan)
    with pytest.raises(NumericsError, match=rf"after {last} steps the model has diverged, 1 of \d+ tensors .*model.norm.weight"):
        train_supervised(task, settings, CPU, recorder)


Make = Callable[..., SupervisedTask]


def make_language(sets: Path, tokenizer: Tokenizer, settings: Supervised, **shape: Any) -> SupervisedTask:
    model = make_model(tokenizer, **({"dropout": 0.1} | shape))
    chat = {"name": "full_sft", "system_prompt_frac": 0.5, "drop_empty_think_frac": 0.5, "batch_size": 4}
    return language_task(sets, tokenizer, settings, model, **chat)[0]


def make_lora(sets: Path, tokenizer: Tokenizer, settings: Supervised) -> SupervisedTask:
    model = make_model(tokenizer, dropout=0.1)
    add_lora(model, rank=4, alpha=8.0, targets=["q_proj", "down_proj"], seed=2)
    return language_task(sets, tokenizer, settings, model, name="full_sft", batch_size=4)[0]


def dpo_settings(**changes: Any) -> Dpo:
    own = {"beta": 0.5, "loss": "sigmoid", "label_smoothing": 0.0, "reference": "live", "drop_empty_think_frac": 0.5}
    return Dpo(**(make_settings().model_dump() | {"max_seq_len": 512} | own | changes))


def make_dpo(sets: Path, tokenizer: Tokenizer, settings: Supervised, **shape: Any) -> SupervisedTask:
    model, reference = (make_model(tokenizer, **({"dropout": 0.1} | shape)) for _ in range(2))
    reference.requires_grad_(False)
    train = open_pairs(sets, tokenizer, "train", drop_empty_think_frac=0.5)
    state, _ = one_module(model, settings, total_steps(settings, train))
    objective = DirectPreference(model, live_reference(reference, CPU), CPU, dpo_settings())
    return SupervisedTask(state, objective, train, open_pairs(sets, tokenizer, "held_out"), "dpo", lambda: [])


def make_reward(sets: Path, tokenizer: Tokenizer, settings: Supervised, **shape: Any) -> SupervisedTask:
    model = RewardModel.from_causal_lm(make_model(tokenizer, **({"dropout": 0.1} | shape)), seed=1)
    train = open_pairs(sets, tokenizer, "train")
    state, _ = one_module(model, settings, total_steps(settings, train))
    held_out = open_pairs(sets, tokenizer, "held_out")
    return SupervisedTask(state, RewardModelling(model, CPU), train, held_out, "reward_model", lambda: [])


@pytest.mark.parametrize("make", [make_language, make_lora, make_dpo, make_reward])
def test_a_killed_run_ends_with_the_same_bits(sets: Path, tokenizer: Tokenizer, make: Make) -> None:
    """Dropout 0.1, two epochs of two windows; killed in the second window of the first epoch, its save is one step older."""
    settings = make_settings(epochs=3, accumulation_steps=2, val_every=2, lr=0.01)
    whole = make(sets, tokenizer, settings)
    steps, straight = total_steps(settings, whole.train), MemoryRecorder()
    expected = train_supervised(whole, settings, CPU, straight)
    assert steps == 6 and straight.lines[-1][0] == 6

    broken, first = make(sets, tokenizer, settings), MemoryRecorder(save_at=[1], kill_at=3)
    with pytest.raises(Killed):
        train_supervised(broken, settings, CPU, first)
    torch.manual_seed(999)  # no generator's state may matter
    again, second = make(sets, tokenizer, settings), MemoryRecorder(first.saved)
    summary = train_supervised(again, settings, CPU, second)

    assert_bits_equal(snapshot(again.state.modules["model"]), snapshot(whole.state.modules["model"]))
    assert_bits_equal(moments(again.state.updaters["model"]), moments(whole.state.updaters["model"]))
    assert summary == expected
    assert second.at(6)["train/loss"] == straight.at(6)["train/loss"]
    assert min(step for step, _ in second.lines) == 2


def test_dropout_is_on_in_training_and_differs_from_step_to_step(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(lr=1e-12)
    losses = {}
    for dropout in (0.0, 0.2):
        task, _ = language_task(sets, tokenizer, settings, make_model(tokenizer, sharpness=4.0, dropout=dropout))
        same = task.train.batch(0, 0)
        task.train.batch = lambda epoch, index, same=same: same
        task.state.modules["model"].train()
        losses[dropout] = [train_window(task, settings, CPU, step)["train/loss"] for step in (0, 1, 0)]
    assert losses[0.0][0] == pytest.approx(losses[0.0][1], abs=1e-6)
    assert losses[0.2][0] == pytest.approx(losses[0.2][2], abs=1e-6)  # a function of the step
    assert abs(losses[0.2][0] - losses[0.2][1]) > 1e-3


def test_lora_moves_the_adapters_alone(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=4, lr=0.02, weight_decay=0.1)
    task = make_lora(sets, tokenizer, settings)
    model = task.state.modules["model"]
    base = {name: tensor for name, tensor in snapshot(model).items() if ".lora." not in name}
    adapters = {name: tensor.clone() for name, tensor in lora_state_dict(model).items()}
    recorder = MemoryRecorder(save_at=[1])
    summary = train_supervised(task, settings, CPU, recorder)
    after = snapshot(model)
    assert_bits_equal({name: after[name] for name in base}, base)
    assert len(adapters) == 8 and not any(torch.equal(after[name], adapters[name]) for name in adapters)
    assert summary["val/loss"] < summary["val/loss_start"]
    saved = recorder.__class__(recorder.saved).load()["modules"]["model"]
    assert set(saved) == set(adapters)  # a save of frozen weights would only cost time


def test_dpo_starts_at_ln_2_learns_and_leaves_the_reference(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=4, lr=0.01, val_every=4)
    task = make_dpo(sets, tokenizer, settings, dropout=0.1)  # configured, and off here
    reference = make_model(tokenizer, dropout=0.0).requires_grad_(False)
    task.objective.reference = live_reference(reference, CPU)
    before, recorder = snapshot(reference), MemoryRecorder()
    summary = train_supervised(task, settings, CPU, recorder)
    assert_bits_equal(snapshot(reference), before)
    assert summary["val/loss_start"] == pytest.approx(math.log(2), abs=1e-6)
    assert recorder.at(1)["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert recorder.at(1)["dpo/margin"] == pytest.approx(0, abs=1e-5) and recorder.at(1)["dpo/accuracy"] == 0.5
    assert summary["val/loss"] < 0.6 and summary["val/accuracy"] == 1.0
    assert summary["dpo/margin"] > 0 and summary["dpo/chosen_logprob"] > recorder.at(1)["dpo/rejected_logprob"]
    with torch.no_grad():  # margins by hand: beta times the difference of summed log-ratios
        policy, margins = task.state.modules["model"], []
        for batch in task.held_out.in_order():
            rows = batch_rows([batch])
            ratios = [float(row_loss(reference, *row) - row_loss(policy, *row)) for row in rows]
            n = batch.num_pairs
            margins += [0.5 * (ratios[pair] - ratios[pair + n]) for pair in range(n)]
    assert summary["val/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)


@pytest.mark.parametrize("make", [make_dpo, make_reward])
def test_pairs_are_trained_without_dropout_and_with_balanced_routers(sets: Path, tokenizer: Tokenizer, make: Make) -> None:
    settings = make_settings(accumulation_steps=3)
    first = []
    for dropout in (0.0, 0.5):
        task, recorder = make(sets, tokenizer, settings, dropout=dropout, **MOE), MemoryRecorder()
        train_supervised(task, settings, CPU, recorder)
        first.append({name: value for name, value in recorder.at(1).items() if not name.startswith(("time/", "memory/"))})
        first[-1].pop("train/tokens_per_s")
    assert first[0] == first[1] and first[0]["moe/aux_loss"] > 0


def test_a_pair_window_is_one_batch(sets: Path, tokenizer: Tokenizer) -> None:
    """12 pairs as 3 micro-batches of 4 and as one of 12: the same gradient and the same logged means."""
    results = {}
    for size, accumulation in ((4, 3), (12, 1)):
        settings = make_settings(accumulation_steps=accumulation)
        for make, opened in ((make_dpo, DirectPreference), (make_reward, RewardModelling)):
            task = make(sets, tokenizer, settings, dropout=0.0)
            task.train = open_pairs(sets, tokenizer, "train", batch_size=size)
            metrics = train_window(task, settings, CPU, 0)
            kept = {k: v for k, v in metrics.items() if k.startswith(("train/loss", "train/grad", "dpo/", "reward_model/"))}
            results[size, opened] = task.state.updaters["model"].gradients[0], kept
    for opened in (DirectPreference, RewardModelling):
        assert_near(results[4, opened][0], results[12, opened][0])
        assert results[4, opened][1] == pytest.approx(results[12, opened][1], abs=1e-4)


def test_reward_scores_separate_and_are_standardised(sets: Path, tokenizer: Tokenizer) -> None:
    settings = make_settings(epochs=6, lr=0.01)
    task = make_reward(sets, tokenizer, settings, dropout=0.0)
    summary = train_supervised(task, settings, CPU, MemoryRecorder())
    assert summary["val/loss_start"] == pytest.approx(math.log(2), abs=0.05)
    assert summary["val/accuracy"] == 1.0 and summary["val/loss"] < 0.3
    assert summary["reward_model/accuracy"] == 1.0 and summary["reward_model/margin"] > 0.5

    objective, model = task.objective, task.state.modules["model"]
    offset, scale = score_scale(objective, task.train)
    raw = []
    with torch.no_grad():
        for ids, labels in batch_rows(list(task.train.in_order())):
            last = int((labels != -100).nonzero().max())  # one row at a time, nothing behind its last trained label
            raw.append(float(model(ids[None, : last + 1], torch.tensor([last]))))
    mean = sum(raw) / len(raw)
    assert len(raw) == 24 and offset == pytest.approx(mean, abs=1e-5)
    assert scale == pytest.approx(math.sqrt(sum((score - mean) ** 2 for score in raw) / 24), abs=1e-5)

    scorer = TrainedRewardModel(
        model, ChatEncoder(tokenizer), pad_id=0, offset=offset, scale=scale, batch_size=5, max_len=512
    )  # what the reinforcement stages read is what was trained
    source = pairs(16)
    items = [Reply(row[side][:1], row[side][1]["content"]) for row in source for side in ("chosen", "rejected")]
    scores = scorer.score(items)
    assert all(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True))
    held_out = list(task.held_out.in_order()) + list(task.train.in_order())
    with torch.no_grad():
        known = torch.cat([objective.scores(batch) for batch in held_out])
    expected = sorted(((known - offset) / scale).tolist())
    assert sorted(scores) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("make", [make_language, make_dpo, make_reward])
def test_router_balance_is_trained_where_there_are_experts(sets: Path, tokenizer: Tokenizer, make: Make) -> None:
    """A window of two ragged micro-batches, against what its routers decided: each weighs by its tokens, or its pairs."""
    settings = make_settings(accumulation_steps=2)
    gates, logged = {}, {}
    for coef in (0.0, 1.0):
        task = make(sets, tokenizer, settings, dropout=0.0, **(MOE | {"router_aux_loss_coef": coef}))
        model = task.state.modules["model"]
        spy = RouterSpy(model)
        model.train()
        metrics = train_window(task, settings, CPU, 0)
        batches = [task.train.batch(0, index) for index in (0, 1)]
        visible = [up_to([int((labels != -100).nonzero().max()) + 1 for labels in batch.labels]) for batch in batches]
        counts = [task.objective.count(batch) for batch in batches]
        assert len(spy.forwards) == 2 and not all(part.all() for part in visible)  # padding must not count
        aux = coef * sum(spy.aux_loss(place, visible[place]) * counts[place] for place in (0, 1)) / sum(counts)
        assert metrics["moe/aux_loss"] == pytest.approx(aux, rel=1e-5, abs=1e-9)
        load_max = max(spy.load_max(place, visible[place]) for place in (0, 1))
        assert metrics["moe/expert_load_max"] == pytest.approx(load_max, abs=1e-6)
        gates[coef] = task.state.updaters["model"].gradients[0]["model.layers.0.mlp.gate.weight"]
        logged[coef] = metrics["train/loss"] - metrics["moe/aux_loss"]
        assert not {"val/aux_loss", "val/expert_load_max"} & set(validate(task))
    assert not torch.allclose(gates[0.0], gates[1.0], atol=1e-6)
    assert logged[0.0] == pytest.approx(logged[1.0], abs=1e-5)  # `train/loss` is all that is minimised


def test_document_openings_hold_no_padding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["a", "bc", "def", "ghij"] + [f"a longer one, number {number}" for number in range(16)]
    make_set(tmp_path, "pretrain", [{"text": text} for text in texts], tokenizer)
    openings = document_prompts(open_text(tmp_path, tokenizer, "train", batch_size=20))
    shown = [tokenizer.decode_all(opening) for opening in openings]
    assert len(shown) == 8 and min(map(len, openings)) < max(map(len, openings)) == 16
    assert all(text.startswith("<|im_start|>") and text.removeprefix("<|im_start|>") for text in shown)
    assert not any("<|" in text.removeprefix("<|im_start|>") for text in shown)


def test_panels_show_prompts_that_fit(sets: Path, tokenizer: Tokenizer) -> None:
    before_answers = pair_prompts(open_pairs(sets, tokenizer, "held_out", batch_size=1))
    asked = chat_prompts(sets / "prepared" / "full_sft", tokenizer)
    assert len(before_answers) == 4 and len(asked) == 3
    assert all(tokenizer.decode_all(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n") for prompt in before_answers)
    assert all(tokenizer.decode_all(prompt).endswith("assistant\n<think>\n\n</think>\n\n") for prompt in asked)

    model = make_model(tokenizer, sharpness=4.0)
    lengths = sorted(map(len, asked))
    narrow = copy.deepcopy(model)
    narrow.config = replace(model.config, max_position_embeddings=lengths[1] + 5)  # no room for the longest
    rows = greedy_panel(narrow, tokenizer, CPU, asked, max_new_tokens=5)()
    assert len(rows) == sum(length <= lengths[1] for length in lengths) < 3
    assert all(row["prompt"] in [tokenizer.decode_all(prompt) for prompt in asked] for row in rows)
    assert rows == greedy_panel(narrow, tokenizer, CPU, asked, max_new_tokens=5)()

    objective = RewardModelling(RewardModel.from_causal_lm(model, seed=1).eval(), CPU)
    batch = next(open_pairs(sets, tokenizer, "held_out").in_order())
    table = scored_panel(objective, batch, tokenizer.decode_all)()
    lengths = [int((labels != -100).nonzero().max()) + 1 for labels in batch.labels]
    shown = [row[side] for side in ("chosen", "rejected") for row in table]
    assert shown == [tokenizer.decode_all(ids[:n].tolist()) for ids, n in zip(batch.input_ids, lengths, strict=True)]
    assert (
        len(set(lengths)) > 1 and len(table) == 4 and all("stone" in row["chosen"] and "wind" in row["rejected"] for row in table)
    )
    assert all(row["margin"] == pytest.approx(row["chosen_score"] - row["rejected_score"], abs=1e-6) for row in table)


def test_cached_references_are_the_live_ones(sets: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    frozen = make_model(tokenizer, sharpness=4.0).requires_grad_(False)
    train, held_out = (open_pairs(sets, tokenizer, split, drop_empty_think_frac=0.5) for split in ("train", "held_out"))
    live, calls = live_reference(frozen, CPU), []
    hidden = frozen.hidden
    frozen.hidden = lambda *args, **kw: calls.append(1) or hidden(*args, **kw)  # type: ignore[method-assign]

    def opened() -> Any:
        return cached_reference(frozen, train, held_out, CPU, tmp_path / "reference", "model 1", epochs=2)

    cached = opened()
    scored, calls[:] = len(calls), []
    assert scored > 0
    batches = [train.batch(epoch, index) for epoch in range(2) for index in range(train.batches_per_epoch)]
    looked_up = [cached(batch) for batch in [*batches, *held_out.in_order()]]
    assert calls == []
    assert {dropped for batch in batches for dropped in batch.dropped} == {False, True}
    for batch, values in zip([*batches, *held_out.in_order()], looked_up, strict=True):
        torch.testing.assert_close(values, live(batch), atol=1e-4, rtol=1e-5)
    assert scored == len(list(train.of_epochs(2))) + len(list(held_out.in_order()))  # what is asked for, and no more
    calls.clear()
    opened()
    assert calls == []  # kept on disk
    (path,) = (tmp_path / "reference").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    opened()
    assert len(calls) == scored  # a damaged table is made again
