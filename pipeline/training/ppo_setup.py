"""How ppo is put together; apart from `policy_setup`, so that an edited critic reruns no other stage."""

from pathlib import Path

from pipeline.model.heads import ValueModel
from pipeline.params.schema import Ppo
from pipeline.training.policy_setup import Environment, open_policies, open_rollout
from pipeline.training.ppo_loop import PpoTask
from pipeline.training.rollouts import total_steps
from pipeline.training.state import TrainState
from pipeline.training.updater import Updater


def open_ppo_task(start: Path, settings: Ppo, environment: Environment) -> PpoTask:
    """The ppo stage ready to train; the critic starts from the policy's backbone."""
    policy, reference = open_policies(start, environment)
    critic = environment.device.prepare(ValueModel.from_causal_lm(policy, seed=settings.seed))
    steps = total_steps(settings, environment.prompts)
    updaters = {
        "policy": Updater(policy, settings, total_steps=steps),
        "critic": Updater(critic, settings, total_steps=steps, lr=settings.critic_lr),
    }
    state = TrainState({"policy": policy, "critic": critic}, updaters)
    rollout = open_rollout(policy, settings, environment)
    decode = environment.tokenizer.decode_all
    return PpoTask(state, policy, reference, environment.prompts, rollout, environment.score, decode, environment.warn, critic)
