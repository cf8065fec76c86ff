"""How the stages that sample are put together: prompts, policies, rollouts, and the reward model they are scored with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.checkpoint.files import load_meta, load_model
from pipeline.checkpoint.reward import load_reward_model
from pipeline.data.prompts import PromptSet, PromptTask
from pipeline.errors import ParamsError
from pipeline.model.config import ModelConfig
from pipeline.model.kv_block import KVBlock
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Agent, Group, Sampling
from pipeline.rewards.model import ExternalRewardModel, RewardScorer, TrainedRewardModel
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Trajectory
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.rollout.truncation import Truncation
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox
from pipeline.training.device import Device
from pipeline.training.rollouts import Rollout, RolloutTask, Scorer, total_steps
from pipeline.training.state import TrainState
from pipeline.training.updater import Updater

SCORING_BATCH = 64


def open_prompts(
    prepared: Path,
    settings: Sampling,
    tokenizer: Tokenizer,
    max_dropped_frac: float,
    announce: Callable[[str], None],
    toolbox: Toolbox | None = None,
) -> PromptSet:
    """The training prompts of a stage, drawn by its seed, thinking ratio and system-prompt share; dropped rows are announced.

    Arguments and errors as `PromptSet`.
    """
    prompts = PromptSet(
        prepared,
        "train",
        batch_size=settings.batch_size,
        seed=settings.seed,
        tokenizer=tokenizer,
        max_prompt_len=settings.max_prompt_len,
        max_dropped_frac=max_dropped_frac,
        thinking_ratio=settings.thinking_ratio,
        system_prompt_frac=settings.system_prompt_frac,
        toolbox=toolbox,
    )
    if prompts.dropped:
        announce("\n  ".join([f"{len(prompts.dropped)} prompts dropped:", *prompts.dropped]))
    return prompts


def open_engine(
    model: CausalLM, tokenizer: Tokenizer, device: Device, *, max_rows: int, truncation: Truncation | None = None
) -> TorchRolloutEngine:
    """Samples from `model` as it is at each call, so also from one that is being trained."""
    return TorchRolloutEngine(
        model,
        stop_ids=[tokenizer.eos_id],
        pad_id=tokenizer.pad_id,
        max_rows=max_rows,
        autocast_dtype=device.autocast_dtype,
        truncation=truncation,
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """What a policy meets: the prompts of its stage, what scores its answers, and what answers its tool calls."""

    tokenizer: Tokenizer
    prompts: PromptSet
    score: Scorer
    device: Device
    warn: Callable[[str], None]
    toolbox: Toolbox = PRESET_TOOLS


def open_group_task(start: Path, settings: Group, environment: Environment) -> RolloutTask:
    """A group stage ready to train: the weights of `start` as policy and as frozen reference."""
    policy, reference = open_policies(start, environment)
    steps = total_steps(settings, environment.prompts)
    state = TrainState({"policy": policy}, {"policy": Updater(policy, settings, total_steps=steps)})
    rollout = open_rollout(policy, settings, environment)
    decode = environment.tokenizer.decode_all
    return RolloutTask(state, policy, reference, environment.prompts, rollout, environment.score, decode, environment.warn)


def open_policies(start: Path, environment: Environment) -> tuple[CausalLM, CausalLM]:
    """The same weights twice: to be trained, and frozen."""
    digest = environment.tokenizer.digest
    policy, reference = (environment.device.prepare(load_model(start, tokenizer_digest=digest)) for _ in range(2))
    return policy, reference.requires_grad_(False)


def open_rollout(policy: CausalLM, settings: Sampling, environment: Environment) -> Rollout:
    """Episodes sampled from `policy` as it is at each call, at the stage's temperature; one turn is a plain completion.

    Raises:
        ParamsError: not even one row's keys and values fit into `cache_gib`.
    """
    encoder = ChatEncoder(environment.tokenizer)
    if isinstance(settings, Agent):
        max_turns, max_total_len = settings.max_turns, settings.max_total_len
    else:
        max_turns, max_total_len = 1, settings.max_prompt_len + settings.max_new_tokens
    dtype = environment.device.autocast_dtype or policy.lm_head.weight.dtype
    in_memory = rows_in_memory(policy.config, settings, dtype, max_total_len)
    engine = open_engine(policy, environment.tokenizer, environment.device, max_rows=min(settings.max_rows, in_memory))

    def rollout(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        return run_episodes(
            engine,
            encoder,
            environment.tokenizer,
            tasks,
            keys=keys,
            max_turns=max_turns,
            max_new_tokens=settings.max_new_tokens,
            max_total_len=max_total_len,
            temperature=settings.temperature,
            toolbox=environment.toolbox,
        )

    return rollout


def open_reward_model(path: Path, external: str | None, tokenizer: Tokenizer, device: Device) -> RewardScorer:
    """The reward model that stage `reward` trained at `path`, or the external one below external/."""
    if external is not None:
        return ExternalRewardModel(Path("external") / external, device=device.device)
    model = device.prepare(load_reward_model(path, tokenizer_digest=tokenizer.digest))
    score = load_meta(path, "reward", tokenizer.digest)["score"]
    return TrainedRewardModel(
        model,
        ChatEncoder(tokenizer),
        pad_id=tokenizer.pad_id,
        offset=score["offset"],
        scale=score["scale"],
        batch_size=SCORING_BATCH,
        max_len=model.config.max_position_embeddings,
    )


def rows_in_memory(config: ModelConfig, settings: Sampling, dtype: torch.dtype, max_total_len: int) -> int:
    """How many rows of `max_total_len` positions `cache_gib` holds; the parameters alone decide it, so a resumed run has as many.

    Raises:
        ParamsError: none.
    """
    row_gib = KVBlock.bytes_per_position(config, dtype) * (max_total_len + 1) / 2**30
    rows = int(settings.cache_gib / row_gib)
    if not rows:
        stage = type(settings).__name__.lower()
        raise ParamsError(
            f"{stage}.cache_gib={settings.cache_gib:g}: must be >= {row_gib:.3g}, what the keys and values of one row of "
            f"{max_total_len} positions take"
        )
    return rows
