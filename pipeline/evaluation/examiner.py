"""Opens the panel and every checkpoint of the lineage, and measures each model that is not in the cache."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.checkpoint.files import load_model
from pipeline.checkpoint.lora import load_lora_model
from pipeline.checkpoint.reward import load_reward_model
from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.prepared import iter_prepared
from pipeline.data.prompts import PromptSet, PromptTask
from pipeline.digests import digests
from pipeline.errors import NumericsError
from pipeline.evaluation.panel import Examination, Examiner, Panel, last_turns, questions_of, single_turns
from pipeline.evaluation.results import cached
from pipeline.model.config import ModelConfig
from pipeline.model.lora import merge_lora
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Eval, Params
from pipeline.rewards.scoring import CompletionScorer
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer, load_tokenizer
from pipeline.tools.toolbox import Toolbox, open_toolbox
from pipeline.training.arithmetic import arithmetic
from pipeline.training.device import open_device
from pipeline.training.policy_setup import open_reward_model
from pipeline.training.reward_objective import RewardModelling

DATA, CHECKPOINTS = Path("data"), Path("checkpoints")
MODELS = ("pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent")
TEXT_BATCH, PAIR_BATCH = 32, 32


def measure_all(
    params: Params, deps: Sequence[str], declared: Mapping[str, Any], cache: Path, *, announce: Callable[[str], None]
) -> dict[str, Examination]:
    """What every model does on the panel, measured or from the cache.

    Args:
        deps: what stage eval reads; all of it but the other models' checkpoints identifies a measurement.
        declared: the params that decide its result, as a tree; `eval.confidence` decides no row's value.
        cache: scratch folder.
        announce: told about each model before it is measured, and about rows that do not fit.
    """
    device = open_device(params.runtime)
    tokenizer = load_tokenizer(DATA / "tokenizer")
    known = digests(Path.cwd(), deps)
    panel_identity = {name: digest for name, digest in known.items() if not name.startswith(("checkpoints/", "plots/"))} | {
        name: known[name] for name in ("checkpoints/reward.pth", "checkpoints/reward.json")
    }
    code = (DATA / "code" / "eval.json").read_text(encoding="utf-8")
    settings = {**declared, "eval": {k: v for k, v in declared["eval"].items() if k != "confidence"}}
    config = load_model(CHECKPOINTS / "full_sft.pth").config
    score = CompletionScorer(
        params.rewards, open_reward_model(CHECKPOINTS / "reward.pth", params.reward.external, tokenizer, device)
    )
    toolbox = open_toolbox(params.tools)
    panel = open_panel(params.eval, tokenizer, config, toolbox, announce)
    window = config.max_position_embeddings
    examiner = Examiner(panel, params.eval, tokenizer, ChatEncoder(tokenizer), score, device, window, toolbox)
    measured = {}
    for name in MODELS:
        names = [name, "full_sft"] if name == "lora" else [name]
        own = {path: known[path] for n in names for path in (f"checkpoints/{n}.pth", f"checkpoints/{n}.json")}
        identity = json.dumps([own, panel_identity, settings, code, arithmetic(device)], sort_keys=True)
        measured[name] = cached(cache, identity, partial(measure_one, name, examiner, announce))
    return measured


def measure_one(name: str, examiner: Examiner, announce: Callable[[str], None]) -> Examination:
    """One checkpoint on the panel; the reward model has only preference accuracy.

    Raises:
        NumericsError: a value that it measures is not finite.
    """
    announce(f"{name}: {examiner.panel.size()} held-out prompts")
    device, digest = examiner.device, examiner.tokenizer.digest
    if name == "reward":
        model = device.prepare(load_reward_model(CHECKPOINTS / "reward.pth", tokenizer_digest=digest))
        measured = examiner.score_values(RewardModelling(model, device))
    else:
        measured = examiner.measure(device.prepare(open_policy(name, digest)))
    for metric, rows in measured.values.items():
        if broken := sum(not math.isfinite(row) for row in rows):
            place = f"{CHECKPOINTS / name}.pth: {metric} is not finite on {broken} of {len(rows)} rows"
            raise NumericsError(f"{place}; the model overflows: lower {name}.lr and train it again")
    return measured


def open_policy(name: str, tokenizer_digest: str) -> CausalLM:
    """A language model of the lineage; adapters are merged into their base."""
    if name == "lora":
        model = load_lora_model(CHECKPOINTS / "full_sft.pth", CHECKPOINTS / "lora.pth", tokenizer_digest=tokenizer_digest)
        merge_lora(model)
        return model
    return load_model(CHECKPOINTS / f"{name}.pth", tokenizer_digest=tokenizer_digest)


def open_panel(
    params: Eval, tokenizer: Tokenizer, config: ModelConfig, toolbox: Toolbox, announce: Callable[[str], None]
) -> Panel:
    """Up to `panel_rows` held-out rows of each task, of those that fit the models' context and whose tools are there."""
    encoder = ChatEncoder(tokenizer)
    room = config.max_position_embeddings - params.max_new_tokens
    prompts = open_held_out("rlaif", params, tokenizer, room, params.thinking_ratio, announce)
    tasks = open_held_out("agent", params, tokenizer, room, 0.0, announce, toolbox)
    tool_tasks = list(islice((task for task in all_tasks(tasks) if task.gt), params.panel_rows))
    offered = [task.tools for task in tool_tasks if task.tools]
    questions = partial(questions_of, encoder=encoder, limit=params.panel_rows, max_prompt_len=room)
    return Panel(
        SupervisedBatches(DATA / "encoded/pretrain/held_out.arrow", batch_size=TEXT_BATCH, seed=params.seed, tokenizer=tokenizer),
        PairBatches(DATA / "encoded/dpo/held_out.arrow", batch_size=PAIR_BATCH, seed=params.seed, tokenizer=tokenizer),
        questions(single_turns(chosen_chats(DATA / "prepared/dpo"))),
        questions(single_turns(chosen_chats(DATA / "prepared/dpo")), offered=offered),
        questions(last_turns(iter_prepared(DATA / "prepared/lora", "held_out"))),
        list(islice(all_tasks(prompts), params.panel_rows)),
        tool_tasks,
    )


def chosen_chats(prepared: Path) -> Iterator[dict[str, Any]]:
    """The held-out pairs as chats that end with the chosen answer: the one reference that a question has."""
    for row in iter_prepared(prepared, "held_out"):
        yield {"conversations": row["chosen"], "tools": row["tools"]}


def open_held_out(
    name: str,
    params: Eval,
    tokenizer: Tokenizer,
    room: int,
    thinking_ratio: float,
    announce: Callable[[str], None],
    toolbox: Toolbox | None = None,
) -> PromptSet:
    """Held-out prompts of a set; the seed decides their order and which of them ask for thinking."""
    prompts = PromptSet(
        DATA / "prepared" / name,
        "held_out",
        batch_size=1,
        seed=params.seed,
        tokenizer=tokenizer,
        max_prompt_len=room,
        max_dropped_frac=1.0,
        thinking_ratio=thinking_ratio,
        toolbox=toolbox,
        beside="eval.max_new_tokens",
    )
    if prompts.dropped:
        announce(f"{len(prompts.dropped)} held-out rows of {name} dropped: " + "; ".join(prompts.dropped[:3]))
    return prompts


def all_tasks(prompts: PromptSet) -> Iterator[PromptTask]:
    """Every prompt of epoch 0."""
    return (task for index in range(prompts.batches_per_epoch) for task in prompts.batch(0, index))
