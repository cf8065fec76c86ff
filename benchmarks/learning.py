"""What every stage has learned, asked greedily on held-out rows of the embedded world.

    dvc repro eval && python benchmarks/learning.py [STAGE ...] [--rows N]

The panel of stage eval is small, so that a rebuild is quick. Here the world makes as many rows as are wanted, or as it has, from
a seed of its own; those whose question the split holds out are asked. Prints a Markdown table and the bars with paired intervals;
ends with 1 where one is missed.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import table
from pipeline.data.prepare import prompt_key
from pipeline.data.prepared import iter_prepared
from pipeline.data.prompts import PromptTask
from pipeline.data.schema import SET_KINDS, Kind, normalise
from pipeline.data.world import generate
from pipeline.errors import DataError
from pipeline.evaluation.examiner import open_policy
from pipeline.evaluation.panel import Asked, Question, last_turns, normalised, questions_of
from pipeline.evaluation.statistics import Estimate, paired, proportion
from pipeline.params import Params, load_params
from pipeline.rewards.scoring import solved
from pipeline.rollout.episodes import read_turn, run_episodes
from pipeline.rollout.records import Completion, RolloutEngine
from pipeline.supervise import exit_on_error
from pipeline.text.chat import ChatEncoder
from pipeline.text.tokenizer import Tokenizer, load_tokenizer
from pipeline.training.device import open_device
from pipeline.training.policy_setup import open_engine
from pipeline.yaml_files import read_yaml

CONFIDENCE = 0.95
NUMBERS = ("one", "two", "three", "four", "five", "six")
ANY_NUMBER = dict.fromkeys(NUMBERS, 1 / len(NUMBERS))
FEW = dict.fromkeys(NUMBERS, 0.0) | {"one": 0.7, "two": 0.3}


@dataclass(frozen=True, slots=True)
class Bar:
    """The share of a stage's right replies, less that of `over` where one is named, must reach `least`."""

    topic: str
    stage: str
    least: float
    over: str | None = None


BARS = (
    Bar("tools, 1 or 2 offered", "full_sft", 0.64),
    Bar("questions", "full_sft", 0.23),
    Bar("subject", "lora", 0.6),
    Bar("tools, 1 to 6 offered", "dpo", -0.1, "full_sft"),
    Bar("questions", "ppo", 0.1, "full_sft"),
    Bar("questions", "grpo", 0.1, "full_sft"),
    Bar("tools, 1 to 6 offered", "agent", 0.1, "full_sft"),
)
SETS = ("lora", "dpo", "rlaif", "agent")
"""What stages train on after full_sft."""
STAGES = ("full_sft", "lora", "dpo", "ppo", "grpo", "agent")


class UnseenRows:
    """Rows of the embedded world that fall to the held-out side of the split, no two the same.

    The split is by what a row asks, so held-out rows are a fair sample of the world. No stage after full_sft trains a reply to
    what they ask last; full_sft has met most of what a closed world can be asked.
    """

    def __init__(self, params: Params) -> None:
        recipe = dict(read_yaml(Path(params.data.sets.agent.source)))
        self._recipe = {**recipe, "seed": recipe["seed"] + 1}
        self._seed = params.data.seed
        self._trained = {text for name in SETS for row in prepared(name, "train") for text in trained_questions(name, row)}

    def of(self, name: str, **changes: Any) -> Iterator[dict[str, Any]]:
        """Rows of a set as `prepare` stores them.

        Args:
            name: of the set.
            changes: what differs from the recipe of the lineage, beside its seed.
        """
        rows, kind = self._recipe["rows"], SET_KINDS[name]
        last = max(prompt_key(row, kind, self._seed) for row in prepared(name, "held_out"))
        with suppress(DataError):  # the world has no further rows
            for raw in generate(name, {**self._recipe, **changes, "rows": {**rows, name: 100 * rows[name]}}):
                row, _ = normalise(raw, kind, [])
                if prompt_key(row, kind, self._seed) <= last and trained_questions(name, row)[-1] not in self._trained:
                    yield row


