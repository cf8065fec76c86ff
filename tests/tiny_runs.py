"""What the tests of the loops share: a tiny tokenizer, sets, models and settings, sampling runs, and a recorder in memory."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.encode import encode_set
from pipeline.data.prepare import prepare
from pipeline.data.prompts import PromptTask
from pipeline.model.config import ModelConfig
from pipeline.model.transformer import Backbone, CausalLM
from pipeline.params.schema import Data, Optimizer, Sampling
from pipeline.rewards.scoring import Scored
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import StopReason, Trajectory
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pipeline.training.device import Device
from pipeline.training.policy_setup import open_prompts
from pipeline.training.state import TrainState
from pipeline.training.updater import Update, Updater

CPU = Device(torch.device("cpu"), None, gradient_checkpointing=False)
WORDS = "red blue green dog cat bird house river stone wind".split()
OPTIMIZER: dict[str, Any] = {
    "seed": 1,
    "epochs": 1,
    "batch_size": 4,
    "lr": 1e-3,
    "betas": (0.9, 0.98),
    "warmup_steps": 1,
    "min_lr_frac": 0.1,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "plot_every": 1,
}
SAMPLING: dict[str, Any] = OPTIMIZER | {
    "max_steps": None,
    "max_prompt_len": 100,
    "max_new_tokens": 6,
    "temperature": 0.6,
    "thinking_ratio": 0.5,
    "max_rows": 64,
    "cache_gib": 1.0,
    "micro_batch_size": 5,
    "kl_coef": 0.02,
    "system_prompt_frac": 0.0,
    "sample_every": 2,
}
MOE: dict[str, Any] = {"use_moe": True, "num_experts_per_tok": 2, "router_aux_loss_coef": 1.0}
# What grpo, agent and ppo log at every step.
ROLLOUT_KEYS = {
    *(f"reward/{name}" for name in ("mean", "std", "min", "max", "term/even", "term/short")),
    *(f"advantages/{name}" for name in ("mean", "std", "abs_max")),
    *(f"policy/{name}" for name in ("loss", "approx_kl", "approx_kl_k1", "approx_kl_k3", "ref_kl", "ref_kl_k1", "clip_frac")),
    *(f"policy/{name}" for name in ("ratio_max", "ratio_first_update", "entropy")),
    *(f"rollout/{name}" for name in ("length_mean", "truncated_frac", "distinct_3gram", "logprob_diff_max", "tokens_per_s")),
    *(f"stop/{reason.value}" for reason in StopReason),
    *(f"time/{phase}_s" for phase in ("rollout", "scoring", "update", "step")),
    *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "tokens_seen", "tokens_per_s", "skipped_steps")),
    "memory/peak_bytes",
    "train/zero_signal_steps",
}

Score = Callable[[Sequence[PromptTask], Sequence[Trajectory]], list[Scored]]


def make_tokenizer(folder: Path) -> Tokenizer:
    train_tokenizer([" ".join(WORDS) + " user assistant\n"] * 3, folder, vocab_size=300, split_digits=True)
    return load_tokenizer(folder)


def make_config(vocab_size: int, **changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "dropout": 0.0,
        "use_moe": False,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    }
    return ModelConfig(**(shape | changes))


def make_model(tokenizer: Tokenizer, *, seed: int = 3, sharpness: float = 1.0, **changes: Any) -> CausalLM:
    """A model in evaluation mode; `sharpness` scales its matrices, so that its distributions are far from uniform."""
    model = CausalLM(make_config(tokenizer.vocab_size, **changes), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= sharpness
        if sharpness != 1.0:  # signs that keep a tied head from repeating the last id for ever
            model.model.norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(seed)))
    return model.eval()


def make_set(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_seq_len: int = 400) -> None:
    """Prepares rows into `folder/prepared/name` and, where training reads ids, encodes them into `folder/encoded/name`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sets = {key: {"source": "-"} for key in ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent")}
    data = Data.model_validate(
        {"sets": sets, "held_out_frac": 0.25, "held_out_max_rows": 99, "max_dropped_frac": 0.0, "seed": 7}, strict=False
    )
    prepare(name, source, folder / "prepared" / name, data)
    if name not in ("rlaif", "agent"):
        prepared, encoded = folder / "prepared" / name, folder / "encoded" / name
        encode_set(name, prepared, encoded, tokenizer, max_seq_len=max_seq_len, max_dropped_frac=0.0)


@pytest.fixture(scope="module")
def tokenizer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A test file binds it to a name of its own: `tokenizer = tokenizer_fixture`."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sets_fixture(**rows: Sequence[Mapping[str, Any]]) -> Any:
    """A fixture with the folder of these sets, by name; it needs a fixture `tokenizer` beside it."""

    @pytest.fixture(scope="module")
    def sets(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
        folder = tmp_path_factory.mktemp("sets")
        for name, of_set in rows.items():
            make_set(folder, name, of_set, tokenizer)
        return folder

    return sets


def phrase(number: int) -> str:
    """A text that is different for each number below 500, of one to nine words."""
    return " ".join(WORDS[(number * 7 + place * (1 + number % 3)) % 10] for place in range(1 + number % 9)) + f" {number}"


def documents(count: int) -> list[dict[str, Any]]:
    return [{"text": phrase(number)} for number in range(count)]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def chats(count: int) -> list[dict[str, Any]]:
    return [{"conversations": [user(phrase(n)), assistant(WORDS[n % 10])]} for n in range(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    """Every chosen answer says stone, every rejected one wind, somewhere."""
    return [
        {
            "chosen": [user(phrase(n)), assistant(f"{WORDS[n % 5]} stone")],
            "rejected": [user(phrase(n)), assistant(f"{WORDS[(n + 2) % 5]} wind" + " wind" * (n % 3))],
        }
        for n in range(count)
    ]


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"conversations": [user(phrase(n)), assistant("")]} for n in range(count)]


class Killed(Exception):
    """What a recorder raises in place of a kill."""


class _Bar:
    def __init__(self, shown: list[tuple[int, dict[str, float]]]) -> None:
        self._shown = shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, step: int, **figures: float) -> None:
        self._shown.append((step, figures))


class MemoryRecorder:
    """A `Recorder`; states go through bytes, as on disk.

    Args:
        saved: what an earlier recorder saved.
        save_at: steps to save after.
        kill_at: step to die after, its save and all later ones lost.
    """

    def __init__(self, saved: bytes | None = None, *, save_at: Sequence[int] = (), kill_at: int | None = None) -> None:
        self.saved, self._save_at, self._kill_at = saved, save_at, kill_at
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[int, list[dict[str, Any]]]] = []
        self.rollouts: dict[int, dict[int, Trajectory]] = {}
        self.shown: list[tuple[int, dict[str, float]]] = []  # on the progress bar

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, dict(metrics)))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.samples.append((step, [dict(row) for row in rows]))

    def keep_rollouts(self, step: int, rollouts: Mapping[int, Trajectory]) -> None:
        self.rollouts[step] = dict(rollouts)

    def load(self) -> dict[str, Any] | None:
        return None if self.saved is None else torch.load(io.BytesIO(self.saved), weights_only=True)

    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        if step == self._kill_at:
            raise Killed
        if step in self._save_at:
            buffer = io.BytesIO()
            torch.save(dict(make_state()), buffer)
            self.saved = buffer.getvalue()

    def progress(self, total: int) -> _Bar:
        return _Bar(self.shown)

    def at(self, step: int) -> dict[str, float]:
        """Everything that was logged for a step."""
        return {name: value for logged, metrics in self.lines if logged == step for name, value in metrics.items()}


