"""Checks of the stages that sample: ppo, grpo and agent. Each gives its finding, or None when it sees or knows nothing."""

from dataclasses import replace

from pipeline.diagnosis.findings import Evidence, Finding, Limit, Severity
from pipeline.diagnosis.signals import NO_GAIN, Course, Signals
from pipeline.tracking.records import Series

EQUAL_REWARDS = 1e-5
"""Rewards that lie closer are equal, as for the advantages (`pipeline.maths.advantages`)."""
SMALL_DIFF = 1e-3
"""In fp32 sampler and trainer agree better than this (docs/algorithms.md)."""
DRIFT = 10.0
"""Growth of their difference that is no rounding."""
ENTROPY_LEFT = 0.01
"""Nats per token: a policy that begins below has nothing to lose."""
TERM = "reward/term/"


def no_signal(run: Signals, limit: Limit) -> Finding | None:
    """Groups whose answers all earn the same; in ppo, steps."""
    key = "reward/std" if run.stage == "ppo" else "rollout/zero_std_frac"
    shares = run.get(key)
    if run.stage == "ppo":
        shares = Series(shares.steps, [float(spread <= EQUAL_REWARDS) for spread in shares.values])
    only = replace(run, series={key: shares})
    late = only.late(key)
    if late is None or not (severity := limit.reached(late.mean)):
        return None
    what = "of the steps all answers earn" if run.stage == "ppo" else "of the groups all answers earn"
    sentence = f"in {late.mean:.0%} {what} the same: rewards teach nothing"
    if limit.reached(only.start(key).mean):
        more = (
            "" if run.stage == "ppo" else f", a larger {run.key('group_size')}, {run.stage}.dynamic_sampling.max_rounds above 0"
        )
        advice = (
            f"prompts are too easy or too hard, or the reward is constant: other prompts, a higher {run.key('temperature')}{more}"
        )
    else:
        advice = (
            f"there was a signal at first: the policy has learned these prompts, or fallen to one answer: other prompts, or a "
            f"lower {run.key('lr')} and a higher {run.key('kl_coef')}"
        )
    return Finding("no_signal", severity, sentence, advice, late.evidence)


def reward_hacked(run: Signals, limit: Limit) -> Finding | None:
    """The reward rises through one term at the cost of the others."""
    total = run.course("reward/mean")
    terms = {key: course for key in run.series if key.startswith(TERM) and (course := run.course(key))}
    if total is None or not total.rose or len(terms) < 2:
        return None
    best = max(terms, key=lambda key: terms[key].gain)
    losers = {key: course for key, course in terms.items() if course.fell}
    cost = -sum(course.gain for course in losers.values())
    if not terms[best].rose or not losers or not (severity := limit.reached(cost / terms[best].gain)):
        return None
    lost = ", ".join(f"{key.removeprefix(TERM)} {_moved(course)}" for key, course in losers.items())
    sentence = f"the reward rises by its term {best.removeprefix(TERM)} ({_moved(terms[best])}) and others pay: {lost}"
    advice = f"read the samples for a trick; lower that term's weight in `rewards`, or raise {run.key('kl_coef')}"
    return Finding("reward_hacked", severity, sentence, advice, terms[best].late.evidence)


def entropy_collapse(run: Signals, limit: Limit) -> Finding | None:
    """The policy writes the same whatever is drawn."""
    late = run.last("policy/entropy")
    if late is None:
        return None
    start = run.start("policy/entropy")
    if start.mean < ENTROPY_LEFT or not (severity := limit.reached(late.mean / start.mean)):
        return None
    sentence = f"entropy fell from {start.mean:.3g} to {late.mean:.3g} nats per token: answers become one answer"
    advice = f"lower {run.key('lr')}, raise {run.key('kl_coef')} or {run.key('entropy_coef')}"
    return Finding("entropy_collapse", severity, sentence, advice, late.evidence)


