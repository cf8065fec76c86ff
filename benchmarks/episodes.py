"""Agent episodes per second: all trajectories of a step together, against one at a time that reads its context anew each turn."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Rates, Work, interleaved
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
PLAIN, ALONE = "one at a time, plain loop", "one at a time, our engine"
Finished = Callable[[int, Completion], Continuation | None]


class PlainEngine:
    """One row at a time, every context read anew, keys and values concatenated at each step; the draws are those of ours."""

    def __init__(self, model: CausalLM, stop_id: int) -> None:
        self._model, self._stop_id = model, stop_id

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
        rows = map(NextTurn, prompts, keys, limits)
        return [turn_by_turn(number, row, finished, partial(self._complete, temperature)) for number, row in enumerate(rows)]

    @torch.inference_mode()
    def _complete(self, temperature: float, turn: NextTurn) -> Completion:
        prompt = turn.prompt
        device = self._model.lm_head.weight.device
        ids, mask = torch.tensor([[*prompt]], device=device), torch.ones(1, len(prompt), device=device)
        positions = torch.arange(len(prompt), device=device)[None]
        caches: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(self._model.model.layers)
        completion = Completion([], [], StopReason.LENGTH)
        for noise in uniforms([turn.key], turn.max_new_tokens)[0]:
            hidden = plain_forward(self._model, ids, positions, mask, caches)
            drawn, logprob = draw(self._model.head(hidden[:, -1]), temperature, noise[None].to(device))
            completion.ids.append(int(drawn))
            completion.logprobs.append(float(logprob))
            if int(drawn) == self._stop_id:
                completion.stop = StopReason.EOS
                break
            ids, positions, mask = drawn[None], positions[:, -1:] + 1, torch.cat((mask, mask.new_ones(1, 1)), dim=1)
        return completion


class Forgetful:
    """An engine that completes one turn at a time and reads its whole context anew."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keys: Sequence[int],
        max_new_tokens: int | Sequence[int],
        finished: Finished | None = None,
        **rest: Any,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens

        def complete(turn: NextTurn) -> Completion:
            return self._engine.generate([turn.prompt], keys=[turn.key], max_new_tokens=[turn.max_new_tokens], **rest)[0]

        return [turn_by_turn(number, row, finished, complete) for number, row in enumerate(map(NextTurn, prompts, keys, limits))]


def turn_by_turn(
    number: int, turn: NextTurn, finished: Finished | None, complete: Callable[[NextTurn], Completion]
) -> Completion:
    """The completion of a prompt's last turn, each turn a completion of its own."""
    while True:
        completion = complete(turn)
        going_on = finished and finished(number, completion)
        following = going_on and going_on()
        if not following:
            return completion
        turn = following


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
        rows += [(policy, name, f"{rate.median:.2f}", f"{rate.spread:.0%}", f"{times[name]:.2f}") for name, rate in rates.items()]
        same = sum(ours.ids == theirs.ids for ours, theirs in zip(done["ours"], done[PLAIN], strict=True))
        mean = sum(len(trajectory.turns) for trajectory in done["ours"]) / NUM_TRAJECTORIES
        turns.append(
            f"{mean:.2f} turns on average by {policy} ({same} of {NUM_TRAJECTORIES} trajectories have the same ids as ours)"
        )
        bars += [
            Bar(f"agent episodes of {policy} against a plain loop, one at a time, full re-prefill", times[PLAIN], 8.0),
            Bar(f"agent episodes of {policy} against our engine, one at a time", times[ALONE]),
        ]
    workload = (
        f"{NUM_TRAJECTORIES} trajectories of stage agent in groups of {settings.group_size}, {model.config.hidden_size} x "
        f"{model.config.num_hidden_layers}, at most {settings.max_turns} turns, tools called for real; the plain loop draws with "
        f"the same numbers. {'; '.join(turns)}."
    )
    return Report("episodes", workload, ("policy", "", "episodes/s", "spread", "ours is x times as fast"), rows, bars)


def _compare(
    setting: Setting, model: CausalLM, tokenizer: Tokenizer, tasks: Sequence[PromptTask], settings: Agent
) -> tuple[dict[str, Rates], dict[str, list[Trajectory]]]:
    """Episodes per second of each way, and its last trajectories."""
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
        return float(NUM_TRAJECTORIES)

    def one_by_one(name: str, engine: RolloutEngine) -> float:
        rows = zip(tasks, range(NUM_TRAJECTORIES), strict=True)
        done[name] = [run_episodes(engine, encoder, tokenizer, [task], keys=[key], **common)[0] for task, key in rows]
        return float(NUM_TRAJECTORIES)

    ways: dict[str, Work] = {
        "ours": at_once,
        PLAIN: partial(one_by_one, PLAIN, PlainEngine(model, tokenizer.eos_id)),
        ALONE: partial(one_by_one, ALONE, Forgetful(open_engine(model, tokenizer, setting.device, max_rows=1))),
    }
    return interleaved(ways, repeats=setting.repeats, device=setting.torch_device), done