class SpoilingRecorder(MemoryRecorder):
    """Sets the model's last norm to `value` after step `last`, behind the loop's back: what it ends with is not finite."""

    def __init__(self, model: nn.Module, last: int, value: float) -> None:
        super().__init__()
        self._model, self._last, self._value = model, last, value

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        if step == self._last:
            self._model.get_parameter("model.norm.weight").data[:] = self._value
        super().checkpoint(step, make_state)


def even(tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
    """Pays for even ids, and a little for stopping early."""
    scored = []
    for trajectory in trajectories:
        ids = [token for token, sampled in zip(trajectory.ids, trajectory.sampled, strict=True) if sampled]
        terms = {"even": sum(token % 2 == 0 for token in ids) / max(len(ids), 1), "short": -0.1 * len(ids)}
        scored.append(Scored(sum(terms.values()), terms, terms["even"] > 0.5))
    return scored


def row_logprobs(model: CausalLM, trajectory: Trajectory, temperature: float) -> Tensor:
    """Logprobs [L] of a trajectory's ids by one forward over this row alone."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.ids])
    logprobs = torch.log_softmax(model(ids[:, :-1])[0] / temperature, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(trajectory.prompt_ids) - 1 :]


class SamplingRun:
    """What a task of grpo or ppo samples with, over the tiny prompts, and the trajectories and warnings it leaves."""

    def __init__(
        self,
        sets: Path,
        tokenizer: Tokenizer,
        settings: Sampling,
        *,
        max_total_len: int = 500,
        autocast_dtype: torch.dtype | None = None,
        **model: Any,
    ) -> None:
        shape = {"sharpness": 6.0, "dropout": 0.1} | model
        self.policy = make_model(tokenizer, **shape)
        self.reference = make_model(tokenizer, **shape).requires_grad_(False)
        self.trajectories: list[list[Trajectory]] = []
        self.warnings: list[str] = []
        self.prompts = open_prompts(sets / "prepared" / "rlaif", settings, tokenizer, 0.0, self.warnings.append)
        stop_ids = [tokenizer.eos_id, *range(40, 300, 9)]  # more ends than one, so that lengths differ
        engine = TorchRolloutEngine(self.policy, stop_ids=stop_ids, pad_id=0, max_rows=64, autocast_dtype=autocast_dtype)
        self._sample = partial(
            run_episodes,
            engine,
            ChatEncoder(tokenizer),
            tokenizer,
            max_turns=1,
            max_new_tokens=settings.max_new_tokens,
            max_total_len=max_total_len,
            temperature=settings.temperature,
        )
        self._decode = tokenizer.decode_all

    def rollout(self, tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        self.trajectories.append(self._sample(tasks, keys=keys))
        return self.trajectories[-1]

    def task_fields(self, state: TrainState, score: Score) -> dict[str, Any]:
        """The fields of a `RolloutTask`."""
        sampling = {"policy": self.policy, "reference": self.reference, "prompts": self.prompts, "rollout": self.rollout}
        rest = {"decode": self._decode, "warn": self.warnings.append}
        return sampling | {"state": state, "score": score} | rest


class RouterSpy:
    """Collects what the routers of a model decide while they take statistics: per forward and layer the probabilities [N, E]."""

    def __init__(self, model: Backbone) -> None:
        self.forwards: list[list[Tensor]] = []
        self._top_k = model.config.num_experts_per_tok
        mixtures = [block.mlp for block in model.model.layers]

        def begin(module: nn.Module, args: Any) -> None:
            if mixtures[0].training:
                self.forwards.append([])

        def collect(module: nn.Module, args: Any, logits: Tensor) -> None:
            if mixtures[0].training:
                self.forwards[-1].append(logits.detach().double().softmax(dim=-1))

        model.model.register_forward_pre_hook(begin)
        for mixture in mixtures:
            mixture.gate.register_forward_hook(collect)

    def aux_loss(self, forward: int, visible: Tensor) -> float:
        """E * sum_e load_e * mean prob_e over the visible positions, summed over layers (arXiv:2101.03961 eq. 4-6)."""
        layers = [probs[visible.flatten()] for probs in self.forwards[forward]]
        return sum(probs.shape[1] * float(self._slots(probs).mean(dim=0) @ probs.mean(dim=0)) for probs in layers)

    def load_max(self, forward: int, visible: Tensor) -> float:
        """The largest share of a layer's slots on one expert."""
        layers = [probs[visible.flatten()] for probs in self.forwards[forward]]
        return max(float(self._slots(probs).mean(dim=0).max()) / self._top_k for probs in layers)

    def _slots(self, probs: Tensor) -> Tensor:
        """1 where a token chose an expert, [N, E]."""
        return torch.zeros_like(probs).scatter(1, probs.topk(self._top_k, dim=1).indices, 1.0)


def tokens_once(trajectories: Sequence[Trajectory]) -> Tensor:
    """All True, one per token that a forward over these trajectories reads: distinct prompts, and ids but each row's last."""
    prompts = {tuple(t.prompt_ids) for t in trajectories}
    return torch.ones(sum(map(len, prompts)) + sum(len(t.ids) - 1 for t in trajectories), dtype=torch.bool)


def up_to(lengths: Sequence[int]) -> Tensor:
    """[B, T] True at the first positions of each row."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


class SpyUpdater(Updater):
    """An updater that remembers the gradients it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients: list[dict[str, Tensor]] = []

    def update(self, step: int, *, context: str) -> Update:
        self.gradients.append({name: p.grad.clone() for name, p in self.named if p.grad is not None})
        return super().update(step, context=context)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moments(updater: Updater) -> dict[str, Tensor]:
    """Copies of everything the optimizer remembers."""
    state = updater.adamw.state_dict()["state"]
    return {f"{index}/{name}": value.clone() for index, entry in state.items() for name, value in entry.items()}


def assert_bits_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == []


def assert_near(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], atol=tolerance, rtol=tolerance * 10, msg=lambda text, name=name: f"{name}: {text}"
        )


def twin_adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """The optimizer that an `Updater` should be, written down anew: weight decay on matrices, but not on the embedding."""
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and n != "model.embed_tokens.weight"]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)


def twin_step(model: nn.Module, optimizer: torch.optim.AdamW, lr: float, max_grad_norm: float) -> None:
    """Clips by the global norm, steps at `lr`, clears."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
    for p in parameters:
        if p.grad is not None and norm > max_grad_norm:
            p.grad *= max_grad_norm / norm
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    model.zero_grad(set_to_none=True)


def one_module(model: nn.Module, settings: Optimizer, total_steps: int, name: str = "model") -> tuple[TrainState, SpyUpdater]:
    updater = SpyUpdater(model, settings, total_steps=total_steps)
    return TrainState({name: model}, {name: updater}), updater