def entropy_rise(run: Signals, limit: Limit) -> Finding | None:
    """The policy falls apart: its distribution widens, and the reward gains nothing by it."""
    late, reward = run.last("policy/entropy"), run.course("reward/mean")
    if late is None or reward is None or reward.rose:
        return None
    start = run.start("policy/entropy")
    if not (severity := limit.reached(late.mean / max(start.mean, ENTROPY_LEFT))):
        return None
    sentence = f"entropy rose from {start.mean:.3g} to {late.mean:.3g} nats per token and the reward did not ({_moved(reward)})"
    advice = f"the policy diverges: lower {run.key('lr')} or {run.key('entropy_coef')}, raise {run.key('kl_coef')}"
    return Finding("entropy_rise", severity, sentence, advice, late.evidence)


def kl_runaway(run: Signals, limit: Limit) -> Finding | None:
    """Far from the reference, with nothing to show for it."""
    late, reward = run.last("policy/ref_kl"), run.course("reward/mean")
    if late is None or reward is None or not (severity := limit.reached(late.mean)):
        return None
    falls = reward.fell or reward.declined
    if falls:
        severity = Severity.PROBLEM if reward.fell else Severity.WARN
    elif reward.z >= NO_GAIN:
        return None
    before, how = (reward.middle if reward.declined else reward.early), "fell" if falls else "did not rise"
    went = f"{before.mean:.3g} to {reward.late.mean:.3g}"
    sentence = f"KL to the reference is {late.mean:.3g} nats per token while the reward {how}: {went}"
    advice = f"raise {run.key('kl_coef')}, lower {run.key('lr')} or stop earlier ({run.stage}.max_steps)"
    return Finding("kl_runaway", severity, sentence, advice, late.evidence)


def length_cap(run: Signals, limit: Limit) -> Finding | None:
    """Answers end because they must."""
    late = run.late("rollout/truncated_frac")
    if late is None or not (severity := limit.reached(late.mean)):
        return None
    sentence = f"{late.mean:.0%} of the answers are cut at the length limit"
    shaped = "" if run.stage == "ppo" else f", or charge for length with {run.stage}.overlong.buffer"
    advice = f"raise {run.key('max_new_tokens')}{shaped}; where the reward grows with length, mend the reward"
    return Finding("length_cap", severity, sentence, advice, late.evidence)


def dead_critic(run: Signals, limit: Limit) -> Finding | None:
    """Values that explain nothing of the returns, and do not get better; steps with equal rewards have nothing to explain."""
    explained, spread = run.get("value/explained_variance"), run.get("reward/std")
    flat = {step for step, value in zip(spread.steps, spread.values, strict=True) if value <= EQUAL_REWARDS}
    points = [point for point in zip(explained.steps, explained.values, strict=True) if point[0] not in flat]
    kept = Series([step for step, _ in points], [value for _, value in points])
    only = replace(run, series={"value/explained_variance": kept})
    course = only.course("value/explained_variance", after=run.param("critic_warmup_steps", 0))
    if course is None or course.rose or not (severity := limit.reached(course.late.mean)):
        return None
    sentence = (
        f"the critic explains {course.late.mean:.2f} of the variance of returns (1 is all, 0 is nothing): advantages are noise"
    )
    advice = f"raise {run.key('critic_lr')} or {run.key('critic_warmup_steps')}"
    return Finding("dead_critic", severity, sentence, advice, course.late.evidence)


def first_ratio(run: Signals, limit: Limit) -> Finding | None:
    """Before anything has moved, trainer and sampler must give a token the same probability."""
    ratios = run.get("policy/ratio_first_update")
    step, ratio = max(zip(ratios.steps, ratios.values, strict=True), key=lambda point: abs(point[1] - 1), default=(0, 1.0))
    if not (severity := limit.reached(abs(ratio - 1))):
        return None
    sentence = f"the mean ratio at a first update is {ratio:.4f}, not 1: sampler and trainer see different distributions"
    advice = "temperature, dropout, masks or precision differ between them: runtime.dtype float32 tells which"
    if run.stage != "ppo":
        advice += f"; {run.stage}.old_logprobs: recomputed leaves the sampler's out"
    return Finding("first_ratio", severity, sentence, advice, Evidence("policy/ratio_first_update", step, step))


