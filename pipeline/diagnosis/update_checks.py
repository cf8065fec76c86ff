"""Checks of what every stage that trains has: losses on training and held-out rows, gradients, skipped steps."""

import re
from statistics import median

from pipeline.diagnosis.findings import Evidence, Finding, Limit
from pipeline.diagnosis.signals import MIN_POINTS, NO_GAIN, Signals

MIN_SAMPLES = 4
SHOWN_CHARS = 60
MIN_LOOP_CHARS = 8
_LOOP = re.compile(r"(\S.{0,60}?)\1{3,}", re.DOTALL)


def overfitting(run: Signals, limit: Limit) -> Finding | None:
    """Held-out loss rises again while training loss falls; `limit` is of the last value over the best one."""
    val, train = run.get("val/loss"), run.course("train/loss")
    if len(val.values) < 3 or train is None or train.gain >= 0:
        return None
    best = min(val.values)
    if not (severity := limit.reached(val.last / best)):
        return None
    at = val.steps[val.values.index(best)]
    sentence = f"val/loss rose from {best:.3g} at step {at} to {val.last:.3g} while train/loss fell to {train.late.mean:.3g}"
    advice = f"fewer {run.key('epochs')}, more rows, or a lower {run.key('lr')}"
    return Finding("overfitting", severity, sentence, advice, Evidence("val/loss", at, val.steps[-1]))


def data_too_small(run: Signals, limit: Limit) -> Finding | None:
    """Rows that were seen several times are known by heart; `limit` is of held-out over training loss."""
    val, train, epochs = run.get("val/loss"), run.late("train/loss"), run.param("epochs", 1)
    if not val.values or val.steps[-1] == 0 or train is None or epochs < 2:
        return None
    if not (severity := limit.reached(val.last / max(train.mean, 1e-9))):
        return None
    tokens = run.get("train/tokens_seen")
    seen = f"{tokens.last / epochs:,.0f} tokens, each seen {epochs} times" if tokens.values else f"{epochs} epochs"
    sentence = f"val/loss is {val.last:.3g}, train/loss {train.mean:.3g}: the training rows ({seen}) are learned by heart"
    advice = f"more rows, or fewer {run.key('epochs')}"
    return Finding("data_too_small", severity, sentence, advice, train.evidence)


def nothing_learned(run: Signals, limit: Limit) -> Finding | None:
    """Held-out loss is where the start weights had it; `limit` is of the last value over that one."""
    val, start = run.get("val/loss"), run.get("val/loss_start")
    if not val.values or not start.values or val.steps[-1] == 0:
        return None
    if not (severity := limit.reached(val.last / start.last)):
        return None
    train = run.course("train/loss")
    flat = "" if train is None else f"; train/loss {train.early.mean:.3g} to {train.late.mean:.3g}"
    sentence = f"val/loss is {val.last:.4g} after {val.steps[-1]} steps and was {start.last:.4g} with the start weights{flat}"
    stuck = train is None or train.z > -NO_GAIN
    changes = "too high or too low" if stuck else "too high, or the training rows are unlike the held-out ones"
    advice = f"{run.key('lr')} is {changes}; {run.key('epochs')}, {run.key('warmup_steps')}"
    return Finding("nothing_learned", severity, sentence, advice, Evidence("val/loss", start.steps[-1], val.steps[-1]))


def degenerate_samples(run: Signals, limit: Limit) -> Finding | None:
    """Greedy answers that loop or never end; `limit` is of their share of the newest samples."""
    if len(run.samples) < MIN_SAMPLES:
        return None
    bad = [row for row in run.samples if row.get("stop") == "length" or _loops(str(row.get("completion", "")))]
    if not bad or not (severity := limit.reached(len(bad) / len(run.samples))):
        return None
    step, text = int(run.samples[0].get("step", 0)), " ".join(str(bad[0].get("completion", "")).split())
    shown = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
    sentence = f"{len(bad)} of {len(run.samples)} greedy samples loop or never end, such as {shown!r}"
    advice = f"train longer or at another rate: {run.key('epochs')}, {run.key('lr')}; read the samples beside their rows"
    return Finding("degenerate_samples", severity, sentence, advice, Evidence("samples", step, step))


def _loops(text: str) -> bool:
    """Whether something is said four times or more in a row: `the the the the`, or a sentence again and again."""
    words = " ".join(re.sub(r"<[^<>]*>", " ", text).split()) + " "
    loops = (match[0] for match in _LOOP.finditer(words))
    return any(len(loop) >= MIN_LOOP_CHARS and re.search(r"[^\W\d]", loop) for loop in loops)


def gradient_spikes(run: Signals, limit: Limit) -> Finding | None:
    """Gradients after warm-up far above the usual, which clipping had to cut; `limit` is of the norm over its median."""
    norms = run.get("train/grad_norm")
    points = [point for point in zip(norms.steps, norms.values, strict=True) if point[0] > run.param("warmup_steps", 0)]
    if len(points) < MIN_POINTS:
        return None
    usual = median(norm for _, norm in points)
    cut = max(limit.warn * usual if limit.warn else 0.0, run.param("max_grad_norm", 0.0))
    spikes = [(step, norm) for step, norm in points if norm > cut]
    if not spikes or not usual:
        return None
    step, largest = max(spikes, key=lambda point: point[1])
    if not (severity := limit.reached(largest / usual)):
        return None
    sentence = (
        f"the gradient norm jumped to {largest:.3g} at step {step}, usual is {usual:.3g} ({len(spikes)} of {len(points)} steps)"
    )
    advice = f"spikes come before collapse: lower {run.key('lr')} or {run.key('max_grad_norm')}, raise {run.key('warmup_steps')}"
    return Finding("gradient_spikes", severity, sentence, advice, Evidence("train/grad_norm", spikes[0][0], spikes[-1][0]))


def skipped_steps(run: Signals, limit: Limit) -> Finding | None:
    """Steps whose gradients were not finite; `limit` is of their share."""
    skipped = run.get("train/skipped_steps")
    if not skipped.values or not skipped.last or not (severity := limit.reached(skipped.last / skipped.steps[-1])):
        return None
    first = next(step for step, value in zip(skipped.steps, skipped.values, strict=True) if value)
    sentence = f"{skipped.last:.0f} of {skipped.steps[-1]} steps were skipped, because gradients were not finite"
    advice = f"lower {run.key('lr')}, or look at the rows of these steps"
    return Finding("skipped_steps", severity, sentence, advice, Evidence("train/skipped_steps", first, skipped.steps[-1]))
