"""The held-out panel and what one model does on it, row by row. Definitions for users: docs/evaluation.md."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from pipeline.data.batches import PairBatches, SupervisedBatches
from pipeline.data.prompts import PromptTask
from pipeline.evaluation.catalogue import BASELINE, OFFERED
from pipeline.maths.logprobs import token_logprobs
from pipeline.model.transformer import CausalLM
from pipeline.params.schema import Eval
from pipeline.rewards.scoring import CompletionScorer, asked_by, earned, solved
from pipeline.rollout.episodes import read_turn, run_episodes
from pipeline.rollout.records import Completion, RolloutEngine, StopReason, Trajectory, Turn
from pipeline.text.chat import ChatEncoder, Message
from pipeline.text.tokenizer import Tokenizer
from pipeline.text.turns import ParsedTurn
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox
from pipeline.training.device import Device
from pipeline.training.objectives import answer_lengths
from pipeline.training.policy_setup import open_engine
from pipeline.training.reward_objective import RewardModelling
from pipeline.training.updater import seed_for

RowValues = dict[str, list[float]]
"""Per-row values by metric; `bits` and `bytes` belong together (their ratio is bits_per_byte). Baselines are no model's own."""

BY_LENGTH = f"preference_accuracy{BASELINE}length"
"""1.0 where the chosen answer of a pair is the shorter one, 0.5 where both are as long: what is earned without reading them."""


SAMPLES_PER_TASK = 5


@dataclass(frozen=True, slots=True)
class Examination:
    """What a model did on the panel.

    Attributes:
        values: row by row, by metric.
        samples: its sampled replies to the first few rows of every task, as table rows.
    """

    values: RowValues
    samples: list[dict[str, Any]] = field(default_factory=list)

    def __or__(self, other: "Examination") -> "Examination":
        return Examination(self.values | other.values, self.samples + other.samples)


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question with its reference answer."""

    prompt_ids: list[int]
    reference: str


@dataclass(frozen=True, slots=True)
class Panel:
    """The rows every model is measured on.

    Attributes:
        text: windows of documents.
        pairs: preference pairs.
        questions: single-turn questions.
        idle: the same questions, each with the tools of some task, which it does not need.
        subject: the last questions of the chats that adapters are trained on.
        prompts: what is answered for a reward.
        tasks: what needs tools.
    """

    text: SupervisedBatches
    pairs: PairBatches
    questions: list[Question]
    idle: list[Question]
    subject: list[Question]
    prompts: list[PromptTask]
    tasks: list[PromptTask]

    def size(self) -> int:
        """How many prompts are answered."""
        return sum(len(asked) for asked in (self.questions, self.idle, self.subject, self.prompts, self.tasks))


Asked = tuple[list[Message], str]
"""The messages up to a question, and the reference answer."""


def single_turns(rows: Iterable[dict[str, Any]]) -> Iterator[Asked]:
    """The single-turn chats without system message, tools or reasoning: those that have one right form."""
    for row in rows:
        if [message["role"] for message in row["conversations"]] == ["user", "assistant"]:
            yield from last_turns([row])


def last_turns(rows: Iterable[dict[str, Any]]) -> Iterator[Asked]:
    """Chats without tools up to their last answer, where that is no more than text."""
    for row in rows:
        *messages, last = row["conversations"]
        if not row["tools"] and last["role"] == "assistant" and not last.get("reasoning_content") and last["content"].strip():
            yield messages, last["content"]


def questions_of(
    chats: Iterable[Asked],
    encoder: ChatEncoder,
    *,
    limit: int,
    max_prompt_len: int,
    offered: Sequence[list[dict[str, Any]] | None] = (None,),
) -> list[Question]:
    """The first `limit` questions that are short enough.

    Args:
        chats: what is asked, and the reference answers.
        encoder: encodes a question with its generation prompt.
        limit: most questions.
        max_prompt_len: longer ones, in tokens, are passed over.
        offered: tools for each question, taken in turn; without any there are no questions.
    """
    questions = (
        Question(encoder.encode_prompt(messages, tools), reference)
        for (messages, reference), tools in zip(chats, cycle(offered), strict=False)
    )
    return list(islice((question for question in questions if len(question.prompt_ids) <= max_prompt_len), limit))


def normalised(text: str) -> str:
    """Text for exact match: NFKC, lower case, white space collapsed, closing punctuation removed."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split()).rstrip(".!?。！？ ")


