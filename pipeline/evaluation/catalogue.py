"""What is measured of every model, and whom it is compared with."""

PARENTS = {
    "full_sft": "pretrain",
    "lora": "full_sft",
    "dpo": "full_sft",
    "reward": "full_sft",
    "ppo": "full_sft",
    "grpo": "full_sft",
    "agent": "full_sft",
}
"""Whom each model is compared with: the checkpoint it started from."""


METRICS: dict[str, tuple[str, bool]] = {
    "bits_per_byte": ("bits per UTF-8 byte of held-out text", False),
    "stops_frac": ("replies that end by themselves", True),
    "qa_exact": ("replies equal to the reference answer, sampled", True),
    "qa_exact_greedy": ("replies equal to the reference answer, greedy", True),
    "qa_exact_tools_greedy": ("the same where tools are offered that nothing needs", True),
    "subject_exact_greedy": ("replies equal to the reference answer on the subject of lora, greedy", True),
    "preference_accuracy": ("pairs whose chosen answer gets the higher total logprob (reward: score)", True),
    "reward_mean": ("mean reward of sampled replies", True),
    "tool_success": ("tool tasks with every expected answer in the final reply, sampled", True),
    "tool_success_greedy": ("tool tasks with every expected answer in the final reply, greedy", True),
    "tool_earned": ("tool tasks solved with a tool's result and without listing candidates, sampled", True),
    "tool_valid_frac": ("tool tasks whose calls were all valid, at least one made", True),
}
"""What each metric is, in the report's words, and whether higher is better."""

OFFERED = "tool_success_offered_"
"""`tool_success_greedy` of the tasks that offer so many tools: the number follows."""


BASELINE = "_by_"
"""Between a metric, without `_greedy`, and a rule: what the rule earns, row by row, without a model; for all models the same."""

RULES = {
    "length": "by length",
    "constant": "by always the same answer, the most frequent one",
    "echo": "by repeating the question",
}
"""What baselines go by, in the report's words."""
