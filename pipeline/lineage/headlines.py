"""What to look at first of what a stage and `eval` measured, and which way is better."""

from typing import Literal

Goal = Literal["max", "min"]

HEADLINES: dict[str, dict[str, Goal]] = {
    "tokenizer": {"tokenizer/bytes_per_token": "max"},
    "pretrain": {"val/loss": "min", "val/loss_start": "min"},
    "full_sft": {"val/loss": "min", "val/loss_start": "min"},
    "lora": {"val/loss": "min", "val/loss_start": "min"},
    "dpo": {"val/accuracy": "max", "val/loss": "min"},
    "reward": {"val/accuracy": "max", "val/loss": "min"},
    "ppo": {"reward/mean": "max", "policy/ref_kl": "min"},
    "grpo": {"reward/mean": "max", "policy/ref_kl": "min"},
    "agent": {"tool/success": "max", "reward/mean": "max"},
}
"""What to look at first in `metrics/<stage>.json`, and which way is better; a sweep goes by the first."""
EVAL_HEADLINES: dict[str, Goal] = {
    "reward_mean": "max",
    "tool_success": "max",
    "qa_exact": "max",
    "preference_accuracy": "max",
    "bits_per_byte": "min",
}
"""The same for every model in `metrics/eval.json`."""
JUDGED_BY: dict[str, str] = {
    "pretrain": "bits_per_byte",
    "full_sft": "reward_mean",
    "lora": "reward_mean",
    "dpo": "preference_accuracy",
    "reward": "preference_accuracy",
    "ppo": "reward_mean",
    "grpo": "reward_mean",
    "agent": "tool_success",
}
"""The one of these by which models of a stage are ranked."""