@dataclass(slots=True)
class Examiner:
    """Measures models on one panel; holds what does not change from model to model.

    Attributes:
        window: most positions of the models; an episode that outgrows it ends unfinished.
        toolbox: what answers tool calls, and checks the answers of a user's own tasks.
    """

    panel: Panel
    params: Eval
    tokenizer: Tokenizer
    encoder: ChatEncoder
    score: CompletionScorer
    device: Device
    window: int
    toolbox: Toolbox = PRESET_TOOLS

    def measure(self, model: CausalLM) -> Examination:
        """Every generative metric of one language model."""
        model.eval()
        engine = open_engine(model, self.tokenizer, self.device, max_rows=self.params.batch_size)
        with torch.inference_mode():
            values = self.text_values(model) | self.preference_values(model)
        for name, questions in {"qa_exact_tools": self.panel.idle, "subject_exact": self.panel.subject}.items():
            values[f"{name}_greedy"] = self.exact_greedy(engine, questions)
            values |= exact_baselines(name, questions)
        return Examination(values) | self.questions(engine) | self.rewards(engine) | self.tools(engine)

    def text_values(self, model: CausalLM) -> RowValues:
        """Bits of each held-out document window and its UTF-8 bytes."""
        bits: list[float] = []
        sizes: list[float] = []
        for batch in self.panel.text.in_order():
            labels = batch.labels.to(self.device.device)
            with self.device.autocast():
                hidden = model.hidden(batch.input_ids.to(self.device.device))
            logprobs, _ = token_logprobs(hidden, model.lm_head.weight, labels)
            bits += (-logprobs.double().sum(dim=1) / math.log(2)).tolist()
            sizes += [float(size) for size in batch.row_bytes]
        return {"bits": bits, "bytes": sizes}

    def preference_values(self, model: CausalLM) -> RowValues:
        """1.0 where the chosen answer has the higher total logprob, and what going by length earns."""
        correct: list[float] = []
        shorter: list[float] = []
        for batch in self.panel.pairs.in_order():
            labels = batch.labels.to(self.device.device)
            with self.device.autocast():
                hidden = model.hidden(batch.input_ids.to(self.device.device))
            logprobs, _ = token_logprobs(hidden, model.lm_head.weight, labels)
            chosen, rejected = logprobs.sum(dim=1).chunk(2)
            correct += (chosen > rejected).float().tolist()
            shorter += shorter_chosen(batch.labels)
        return {"preference_accuracy": correct, BY_LENGTH: shorter}

    def score_values(self, objective: RewardModelling) -> Examination:
        """The reward model's only metric: 1.0 where the chosen answer gets the higher score."""
        objective.model.eval()
        correct: list[float] = []
        shorter: list[float] = []
        with torch.inference_mode():
            for batch in self.panel.pairs.judged().in_order():
                chosen, rejected = objective.scores(batch).chunk(2)
                correct += (chosen > rejected).float().tolist()
                shorter += shorter_chosen(batch.labels)
        return Examination({"preference_accuracy": correct, BY_LENGTH: shorter})

    def questions(self, engine: RolloutEngine) -> Examination:
        """Exact match of sampled and greedy replies, and whether sampled replies end by themselves."""
        questions = self.panel.questions
        completions = engine.generate(
            [question.prompt_ids for question in questions] * 2,
            keys=self.keys("qa", len(questions)) * 2,
            max_new_tokens=self.params.max_new_tokens,
            temperature=self.params.temperature,
            greedy=[False] * len(questions) + [True] * len(questions),
        )
        exact = [self.equal(done, question) for question, done in zip(questions * 2, completions, strict=True)]
        sampled = completions[: len(questions)]
        values = {
            "qa_exact": exact[: len(questions)],
            "stops_frac": [float(done.stop == StopReason.EOS) for done in sampled],
            "qa_exact_greedy": exact[len(questions) :],
            **exact_baselines("qa_exact", questions),
        }
        samples = [
            self.sample("question", question.prompt_ids, done.ids, score, expected=question.reference)
            for question, done, score in zip(questions, sampled, exact[: len(questions)], strict=True)
        ]
        return Examination(values, samples[:SAMPLES_PER_TASK])

    def exact_greedy(self, engine: RolloutEngine, questions: Sequence[Question]) -> list[float]:
        """1.0 where the greedy reply is the reference answer."""
        completions = engine.generate(
            [question.prompt_ids for question in questions],
            keys=range(len(questions)),  # which no greedy reply depends on
            max_new_tokens=self.params.max_new_tokens,
            temperature=self.params.temperature,
            greedy=True,
        )
        return [self.equal(done, question) for question, done in zip(questions, completions, strict=True)]

    def equal(self, reply: Completion, question: Question) -> float:
        """1.0 where the answer of a reply is the reference, in the normal form of texts; neither asks for thinking."""
        answer = read_turn(self.tokenizer, reply, open_thinking=False).parsed.answer
        return float(normalised(answer) == normalised(question.reference))

    def rewards(self, engine: RolloutEngine) -> Examination:
        """Total reward and every term of sampled replies to the held-out prompts."""
        tasks = self.panel.prompts
        trajectories = self.episodes(engine, tasks, "reward", greedy=False, max_turns=1)
        scored = self.score(tasks, trajectories)
        names = sorted({name for row in scored for name in row.terms})
        values = {"reward_mean": [row.total for row in scored]} | {
            f"reward_term_{name}": [row.terms.get(name, 0.0) for row in scored] for name in names
        }
        samples = [self.sample("prompt", t.prompt_ids, t.ids, row.total) for t, row in zip(trajectories, scored, strict=True)]
        return Examination(values, samples[:SAMPLES_PER_TASK])

    def tools(self, engine: RolloutEngine) -> Examination:
        """Whether the final reply holds every expected answer, and whether calls were made and all valid."""
        tasks = self.panel.tasks
        greedy = [False] * len(tasks) + [True] * len(tasks)
        trajectories = self.episodes(engine, tasks * 2, "tool", greedy=greedy, max_turns=self.params.max_turns)
        sampled, surest = trajectories[: len(tasks)], trajectories[len(tasks) :]
        values = self.tool_values(tasks, sampled)
        values["tool_success_greedy"] = [float(solved(task, t, self.toolbox)) for task, t in zip(tasks, surest, strict=True)]
        values |= by_offered(tasks, values["tool_success_greedy"])
        for rule, replies in replies_by_rule(tasks).items():
            earns = self.tool_values(tasks, [only_says(reply) for reply in replies])
            earns |= by_offered(tasks, earns["tool_success"])
            values |= {f"{name}{BASELINE}{rule}": rows for name, rows in earns.items()}
        samples = [
            self.sample("tool task", t.prompt_ids, t.ids, score, expected=", ".join(task.gt))
            for task, t, score in zip(tasks, sampled, values["tool_success"], strict=True)
        ]
        return Examination(values, samples[:SAMPLES_PER_TASK])

    def tool_values(self, tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> RowValues:
        """What an episode per task is worth."""
        episodes = list(zip(tasks, trajectories, strict=True))
        return {
            "tool_success": [float(solved(task, done, self.toolbox)) for task, done in episodes],
            "tool_earned": [float(earned(task, done, self.toolbox)) for task, done in episodes],
            "tool_valid_frac": [float(calls_valid(done)) for done in trajectories],
        }

    def sample(
        self, task: str, prompt: Sequence[int], reply: Sequence[int], score: float, *, expected: str = ""
    ) -> dict[str, Any]:
        """A table row: control tokens are shown, tool results are part of the reply."""
        decode = self.tokenizer.decode_all
        return {"task": task, "prompt": decode(prompt), "completion": decode(reply), "expected": expected, "score": score}

    def episodes(
        self, engine: RolloutEngine, tasks: Sequence[PromptTask], what: str, *, greedy: bool | Sequence[bool], max_turns: int
    ) -> list[Trajectory]:
        return run_episodes(
            engine,
            self.encoder,
            self.tokenizer,
            tasks,
            keys=self.keys(what, len(tasks)),
            max_turns=max_turns,
            max_new_tokens=self.params.max_new_tokens,
            max_total_len=self.window,
            temperature=self.params.temperature,
            greedy=greedy,
            toolbox=self.toolbox,
        )

    def keys(self, what: str, rows: int) -> list[int]:
        """One seed per row, the same for every model."""
        return [seed_for(self.params.seed, "eval", what, row) for row in range(rows)]


def shorter_chosen(labels: Tensor) -> list[float]:
    """`BY_LENGTH` of a batch of pairs; labels [2n, T], n chosen, then n rejected."""
    chosen, rejected = answer_lengths(labels).chunk(2)
    return (0.5 + 0.5 * (rejected - chosen).sign()).tolist()


def exact_baselines(name: str, questions: Sequence[Question]) -> RowValues:
    """What always the most frequent reference earns."""
    references = [normalised(question.reference) for question in questions]
    constant = most_frequent(references)
    return {f"{name}{BASELINE}constant": [float(reference == constant) for reference in references]}


def by_offered(tasks: Sequence[PromptTask], success: Sequence[float]) -> RowValues:
    """The values apart by how many tools the tasks offer."""
    values: RowValues = {}
    for task, done in zip(tasks, success, strict=True):
        values.setdefault(f"{OFFERED}{len(task.tools or ())}", []).append(done)
    return values


def replies_by_rule(tasks: Sequence[PromptTask]) -> dict[str, list[str]]:
    """By rule, what one says to each task who calls no tool and knows nothing of it but its question."""
    constant = most_frequent([", ".join(task.gt) for task in tasks])
    return {"constant": [constant] * len(tasks), "echo": [asked_by(task) for task in tasks]}


def most_frequent(texts: Sequence[str]) -> str:
    """The first of those that are there most often; empty where there is none."""
    return max(Counter(texts).items(), key=lambda item: item[1], default=("", 0))[0]


def only_says(text: str) -> Trajectory:
    """An episode of one turn that is nothing but an answer."""
    return Trajectory([], [], [], [], [Turn(text, ParsedTurn(thinking=None, answer=text, calls=[], malformed_calls=0))])


def calls_valid(trajectory: Trajectory) -> bool:
    """At least one call was made and answered, and none was malformed or failed."""
    results = [result for turn in trajectory.tool_results for result in turn]
    malformed = any(turn.parsed.malformed_calls for turn in trajectory.turns)
    return bool(results) and not malformed and not any(result.is_error for result in results)
