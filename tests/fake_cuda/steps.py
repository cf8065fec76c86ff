"""Every stage, both sampling loops, evaluation, chat and saves on the pretended device and on the CPU; a JSON line per case.

    python steps.py GUARD DTYPE KIND [CASE...]      GUARD: guard.cpp, compiled; DTYPE: float32 or bfloat16; KIND: dense or experts

A line holds the case, its seconds and its fault, null where the device computed what the CPU does (in bfloat16: finite figures).
"""

import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pretend import pretended_cuda
from safetensors.torch import save_file
from test_evaluation import DEPS, REWARDS, make_eval, make_repository
from test_group_loop import make_settings as group_settings
from test_ppo_loop import make_settings as ppo_settings
from tiny_runs import CPU, MOE, OPTIMIZER, MemoryRecorder, chats, make_model, make_set, pairs

from pipeline.checkpoint.files import load_model, load_state, model_meta, save_model
from pipeline.commands.chat import Conversation
from pipeline.commands.export import export
from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.evaluation.examiner import measure_all
from pipeline.model.heads import RewardModel
from pipeline.model.lora import add_lora, lora_state_dict
from pipeline.params import load_params
from pipeline.params.schema import Agent, Dpo, Pretrain
from pipeline.rewards.model import TrainedRewardModel
from pipeline.rewards.scoring import CompletionScorer, EpisodeScorer
from pipeline.rollout import static_batch
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.rollout.truncation import Truncation
from pipeline.text.chat import ChatEncoder
from pipeline.training.device import Device
from pipeline.training.group_loop import train_group
from pipeline.training.language_objective import LanguageModelling
from pipeline.training.panels import chat_prompts, document_prompts, greedy_panel
from pipeline.training.policy_setup import Environment, open_group_task, open_prompts
from pipeline.training.ppo_loop import train_ppo
from pipeline.training.ppo_setup import open_ppo_task
from pipeline.training.preference_objective import DirectPreference, cached_reference, live_reference
from pipeline.training.reward_objective import RewardModelling, score_scale, scored_panel
from pipeline.training.state import TrainState
from pipeline.training.supervised import SupervisedTask, train_supervised
from pipeline.training.updater import Updater

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, float]


