"""From trajectories to rewards: the callables that the reinforcement loops and the evaluation share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.prompts import PromptTask
from pipeline.params.schema import Rewards
from pipeline.rewards import minimind
from pipeline.rewards.agent import agent_rewards, earned_answers
from pipeline.rewards.completion import completion_rewards, total_reward
from pipeline.rewards.evidence import given_exchanges
from pipeline.rewards.model import Reply, RewardScorer
from pipeline.rewards.verify import verify
from pipeline.rollout.records import StopReason, Trajectory, Turn
from pipeline.text.turns import ParsedTurn
from pipeline.tools.toolbox import PRESET_TOOLS, Toolbox

NOTHING = Turn("", ParsedTurn(thinking=None, answer="", calls=[], malformed_calls=0))
"""The turn of a trajectory whose prompt left no room for one."""


@dataclass(slots=True)
class Scored:
    """The reward of one trajectory and the named terms it is made of.

    `good`: the task was solved (every expected answer found by a reply that ended by itself); for prompts without expected
    answers, the reward is positive.
    """

    total: float
    terms: dict[str, float]
    good: bool


def solved(task: PromptTask, trajectory: Trajectory, toolbox: Toolbox = PRESET_TOOLS) -> bool:
    """Whether every expected answer stands in the final reply of an episode that ended by itself."""
    check = toolbox.check_for(offered_by(task)) or verify
    return trajectory.stop is StopReason.EOS and all(check(task.gt, final_answer(task, trajectory)))


def final_answer(task: PromptTask, trajectory: Trajectory) -> str:
    """What the policy tells the user in the end, without copies of tool results, those of the prompt included."""
    return trajectory.answer_beside([each.result for each in given_exchanges(task.messages)])


def asked_by(task: PromptTask) -> str:
    """What the user wrote, all turns."""
    return "\n".join(message["content"] for message in task.messages if message["role"] == "user")


def offered_by(task: PromptTask) -> list[str]:
    """Names of the tools that the task offers."""
    return [tool["function"]["name"] for tool in task.tools or []]


def earned(task: PromptTask, trajectory: Trajectory, toolbox: Toolbox = PRESET_TOOLS) -> bool:
    """Whether the task is solved and the reward grants every answer: a tool was used, and the reply is no list of candidates."""
    answers = earned_answers(
        task.gt,
        trajectory,
        asked=asked_by(task),
        tools_offered=offered_by(task),
        check=toolbox.check_for(offered_by(task)),
        given=given_exchanges(task.messages),
    )
    return trajectory.stop is StopReason.EOS and all(answers)


def model_scores(model: RewardScorer, items: Sequence[Reply]) -> list[float]:
    """The model's scores; one that is not finite (half precision overflows) becomes -inf, the worst.

    Clamping would turn NaN into the best score, and a policy would learn to write what breaks the reward model.
    """
    return [score if math.isfinite(score) else -math.inf for score in model.score(items)] if items else []


@dataclass(slots=True)
class CompletionScorer:
    """Rewards of single-turn completions (ppo, grpo); the reward model scores all answers in one call.

    A tool that a prompt offers cannot have answered anything, so an expected answer counts wherever the reply holds it.
    """

    params: Rewards
    model: RewardScorer

    def __call__(self, tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        legacy = self.params.preset == "minimind"
        turns = [t.turns[-1] if t.turns else NOTHING for t in trajectories]
        answers = [minimind.answer_of(turn.text) if legacy else turn.parsed.answer for turn in turns]
        scores = model_scores(
            self.model, [Reply(task.messages, answer, task.tools) for task, answer in zip(tasks, answers, strict=True)]
        )
        scored = []
        for task, trajectory, turn, score in zip(tasks, trajectories, turns, scores, strict=True):
            found = earned_answers(task.gt, trajectory, asked=asked_by(task), tools_offered=())
            finished = trajectory.stop is StopReason.EOS
            if legacy:
                terms = minimind.completion_terms(turn.text, score)
            else:
                terms = completion_rewards(
                    turn.parsed,
                    open_thinking=task.open_thinking,
                    model_score=score,
                    finished=finished,
                    found=found,
                    params=self.params,
                )
            total = total_reward(terms)
            scored.append(Scored(total, terms, finished and all(found) if task.gt else total > 0))
        return scored


@dataclass(slots=True)
class EpisodeScorer:
    """Rewards of multi-turn episodes (agent).

    The reward model scores samples that offer no tools; by MiniMind's rules, those in which no tool was called.
    """

    params: Rewards
    model: RewardScorer
    toolbox: Toolbox = PRESET_TOOLS

    def __call__(self, tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        legacy = self.params.preset == "minimind"
        plain = [
            place
            for place, (task, trajectory) in enumerate(zip(tasks, trajectories, strict=True))
            if (not minimind.any_calls(trajectory) if legacy else not task.tools)
        ]
        answers = [
            minimind.last_answer(trajectories[place]) if legacy else final_answer(tasks[place], trajectories[place])
            for place in plain
        ]
        items = [Reply(tasks[place].messages, answer, tasks[place].tools) for place, answer in zip(plain, answers, strict=True)]
        scores = dict(zip(plain, model_scores(self.model, items), strict=True))
        clip = minimind.AGENT_CLIP if legacy else self.params.agent_clip
        scored = []
        for place, (task, trajectory) in enumerate(zip(tasks, trajectories, strict=True)):
            terms = self._terms(task, trajectory, scores.get(place))
            total = total_reward(terms, clip)
            scored.append(Scored(total, terms, solved(task, trajectory, self.toolbox) if task.gt else total > 0))
        return scored

    def _terms(self, task: PromptTask, trajectory: Trajectory, model_score: float | None) -> dict[str, float]:
        offered = offered_by(task)
        if self.params.preset == "minimind":
            return minimind.agent_terms(trajectory, gt=task.gt, tools_offered=offered, model_score=model_score)
        return agent_rewards(
            trajectory,
            gt=task.gt,
            asked=asked_by(task),
            tools_offered=offered,
            model_score=model_score,
            params=self.params,
            check=self.toolbox.check_for(offered),
            given=given_exchanges(task.messages),
        )