def prepared(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of the lineage's own set."""
    return iter_prepared(Path("data/prepared") / name, split)


def trained_questions(name: str, row: Mapping[str, Any]) -> list[str]:
    """Those whose replies are trained: all of a chat, else the last one."""
    kind = SET_KINDS[name]
    messages = row["chosen" if kind is Kind.PAIRS else "conversations"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked if kind is Kind.CHAT else asked[-1:]


@dataclass(frozen=True, slots=True)
class Examination:
    """How a model answers, greedily."""

    engine: RolloutEngine
    encoder: ChatEncoder
    tokenizer: Tokenizer
    params: Params

    def questions(self, questions: Sequence[Question]) -> list[float]:
        """1.0 where the reply is the reference answer."""
        prompts = [question.prompt_ids for question in questions]
        longest = self.params.eval.max_new_tokens
        replies = self.engine.generate(prompts, keys=range(len(prompts)), max_new_tokens=longest, temperature=1.0, greedy=True)
        return [
            float(normalised(self.answer_of(reply)) == normalised(question.reference))
            for question, reply in zip(questions, replies, strict=True)
        ]

    def answer_of(self, reply: Completion) -> str:
        return read_turn(self.tokenizer, reply, open_thinking=False).parsed.answer

    def tasks(self, tasks: Sequence[PromptTask]) -> list[float]:
        """1.0 where the last reply holds every expected answer."""
        settings = self.params.eval
        trajectories = run_episodes(
            self.engine,
            self.encoder,
            self.tokenizer,
            tasks,
            keys=range(len(tasks)),
            max_turns=settings.max_turns,
            max_new_tokens=settings.max_new_tokens,
            max_total_len=self.params.model.max_position_embeddings,
            temperature=1.0,
            greedy=True,
        )
        return [float(solved(task, trajectory)) for task, trajectory in zip(tasks, trajectories, strict=True)]


Topic = Callable[[Examination], list[float]]


def topics(unseen: UnseenRows, encoder: ChatEncoder, rows: int) -> dict[str, Topic]:
    """What models are asked, by name."""
    asked = list(islice(last_turns(chosen(unseen)), rows))
    few, any_number = (agent_tasks(unseen, encoder, rows, offered) for offered in (FEW, ANY_NUMBER))
    idle = [task.tools for task in any_number]

    def exact(chats: Sequence[Asked], **offered: Any) -> Topic:
        questions = questions_of(chats, encoder, limit=rows, max_prompt_len=sys.maxsize, **offered)
        return lambda examination: examination.questions(questions)

    return {
        "questions": exact(asked),
        "questions, idle tools": exact(asked, offered=idle),
        "subject": exact(list(islice(last_turns(unseen.of("lora")), rows))),
        "tools, 1 or 2 offered": lambda examination: examination.tasks(few),
        "tools, 1 to 6 offered": lambda examination: examination.tasks(any_number),
    }


def chosen(unseen: UnseenRows) -> Iterator[dict[str, Any]]:
    """Pairs as chats that end with their good answer, three in four under a system message: so there are more different ones."""
    pairs = unseen.of("dpo", system_frac=0.75, earlier_turn_frac=0.0)
    return ({"conversations": row["chosen"], "tools": row["tools"]} for row in pairs)


def agent_tasks(unseen: UnseenRows, encoder: ChatEncoder, rows: int, offered: Mapping[str, float]) -> list[PromptTask]:
    """Tasks that offer so many tools."""
    return [
        PromptTask(
            number,
            encoder.encode_prompt(row["conversations"], row["tools"]),
            False,
            row["conversations"],
            row["tools"],
            row["gt"],
        )
        for number, row in enumerate(islice(unseen.of("agent", offered=offered), rows))
    ]


def main(
    stages: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(STAGES)}; all when left out")] = None,
    rows: Annotated[int, typer.Option(help="of every topic", min=2)] = 600,
) -> None:
    """Asks models and prints what they know; of the bars those whose stages were asked."""
    if unknown := sorted(set(stages or ()) - set(STAGES)):
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(STAGES)}")
    params = load_params()
    tokenizer = load_tokenizer(Path("data/tokenizer"))
    device, encoder = open_device(params.runtime), ChatEncoder(tokenizer)
    asked = topics(UnseenRows(params), encoder, rows)
    found: dict[str, dict[str, list[float]]] = {}
    for stage in stages or STAGES:
        print(f"{stage}: {len(asked)} topics of up to {rows} rows", file=sys.stderr, flush=True)
        model = device.prepare(open_policy(stage, tokenizer.digest)).eval()
        engine = open_engine(model, tokenizer, device, max_rows=params.eval.batch_size)
        examination = Examination(engine, encoder, tokenizer, params)
        found[stage] = {topic: ask(examination) for topic, ask in asked.items()}
    shares = [
        (stage, *(shown(proportion([value == 1 for value in found[stage][topic]], CONFIDENCE)) for topic in asked))
        for stage in found
    ]
    print(table(("greedy", *asked), shares))
    judged = [judge(bar, found) for bar in BARS if {bar.stage, bar.over or bar.stage} <= found.keys()]
    print("\n" + table(("stage", "topic", "over", "bar", "measured", "verdict"), judged))
    raise typer.Exit(1 if any(row[-1] == "MISSED" for row in judged) else 0)


def judge(bar: Bar, found: Mapping[str, Mapping[str, list[float]]]) -> tuple[str, ...]:
    """A row of the table of bars. A gain must be clear, too: its paired interval lies above 0."""
    values = found[bar.stage][bar.topic]
    if bar.over is None:
        estimate = proportion([value == 1 for value in values], CONFIDENCE)
        met = estimate.value >= bar.least
    else:
        estimate = paired(values, found[bar.over][bar.topic], CONFIDENCE)
        met = estimate.value >= bar.least and (bar.least <= 0 or estimate.low > 0)
    return bar.stage, bar.topic, bar.over or "-", f"{bar.least:+.2f}", shown(estimate), "met" if met else "MISSED"


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}] n={estimate.n}"


if __name__ == "__main__":
    with exit_on_error("learning"):
        typer.run(main)