class Cases:
    """What each case does on a device, in a folder as the stages before would have left it."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        os.chdir(folder)
        self.tokenizer = make_repository(folder)
        make_set(folder / "data", "full_sft", chats(24), self.tokenizer)
        make_set(folder / "data", "dpo", pairs(16), self.tokenizer)  # in place of long ones, which show no more
        self.changes = changes
        self.start = folder / "checkpoints/full_sft.pth"
        model = make_model(self.tokenizer, sharpness=4.0, max_position_embeddings=1024, **changes)
        save_model(self.start, model.state_dict(), model_meta("causal_lm", model.config, self.tokenizer.digest))

    def supervised(self, device: Device, kind: str) -> Figures:
        """pretrain, full_sft, lora, dpo or reward, through a save and a resume from it."""
        settings: Any = Pretrain.model_validate(
            OPTIMIZER | {"init_from": None, "max_seq_len": 400, "accumulation_steps": 2, "val_every": 2}, strict=False
        )
        loss = {"beta": 0.1, "loss": "sigmoid", "label_smoothing": 0.0}
        pairs = kind in ("dpo", "dpo, cached", "reward")
        name = "dpo" if pairs else "pretrain" if kind == "pretrain" else "full_sft"
        train, held_out = (
            (PairBatches if pairs else SupervisedBatches)(
                Path(f"data/encoded/{name}/{split}.arrow"), batch_size=4, seed=1, tokenizer=self.tokenizer
            )
            for split in ("train", "held_out")
        )
        saved, summary = None, {}
        for _ in range(2):
            model: Any = load_model(self.start)
            if kind == "lora":
                add_lora(model, rank=2, alpha=4.0, targets=["q_proj", "down_proj"], seed=1)
            if kind == "reward":
                model = RewardModel.from_causal_lm(model, seed=1)
            model = device.prepare(model)
            state = TrainState({"model": model}, {"model": Updater(model, settings, total_steps=6)})
            panel: Callable[[], Any]
            if kind == "reward":
                objective: Any = RewardModelling(model, device)
                panel = scored_panel(objective, next(iter(held_out.in_order())), self.tokenizer.decode_all)
            elif pairs:
                reference = device.prepare(load_model(self.start)).requires_grad_(False)
                look_up = (
                    live_reference(reference, device)
                    if kind == "dpo"
                    else cached_reference(
                        reference, train, held_out, device, Path("scratch"), f"{device.device} {device.autocast_dtype}", epochs=1
                    )
                )
                dpo = mock.Mock(spec=Dpo, **loss)
                objective, panel = DirectPreference(model, look_up, device, dpo), list
            else:
                objective = LanguageModelling(model, device)
                chats_of = Path("data/prepared/full_sft")
                prompts = document_prompts(held_out) if kind == "pretrain" else chat_prompts(chats_of, self.tokenizer)
                panel = greedy_panel(model, self.tokenizer, device, prompts, max_new_tokens=6)
            task = SupervisedTask(state, objective, train, held_out, "train", panel)
            recorder = MemoryRecorder(saved, save_at=[2] if saved is None else [])
            summary = train_supervised(task, settings, device, recorder)
            saved = recorder.saved
        if kind == "reward":
            summary |= dict(zip(("offset", "scale"), score_scale(objective, train), strict=True))
        out = Path("out.pth")
        weights = lora_state_dict(model) if kind == "lora" else model.state_dict()
        save_model(out, weights, {})
        assert all(tensor.device.type == "cpu" for tensor in load_state(out).values())
        return summary

    def environment(self, device: Device, settings: Any, name: str) -> Environment:
        reward = RewardModel.from_causal_lm(device.prepare(load_model(self.start)), seed=1).eval()
        judge = TrainedRewardModel(
            reward, ChatEncoder(self.tokenizer), pad_id=0, offset=0.0, scale=1.0, batch_size=8, max_len=1024
        )
        prompts = open_prompts(Path(f"data/prepared/{name}"), settings, self.tokenizer, 0.0, str)
        scorer = EpisodeScorer if name == "agent" else CompletionScorer
        return Environment(self.tokenizer, prompts, scorer(REWARDS, judge), device, str)

    def group(self, device: Device, name: str, **changes: Any) -> Figures:
        settings: Any = group_settings(batch_size=2, max_steps=2, **changes)
        if name == "agent":
            fields = settings.model_dump() | {"max_turns": 2, "max_total_len": 900, "max_prompt_len": 800, "max_new_tokens": 20}
            settings = Agent(**fields)
        task = open_group_task(self.start, settings, self.environment(device, settings, name))
        return train_group(task, settings, device, MemoryRecorder(save_at=[1]))

    def ppo(self, device: Device, **changes: Any) -> Figures:
        settings = ppo_settings(batch_size=4, mini_batch_size=2, updates_per_rollout=2, max_steps=2, **changes)
        task = open_ppo_task(self.start, settings, self.environment(device, settings, "rlaif"))
        return train_ppo(task, settings, device, MemoryRecorder(save_at=[1]))

    def evaluation(self, device: Device) -> Figures:
        runtime = mock.patch.multiple("pipeline.evaluation.examiner", open_device=lambda _: device, MODELS=("full_sft", "reward"))
        loaded = load_params(ROOT / "profiles/micro.yaml")
        params = loaded.model_copy(update={"eval": make_eval(panel_rows=2, max_new_tokens=6), "rewards": REWARDS})
        with runtime, tempfile.TemporaryDirectory() as cache:
            examined = measure_all(params, DEPS, {"eval": params.eval.model_dump()}, Path(cache), announce=str)
        return {
            f"{model}/{metric}": sum(map(float, values))
            for model, found in examined.items()
            for metric, values in found.values.items()
        }

    def sampling(self, device: Device, static: bool | None, truncation: Truncation | None = None) -> Figures:
        """Ids and logprobs of rows that leave and join."""
        model = device.prepare(load_model(self.start))
        engine = TorchRolloutEngine(
            model,
            stop_ids=[2, *range(40, 300, 9)],
            pad_id=0,
            max_rows=3,
            autocast_dtype=device.autocast_dtype,
            static=static,
            truncation=truncation,
        )
        prompts = [[1, 50, 60], [1, 50, 60], [1, 70], [1, 80, 81, 82, 83], [1, 90]]
        done = engine.generate(
            prompts, keys=range(5), max_new_tokens=12, temperature=0.9, greedy=[False, True, False, False, True]
        )
        sums = {f"ids {row}": float(sum(place * token for place, token in enumerate(c.ids, 1))) for row, c in enumerate(done)}
        return sums | {f"logprobs {row}": sum(c.logprobs) for row, c in enumerate(done)}

    def chat(self, device: Device) -> Figures:
        model = device.prepare(load_model(self.start))
        lengths = {}
        for truncation in (None, Truncation(20, 0.9, 1.1)):
            conversation = Conversation(model, self.tokenizer, device, 0.8, greedy=True, truncation=truncation)
            with mock.patch("pipeline.commands.chat.TURN_TOKENS", 8):
                lengths[str(truncation)] = float(len("".join(conversation.ask("red house"))))
        return lengths

    def export(self, device: Device) -> Figures:
        """Its library reads memory by address, which a pretended tensor has none of; so it gets the copies that it would make."""
        copied = mock.patch(
            "safetensors.torch.save_file", lambda state, *rest, **options: save_file(on_cpu(state), *rest, **options)
        )
        with copied, tempfile.TemporaryDirectory() as folder:
            export(device.prepare(load_model(self.start)), Path(folder) / "model")
            return {"bytes": float((Path(folder) / "model/model.safetensors").stat().st_size)}


def on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def cases(found: Cases, experts: bool) -> dict[str, Callable[[Device], Figures]]:
    """By name."""
    named: dict[str, Callable[[Device], Figures]] = {
        kind: partial(found.supervised, kind=kind) for kind in ("pretrain", "full_sft", "lora", "dpo", "dpo, cached", "reward")
    }
    named |= {
        "grpo": partial(found.group, name="rlaif"),
        "grpo, recomputed": partial(
            found.group, name="rlaif", old_logprobs="recomputed", updates_per_rollout=2, entropy_coef=0.01, loss="gspo"
        ),
        "agent": partial(found.group, name="agent"),
        "ppo": found.ppo,
        "ppo, bootstrapped": partial(found.ppo, bootstrap_truncated=True, kl_in_reward=True, entropy_coef=0.01),
        "evaluation": found.evaluation,
        "chat": found.chat,
        "export": found.export,
        "sampling in blocks": partial(found.sampling, static=False),
        "sampling, truncated": partial(found.sampling, static=False, truncation=Truncation(20, 0.9, 1.1)),
    }
    if not experts:
        named["sampling, static"] = partial(found.sampling, static=True)
    return named


def difference(own: Figures, expected: Figures | None) -> str | None:
    """Where the device's figures are not those of the CPU, or not finite; what a clock decides is left out."""
    if expected is not None and own.keys() != expected.keys():
        return f"figures of other names: {sorted(own.keys() ^ expected.keys())}"
    for name, value in own.items():
        if name.endswith(("_s", "tokens_per_s", "peak_bytes")):
            continue
        if expected is not None and not math.isclose(value, expected[name], rel_tol=2e-3, abs_tol=2e-4):
            return f"{name}: {value}, on the CPU {expected[name]}"
        if not math.isfinite(value):
            return f"{name}: {value}"
    return None


def main(guard: str, dtype_name: str, kind: str, *only: str) -> None:
    torch.ops.load_library(guard)  # before the first backward pass, which counts the devices
    dtype = None if dtype_name == "float32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        found = Cases(Path(folder), MOE if kind == "experts" else {})
        named = cases(found, kind == "experts")
        if only:
            named = {name: case for name, case in named.items() if name in only}
        expected = {name: case(CPU) for name, case in named.items()} if dtype is None else {}
        for name, case in named.items():
            fault, began = None, time.process_time()
            try:
                with pretended_cuda(), mock.patch.object(static_batch, "_repeater", lambda device: static_batch._repeat):
                    figures = case(Device(torch.device("cuda"), dtype, gradient_checkpointing=name == "full_sft"))
                fault = difference(figures, expected.get(name))
            except Exception:  # noqa: BLE001  whatever it is, it is this case's fault and the next one's turn
                fault = traceback.format_exc()
            print(json.dumps({"case": name, "fault": fault, "cpu_s": round(time.process_time() - began, 1)}), flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main(*sys.argv[1:])
