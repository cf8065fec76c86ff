"""Rate of agent episodes: all trajectories of a step together, against one at a time that reads its context anew each turn."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Rates, Work, interleaved
from benchmarks.models import transformers_twin
from benchmarks.report import Bar, Report
from benchmarks.sampling import plain_forward
from benchmarks.setting import Setting, needs
from pipeline.checkpoint.files import load_model
from pipeline.data.prompts import PromptTask
from pipeline.model.transformer import CausalLM
from pipeline.params import load_params
from pipeline.params.schema import Agent
from pipeline.rollout.episodes import run_episodes
from pipeline.rollout.records import Completion, Continuation, NextTurn, RolloutEngine, StopReason, Trajectory
from pipeline.rollout.sampling import draw, uniforms
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer, load_tokenizer
from pipeline.training.policy_setup import open_engine, open_prompts

NUM_TRAJECTORIES = 32
TRANSFORMERS, PLAIN, ALONE = (f"one at a time, {way}" for way in ("transformers generate", "plain loop", "our engine"))
Finished = Callable[[int, Completion], Continuation | None]
Complete = Callable[[NextTurn, float], Completion]
"""Completes a turn, whose whole context it reads, at a temperature."""


class OneAtATime:
    """A `RolloutEngine` that completes one turn after another, each for itself."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        finished: Finished | None = None,
        **_: Any,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; every row is sampled."""
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        last = []
        for number, row in enumerate(map(NextTurn, prompts, keys, limits)):
            turn: NextTurn | None = row
            while turn is not None:
                completion = self._complete(turn, temperature)
                going_on = finished and finished(number, completion)
                turn = going_on() if going_on else None
            last.append(completion)
        return last


def by_engine(engine: RolloutEngine) -> Complete:
    """Our engine, with a batch of one row and nothing remembered."""

    def complete(turn: NextTurn, temperature: float) -> Completion:
        limit = turn.max_new_tokens
        return engine.generate([turn.prompt], keys=[turn.key], max_new_tokens=limit, temperature=temperature)[0]

    return complete


def by_transformers(twin: Any, stop_id: int, pad_id: int) -> Complete:
    """`generate` with its own draws."""

    def complete(turn: NextTurn, temperature: float) -> Completion:
        torch.manual_seed(turn.key % 2**63)
        ids = torch.tensor([[*turn.prompt]], device=twin.device)
        with torch.inference_mode():
            whole = twin.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                temperature=temperature,
                max_new_tokens=turn.max_new_tokens,
                eos_token_id=stop_id,
                pad_token_id=pad_id,
            )
        new = whole[0, ids.shape[1] :].tolist()
        return Completion(new, [0.0] * len(new), StopReason.EOS if new[-1] == stop_id else StopReason.LENGTH)

    return complete


def by_plain_loop(model: CausalLM, stop_id: int) -> Complete:
    """Keys and values concatenated at each step; the draws are those of our engine."""

    @torch.inference_mode()
    def complete(turn: NextTurn, temperature: float) -> Completion:
        device, length = model.lm_head.weight.device, len(turn.prompt)
        ids, mask = torch.tensor([[*turn.prompt]], device=device), torch.ones(1, length, device=device)
        positions = torch.arange(length, device=device)[None]
        caches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(model.model.layers)
        completion = Completion([], [], StopReason.LENGTH)
        for noise in uniforms([turn.key], turn.max_new_tokens)[0]:
            hidden = plain_forward(model, ids, positions, mask, caches)
            drawn, logprob = draw(model.head(hidden[:, -1]), temperature, noise[None].to(device))
            completion.ids.append(int(drawn))
            completion.logprobs.append(float(logprob))
            if int(drawn) == stop_id:
                completion.stop = StopReason.EOS
                break
            ids, positions, mask = drawn[None], positions[:, -1:] + 1, torch.cat((mask, mask.new_ones(1, 1)), dim=1)
        return completion

    return complete


def episodes(setting: Setting) -> Report:
    """On the prompts of stage agent, by the policy that the stage starts from and by the one that it leaves."""
    params = load_params()
    settings = params.agent
    tokenizer = load_tokenizer(needs("data/tokenizer", "tokenizer"))
    prepared = needs("data/prepared/agent", "data@agent")
    prompts = open_prompts(Path(prepared), settings, tokenizer, params.data.max_dropped_frac, setting.say)
    distinct = [task for index in range(prompts.batches_per_epoch) for task in prompts.batch(0, index)]
    groups = -(-NUM_TRAJECTORIES // settings.group_size)
    tasks = [task for task in distinct[:groups] for _ in range(settings.group_size)][:NUM_TRAJECTORIES]
    rows, bars, turns = [], [], []
    for policy in ("full_sft", "agent"):
        path = needs(f"checkpoints/{policy}.pth", policy)
        model = setting.device.prepare(load_model(path, tokenizer_digest=tokenizer.digest)).eval()
        rates, done = _compare(setting, model, tokenizer, tasks, settings)
        own = rates["ours"].median
        times = {name: own / rate.median for name, rate in rates.items()}
        rows += [
            (policy, name, f"{rate.median:,.0f}", f"{rate.spread:.0%}", f"{times[name]:.2f}") for name, rate in rates.items()
        ]
        same = sum(ours.ids == theirs.ids for ours, theirs in zip(done["ours"], done[PLAIN], strict=True))
        mean = sum(len(trajectory.turns) for trajectory in done["ours"]) / NUM_TRAJECTORIES
        turns.append(f"{mean:.2f} turns on average by {policy}, {same} of {NUM_TRAJECTORIES} trajectories as by the plain loop")
        bars += [
            Bar(f"agent episodes of {policy} against {way}, full re-prefill", times[way], least)
            for way, least in ((TRANSFORMERS, 8.0), (PLAIN, None), (ALONE, None))
        ]
    workload = (
        f"{NUM_TRAJECTORIES} trajectories of stage agent in groups of {settings.group_size}, {model.config.hidden_size} x "
        f"{model.config.num_hidden_layers}, at most {settings.max_turns} turns, tools called for real; plain loop and "
        f"our engine draw with the same numbers. {'; '.join(turns)}."
    )
    return Report("episodes", workload, ("policy", "", "sampled tokens/s", "spread", "ours is x times as fast"), rows, bars)


def _compare(
    setting: Setting, model: CausalLM, tokenizer: Tokenizer, tasks: Sequence[PromptTask], settings: Agent
) -> tuple[dict[str, Rates], dict[str, list[Trajectory]]]:
    """Sampled tokens per second of each way, and its last trajectories."""
    encoder = ChatEncoder(tokenizer)
    common: dict[str, Any] = {
        "max_turns": settings.max_turns,
        "max_new_tokens": settings.max_new_tokens,
        "max_total_len": settings.max_total_len,
        "temperature": settings.temperature,
    }
    together = open_engine(model, tokenizer, setting.device, max_rows=NUM_TRAJECTORIES)
    done: dict[str, list[Trajectory]] = {}

    def at_once() -> float:
        done["ours"] = run_episodes(together, encoder, tokenizer, tasks, keys=range(NUM_TRAJECTORIES), **common)
        return num_sampled("ours")

    def one_by_one(name: str, complete: Complete) -> float:
        rows = zip(tasks, range(NUM_TRAJECTORIES), strict=True)
        engine = OneAtATime(complete)
        done[name] = [run_episodes(engine, encoder, tokenizer, [task], keys=[key], **common)[0] for task, key in rows]
        return num_sampled(name)

    def num_sampled(name: str) -> float:
        return float(sum(trajectory.num_sampled for trajectory in done[name]))

    alone = open_engine(model, tokenizer, setting.device, max_rows=1)
    twin = transformers_twin(model).to(setting.dtype)
    ways: dict[str, Work] = {
        "ours": at_once,
        TRANSFORMERS: partial(one_by_one, TRANSFORMERS, by_transformers(twin, tokenizer.eos_id, tokenizer.pad_id)),
        PLAIN: partial(one_by_one, PLAIN, by_plain_loop(model, tokenizer.eos_id)),
        ALONE: partial(one_by_one, ALONE, by_engine(alone)),
    }
    return interleaved(ways, repeats=setting.repeats, device=setting.torch_device), done
