"""What the stages that sample set up alike: prompts, rollouts, and the reward model they are scored with."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.checkpoint.files import load_meta
from pipeline.checkpoint.reward import load_reward_model
from pipeline.data.prompts import PromptSet, PromptTask
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Sampling
from pipeline.rewards.model import ExternalRewardModel, RewardScorer, TrainedRewardModel
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Trajectory
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer
from pipeline.training.device import Device
from pipeline.training.rollouts import Rollout

SCORING_BATCH = 64


def open_prompts(
    prepared: Path, settings: Sampling, tokenizer: Tokenizer, max_dropped_frac: float, announce: Callable[[str], None]
) -> PromptSet:
    """The training prompts of a stage, drawn by its seed, thinking ratio and system-prompt share; dropped rows are announced."""
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
    )
    if prompts.dropped:
        announce("\n  ".join([f"{len(prompts.dropped)} over-long prompts dropped:", *prompts.dropped]))
    return prompts


def open_engine(model: CausalLM, tokenizer: Tokenizer, device: Device, *, max_rows: int) -> TorchRolloutEngine:
    """Samples from `model` as it is at each call, so also from one that is being trained."""
    return TorchRolloutEngine(
        model,
        stop_ids=[tokenizer.eos_id],
        pad_id=tokenizer.pad_id,
        max_rows=max_rows,
        autocast_dtype=device.autocast_dtype,
    )


def open_rollout(
    engine: TorchRolloutEngine, tokenizer: Tokenizer, settings: Sampling, *, max_turns: int, max_total_len: int
) -> Rollout:
    """Episodes sampled at the stage's temperature; one turn is a plain completion."""
    encoder = ChatEncoder(tokenizer)

    def rollout(tasks: Sequence[PromptTask], keys: Sequence[int]) -> list[Trajectory]:
        return run_episodes(
            engine,
            encoder,
            tokenizer,
            tasks,
            keys=keys,
            max_turns=max_turns,
            max_new_tokens=settings.max_new_tokens,
            max_total_len=max_total_len,
            temperature=settings.temperature,
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