def clip_frac(run: Signals, limit: Limit) -> Finding | None:
    """Updates that go farther than the clip lets them."""
    late = run.late("policy/clip_frac")
    if late is None or not (severity := limit.reached(late.mean)):
        return None
    sentence = f"{late.mean:.0%} of the tokens leave the clipping range: updates are too large"
    advice = f"lower {run.key('lr')} or {run.key('updates_per_rollout')}"
    return Finding("clip_frac", severity, sentence, advice, late.evidence)


def logprob_diff(run: Signals, limit: Limit) -> Finding | None:
    """Sampler and trainer drift apart, or never agreed; no matter where the trainer computes old logprobs anew."""
    course = run.course("rollout/logprob_diff_max")
    if course is None or run.param("old_logprobs") == "recomputed":
        return None
    late, early = course.late.mean, course.early.mean
    drifts = late > SMALL_DIFF and late > DRIFT * early
    severity = limit.reached(late) or (Severity.WARN if drifts else None)
    if severity is None:
        return None
    sentence = f"logprobs of sampler and trainer differ by up to {late:.2g} (at first {early:.2g})"
    advice = "in bf16 set runtime.dtype: float32" + ("" if run.stage == "ppo" else f" or {run.stage}.old_logprobs: recomputed")
    return Finding("logprob_diff", severity, sentence, advice, course.late.evidence)


def reward_overfit(run: Signals, limit: Limit) -> Finding | None:
    """The reward of training rises, held-out it does not; `limit` is of its gain there over the half width of an interval."""
    reward = run.course("reward/mean")
    name = "tool_earned" if run.stage == "agent" else "reward_mean"
    own, start = run.evaluation.get(run.stage, {}), run.evaluation.get("full_sft", {})
    if (
        reward is None
        or not reward.rose
        or not all(f"{name}{part}" in own.keys() & start.keys() for part in ("", "_low", "_high"))
    ):
        return None
    width = max(start[f"{name}_high"] - start[name], 1e-9)
    if not (severity := limit.reached((own[name] - start[name]) / width)):
        return None
    sentence = f"the training reward rises ({_moved(reward)}), held-out {name} does not: {start[name]:.3g} to {own[name]:.3g}"
    advice = f"more prompts, fewer {run.key('epochs')} or {run.key('max_steps')}, a higher {run.key('kl_coef')}; read the samples"
    return Finding("reward_overfit", severity, sentence, advice, reward.late.evidence)


def reward_flat(run: Signals, limit: Limit) -> Finding | None:
    """No visible gain; `limit` is in standard errors of it."""
    reward = run.course("reward/mean")
    if reward is None or not (severity := limit.reached(reward.z)):
        return None
    sentence = f"the reward gained nothing beyond its noise ({_moved(reward)}, {reward.z:.1f} standard errors)"
    advice = f"raise {run.key('lr')} or {run.key('batch_size')}, or train longer ({run.stage}.epochs, {run.stage}.max_steps)"
    return Finding("reward_flat", severity, sentence, advice, reward.late.evidence)


def tool_errors(run: Signals, limit: Limit) -> Finding | None:
    """Calls that fail, also late, by more than the noise of the share."""
    late = run.late("tool/error_frac")
    if late is None or not (severity := limit.reached(late.mean - 2 * late.error)):
        return None
    sentence = f"{late.mean:.0%} of the tool calls fail"
    advice = "a tool or its schema is at fault when they fail in the samples for the same reason (tools.preset, tools.extra)"
    return Finding("tool_errors", severity, sentence, advice, late.evidence)


def _moved(course: Course) -> str:
    return f"{course.early.mean:.3g} to {course.late.mean:.3g}"
