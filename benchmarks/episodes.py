"""Agent episodes per second: all trajectories of a step together, against one at a time that reads its context anew each turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved
from benchmarks.report import Bar, Report
from benchmarks.setting import Setting, needs
from pipeline.checkpoint.files import load_model
from pipeline.params import load_params
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Completion, RolloutEngine
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import load_tokenizer
from pipeline.training.policy_setup import open_engine, open_prompts

NUM_TRAJECTORIES = 32


class Forgetful:
    """An engine that reads the whole context anew at every turn."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(
        self, prompts: Sequence[Sequence[int]], *, previous: Any = None, remember: bool = False, **rest: Any
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; `previous` and `remember` are left out."""
        return self._engine.generate(prompts, **rest)


def episodes(setting: Setting) -> Report:
    """On the policy that full_sft left and the prompts of stage agent."""
    params = load_params()
    settings = params.agent
    tokenizer = load_tokenizer(needs("data/tokenizer", "tokenizer"))
    model = setting.device.prepare(load_model(needs("checkpoints/full_sft.pth", "full_sft"), tokenizer_digest=tokenizer.digest))
    prepared = needs("data/prepared/agent", "data@agent")
    prompts = open_prompts(Path(prepared), settings, tokenizer, params.data.max_dropped_frac, setting.say)
    distinct = [task for index in range(prompts.batches_per_epoch) for task in prompts.batch(0, index)]
    groups = -(-NUM_TRAJECTORIES // settings.group_size)
    tasks = [task for task in distinct[:groups] for _ in range(settings.group_size)][:NUM_TRAJECTORIES]
    encoder = ChatEncoder(tokenizer)
    common: dict[str, Any] = {
        "max_turns": settings.max_turns,
        "max_new_tokens": settings.max_new_tokens,
        "max_total_len": settings.max_total_len,
        "temperature": settings.temperature,
    }
    together = open_engine(model, tokenizer, setting.device, max_rows=NUM_TRAJECTORIES)
    alone = Forgetful(open_engine(model, tokenizer, setting.device, max_rows=1))
    turns: list[int] = []

    def at_once() -> float:
        trajectories = run_episodes(together, encoder, tokenizer, tasks, keys=range(NUM_TRAJECTORIES), **common)
        turns[:] = [len(trajectory.turns) for trajectory in trajectories]
        return float(NUM_TRAJECTORIES)

    def one_by_one() -> float:
        for key, task in enumerate(tasks):
            run_episodes(alone, encoder, tokenizer, [task], keys=[key], **common)
        return float(NUM_TRAJECTORIES)

    rates = interleaved({"ours": at_once, "one at a time": one_by_one}, repeats=setting.repeats, device=setting.torch_device)
    ratio = rates["ours"].median / rates["one at a time"].median
    workload = (
        f"{NUM_TRAJECTORIES} trajectories of stage agent in groups of {settings.group_size}, {model.config.hidden_size} x "
        f"{model.config.num_hidden_layers}, at most "
        f"{settings.max_turns} turns ({sum(turns) / len(turns):.2f} on average), tools called for real, the same text in both."
    )
    rows = [(name, f"{rate.median:.2f}", f"{rate.spread:.0%}") for name, rate in rates.items()]
    bars = [Bar("agent episodes against one at a time with full re-prefill", ratio, 8.0)]
    return Report("episodes", workload, ("", "episodes/s", "spread"), rows, bars)
