"""Every check with the stages it is put to and its limits. `docs/diagnosis.md` has the same as a table; a test compares them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.diagnosis import rollout_checks, update_checks
from pipeline.diagnosis.findings import Finding, Limit, Severity
from pipeline.diagnosis.signals import NO_GAIN, Signals

SUPERVISED = ("pretrain", "full_sft", "lora", "dpo", "reward")
CHATS = ("full_sft", "lora", "dpo")
GROUP = ("grpo", "agent")
ROLLOUT = ("ppo", *GROUP)
TRAINED = (*SUPERVISED, *ROLLOUT)
OWN = "own choice"


@dataclass(frozen=True, slots=True)
class Check:
    """A question to a run's record.

    Attributes:
        judge: gives the finding, or None when there is none or too little is known. Its name is the finding's.
        stages: whose runs it is put to.
        keys: metrics that it reads; one that ends in `/` stands for all that begin so.
        limit: what the figure that it forms is compared with.
        at_end: whether only a run that has ended can be asked.
        unless: findings that explain this one, so that it is not made beside them.
    """

    judge: Callable[[Signals, Limit], Finding | None]
    stages: tuple[str, ...]
    keys: tuple[str, ...]
    limit: Limit
    at_end: bool = False
    unless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.judge.__name__


CHECKS = (
    Check(
        rollout_checks.kl_runaway,
        ROLLOUT,
        ("policy/ref_kl", "reward/mean"),
        Limit(0.1, 1.0, "TRL: up with a flat or falling reward; figures are our own choice"),
    ),
    Check(
        rollout_checks.no_signal,
        ROLLOUT,
        ("rollout/zero_std_frac", "reward/std"),
        Limit(0.75, 0.9, "TRL: well under 0.5, near 1 no gradient"),
    ),
    Check(
        rollout_checks.reward_hacked,
        ROLLOUT,
        ("reward/mean", "reward/term/"),
        Limit(0.25, 0.5, "TRL: one component up, others down; shares are our own choice"),
    ),
    Check(
        rollout_checks.entropy_collapse, ROLLOUT, ("policy/entropy",), Limit(0.25, 0.1, "prime-rl, verl: fast to 0", below=True)
    ),
    Check(
        rollout_checks.entropy_rise, ROLLOUT, ("policy/entropy", "reward/mean"), Limit(2.0, 3.0, "prime-rl, verl: without bound")
    ),
    Check(rollout_checks.length_cap, ROLLOUT, ("rollout/truncated_frac",), Limit(0.1, 0.5, "verl, TRL: below 0.1")),
    Check(
        rollout_checks.dead_critic,
        ("ppo",),
        ("value/explained_variance", "reward/std"),
        Limit(None, 0.0, "cleanrl, verl: 0 or less is useless", below=True),
    ),
    Check(
        rollout_checks.first_ratio,
        ROLLOUT,
        ("policy/ratio_first_update",),
        Limit(1e-3, 1e-2, "TRL: 1 at the first update; measured in docs/algorithms.md"),
    ),
    Check(
        rollout_checks.clip_frac, ROLLOUT, ("policy/clip_frac",), Limit(0.3, None, "verl, cleanrl: 0 to 0.2, above 0.3 too high")
    ),
    Check(
        rollout_checks.logprob_diff,
        ROLLOUT,
        ("rollout/logprob_diff_max",),
        Limit(0.1, 1.0, "measured in docs/algorithms.md: at most 5e-2 in bf16"),
    ),
    Check(
        rollout_checks.reward_overfit,
        ROLLOUT,
        ("reward/mean",),
        Limit(1.0, -1.0, "prime-rl: held-out reward flat while the training reward rises", below=True),
        at_end=True,
    ),
    Check(
        rollout_checks.reward_flat,
        ROLLOUT,
        ("reward/mean",),
        Limit(NO_GAIN, None, OWN, below=True),
        at_end=True,
        unless=("no_signal", "kl_runaway", "entropy_rise"),
    ),
    Check(rollout_checks.tool_errors, ("grpo", "agent"), ("tool/error_frac",), Limit(0.05, 0.5, "prime-rl: below 5%")),
    Check(update_checks.overfitting, SUPERVISED, ("val/loss", "train/loss"), Limit(1.05, 1.2, OWN)),
    Check(update_checks.data_too_small, SUPERVISED, ("val/loss", "train/loss", "train/tokens_seen"), Limit(2.0, None, OWN)),
    Check(
        update_checks.nothing_learned,
        SUPERVISED,
        ("val/loss", "val/loss_start", "train/loss"),
        Limit(0.99, 0.999, OWN),
        at_end=True,
        unless=("overfitting",),
    ),
    Check(update_checks.degenerate_samples, CHATS, (), Limit(0.25, 0.5, OWN), at_end=True),
    Check(
        update_checks.gradient_spikes, TRAINED, ("train/grad_norm",), Limit(10.0, None, "prime-rl: spikes come before collapse")
    ),
    Check(update_checks.skipped_steps, TRAINED, ("train/skipped_steps",), Limit(0.0, 0.1, OWN)),
)


def checks_of(stage: str, *, ended: bool = True) -> list[Check]:
    """The checks that are put to a stage's runs; without those that an unfinished one cannot be asked."""
    return [check for check in CHECKS if stage in check.stages and (ended or not check.at_end)]


def diagnose(run: Signals) -> list[Finding]:
    """What is wrong with a run, problems first; empty for a healthy one and for one of which too little is known."""
    found: dict[str, Finding] = {}
    for check in checks_of(run.stage, ended=run.ended):
        if found.keys().isdisjoint(check.unless) and (finding := check.judge(run, check.limit)):
            found[check.name] = finding
    return sorted(found.values(), key=lambda finding: finding.severity is not Severity.PROBLEM)


def keys_read(stage: str) -> Iterator[str]:
    """The metrics that a stage's checks read; one that ends in `/` stands for all that begin so."""
    for check in checks_of(stage):
        yield from check.keys
