"""From trajectories to rewards: the callables that the reinforcement loops and the evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.prompts import PromptTask
from pipeline.params.schema import Rewards
from pipeline.rewards.agent import agent_rewards
from pipeline.rewards.completion import completion_rewards, total_reward
from pipeline.rewards.model import RewardScorer
from pipeline.rewards.verify import verify
from pipeline.rollout.records import StopReason, Trajectory


@dataclass(slots=True)
class Scored:
    """The reward of one trajectory and the named terms it is made of.

    `good`: the task was solved (every expected answer found); for prompts without expected answers, the reward is positive.
    """

    total: float
    terms: dict[str, float]
    good: bool


def solved(task: PromptTask, trajectory: Trajectory) -> bool:
    """Whether every expected answer stands in the final reply of an episode that ended by itself."""
    return trajectory.stop is StopReason.EOS and all(verify(task.gt, trajectory.final_answer))


@dataclass(slots=True)
class CompletionScorer:
    """Rewards of single-turn completions (ppo, grpo); the reward model scores all answers in one call."""

    params: Rewards
    model: RewardScorer

    def __call__(self, tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        answers = [t.turns[-1].parsed.answer if t.turns else "" for t in trajectories]
        scores = self.model.score([(task.messages, answer) for task, answer in zip(tasks, answers, strict=True)])
        scored = []
        for task, trajectory, score in zip(tasks, trajectories, scores, strict=True):
            terms = completion_rewards(
                trajectory.turns[-1].parsed,
                open_thinking=task.open_thinking,
                model_score=score,
                truncated=trajectory.stop is not StopReason.EOS,
                params=self.params,
            )
            total = total_reward(terms)
            scored.append(Scored(total, terms, total > 0))
        return scored


@dataclass(slots=True)
class EpisodeScorer:
    """Rewards of multi-turn episodes (agent); the reward model scores only samples that offer no tools."""

    params: Rewards
    model: RewardScorer

    def __call__(self, tasks: Sequence[PromptTask], trajectories: Sequence[Trajectory]) -> list[Scored]:
        plain = [place for place, task in enumerate(tasks) if not task.tools]
        items = [(tasks[place].messages, trajectories[place].final_answer) for place in plain]
        scores = dict(zip(plain, self.model.score(items), strict=True)) if items else {}
        scored = []
        for place, (task, trajectory) in enumerate(zip(tasks, trajectories, strict=True)):
            terms = agent_rewards(
                [turn.parsed for turn in trajectory.turns],
                trajectory.tool_results,
                gt=task.gt,
                tools_offered=[tool["function"]["name"] for tool in task.tools or []],
                open_thinking=task.open_thinking,
                finished=trajectory.stop is StopReason.EOS,
                model_score=scores.get(place),
                params=self.params,
            )
            total = total_reward(terms, self.params.agent_clip)
            scored.append(Scored(total, terms, solved(task, trajectory) if task.gt else total > 0))
        return scored
