"""The record of one run, as a stage script writes it, and what further ranks have in its place."""

import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipeline.diagnosis.guard import Guard
from pipeline.errors import GuardError, PipelineError
from pipeline.masking import masked
from pipeline.params.schema import Runtime
from pipeline.supervise import Stopped, StopSignals
from pipeline.terminal import say
from pipeline.tracking.console import ProgressBar
from pipeline.tracking.description import circumstances, run_name, run_tags
from pipeline.tracking.home import home
from pipeline.tracking.outlook import cold
from pipeline.tracking.recorder import JsonLines, Recorder, now_s
from pipeline.tracking.records import Record
from pipeline.tracking.rollouts import write_rollouts
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.saves import NO_RECORDS, newest_save, read_save, resumption, write_save
from pipeline.tracking.store import moved, moved_from, own_store, tracking_uri
from pipeline.training.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from pipeline.rollout.records import Trajectory


@dataclass(slots=True)
class _Step:
    """The step at work: how many were done before it, and their state, or None once that is no longer whole."""

    done: int
    whole: Callable[[], Mapping[str, Any] | None]


class StageRun:
    """The record of one run. Every method is cheap; nothing here waits for a tracking server.

    Attributes:
        stage: the stage's name.
        root: the repository root, where relative paths of the stage start.
        home: where scratch lives: the root, or that of the workspace of which this is an isolated copy.
        folder: the run's scratch folder.
        resumed_step: optimizer steps that the loaded save had done; 0 for a fresh run.
    """

    def __init__(
        self,
        stage: str,
        root: Path,
        folder: RunFolder,
        params: Mapping[str, Any],
        runtime: Runtime,
        stop: StopSignals,
        ranks: Ranks = ALONE,
    ) -> None:
        self.stage = stage
        self.root = root
        self.home = home(root)
        self.folder = folder
        self._runtime = runtime
        self._stop = stop
        self._ranks = ranks
        self._settings = dict(params), runtime.model_dump()
        save = newest_save(folder) or {"step": 0, **NO_RECORDS}
        self.resumed_step: int = save["step"]
        self._has_save = "crc32" in save
        self._recorder = Recorder(
            JsonLines(folder.metrics, save["metrics_bytes"]), JsonLines(folder.samples, save["samples_bytes"])
        )
        self._guard = None if runtime.guard == "off" else Guard(stage, params, Record(folder).metrics)
        self._saved_at = time.monotonic()
        self._sampled_step = 0
        self._step: _Step | None = None
        self._step_s: float | None = None
        stop.answer, stop.kept = self._on_stop, lambda: resumption(folder)

    @property
    def scratch(self) -> Path:
        """The stage's folder for caches. Isolated copies share it: other processes may read and write there at any time."""
        return self.home / ".runs" / self.stage

    @property
    def stop_requested(self) -> bool:
        """Whether the process was asked to stop. `checkpoint` looks at it; long phases may too."""
        return self._stop.requested is not None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of an optimizer step; values that are not finite become null. The guard looks on, and is heard."""
        self._has_logged()
        self._recorder.log(step, metrics)
        found = {each.name: f"{each.severity}: {each}" for each in (self._guard.follow(step, metrics) if self._guard else ())}
        for line in found.values():
            self.announce(line)
        if found:
            write_json(self.folder.guard, read_json(self.folder.guard) | found)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends generated samples: one row of plain JSON values each."""
        self._has_logged()
        self._recorder.log_samples(step, rows)

    def _has_logged(self) -> None:
        """From here on the records are not those of the step's beginning."""
        if self._step is not None:
            self._step.whole = lambda: None

    def keep_rollouts(self, step: int, rollouts: "Mapping[int, Trajectory]") -> None:
        """Keeps every trajectory of a step, by key, for `replay-step`; nothing where `runtime.keep_rollouts` is off."""
        if self._runtime.keep_rollouts:
            write_rollouts(self.folder.rollout(step), rollouts)
            self._sampled_step = step

    def load(self) -> dict[str, Any] | None:
        """The state of the newest intact save, or None for a fresh run. Records after that step are gone already."""
        saved = read_save(self.folder, self.resumed_step) if self._has_save else None
        return self._ranks.first((self._settings, saved))[1]

    def should_save(self, step: int) -> bool:
        """Whether `runtime.save_every_s` seconds have passed since the last save (or the start), or the save of `step` stays."""
        return any(self._purposes(step).values()) or time.monotonic() - self._saved_at >= self._runtime.save_every_s

    def _purposes(self, step: int) -> dict[str, bool]:
        """What the save of `step` stays for, as `write_save` takes it."""
        kept, replayed = self._runtime.keep_every_steps, self._runtime.replay_every_steps
        sampled = step == self._sampled_step  # without what was sampled nothing can be replayed
        return {"stays": bool(kept and step % kept == 0), "replays": bool(sampled and replayed and step % replayed == 0)}

    def save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Writes a resumable state (tensors, plain values, containers) durably, with the records up to now.

        Returns:
            Whether it was written: one that is not finite is not.
        """
        records, keep = self._recorder.sync(), self._runtime.keep_saves
        saved = write_save(self.folder, step, state, records, keep=keep, **self._purposes(step))
        self._saved_at = time.monotonic()
        return saved

    @contextmanager
    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
        """Around the work on the step behind `step`: a stop amid it leaves it, as long as it has changed nothing.

        Args:
            step: optimizer steps done.
            whole: the state after them; None once the work changes it.

        Raises:
            Stopped: a signal asked for it; `saved_at_stop` saves the state of `step`.
        """
        self._step = current = _Step(step, whole)
        self._stop.deferred = True
        began = time.monotonic()
        with self._stop.interruptible(lambda: current.whole() is not None):
            yield
        self._step_s = time.monotonic() - began

    @contextmanager
    def saved_at_stop(self) -> Iterator[None]:
        """Saves the last whole state where a stop interrupts a step, and says so.

        Out here, because a wait for another rank that is broken off raises an error of its own first.
        """
        try:
            yield
        except Stopped as stopped:
            if self._step is None:
                raise
            raise Stopped(stopped.signum, self._saved_whole(self._step)) from None

    def _saved_whole(self, at: "_Step") -> str:
        """Saves the state before a step that was interrupted, if there is anything to save; what becomes of it, in words."""
        state = at.whole() if at.done and at.done not in self.folder.commits() else None
        if state is not None:
            self.save(at.done, state)
        if at.done in self.folder.commits():
            return f" after step {at.done}, saved; the same command resumes"
        return f" in step {at.done + 1}; {resumption(self.folder)}"

    def _on_stop(self) -> str:
        """What a request to stop is going to do, and how long it may take."""
        at, asked = self._step, self._stop.requested
        if at is None or asked is None:
            does = "finishes what it is at, a save or the outputs"
        elif at.whole() is None:
            takes = "" if self._step_s is None else f" (the one before took {self._step_s:.0f} s)"
            does = f"finishes step {at.done + 1}{takes} and saves it"
        else:
            does = f"leaves step {at.done + 1}" + (f" and saves the weights after step {at.done}" if at.done else "")
        limit = "" if asked == signal.SIGINT else f", within {self._stop.grace_s:.0f} s"
        return f"stopping: {does}{limit}; a second signal ends it at once, and then {resumption(self.folder)}"

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """To be called after every optimizer step and its `log`: saves when it is time, and stops, with all ranks, when asked to.

        Raises:
            Stopped: a signal asked for it; `saved_at_stop` saves the state of `step`.
            GuardError: `runtime.guard` found a problem; the state of `step` has been saved.
        """
        self._step = _Step(step, make_state)
        self._stop.deferred = True
        problem = self._guard.problem if self._guard and self._runtime.guard == "stop" else None
        with self._stop.interruptible(lambda: True):  # it may wait for the other ranks
            ends = self._ranks.first(GuardError.exit_code if problem else None)
        self._step = None
        if ends is None:
            if self.should_save(step):
                self.save(step, make_state())
            return
        saved = "saved" if self.save(step, make_state()) else "not saved"
        raise GuardError(f"stopped by runtime.guard after step {step}, {saved}; with guard: warn it goes on. {problem}")

    def progress(self, total: int) -> ProgressBar:
        """A progress bar over `total` steps, as `runtime.progress` wants it; the folder says to others how many there are."""
        write_json(self.folder.progress, {"total": total, "done": self.resumed_step, "began_s": now_s()})
        for line in cold(self.stage, total, self._settings[0].get(self.stage, {})):
            self.announce(f"warning: {line}")
        return ProgressBar(self.stage, total, mode=self._runtime.progress, done=self.resumed_step)

    @property
    def tracked(self) -> bool:
        """Whether MLflow gets the run while it trains."""
        return self._runtime.mlflow

    def announce(self, line: str) -> None:
        """Prints one lasting line on stderr: a warning, or what comes next in a long phase."""
        if self._runtime.progress != "off":
            say(f"{self.stage}: {line}")

    def close(self) -> None:
        """Makes the records durable."""
        self._recorder.sync()
        self._recorder.close()


class Follower(StageRun):
    """What a rank other than the first has in place of a record: it takes every step and leaves nothing behind.

    It starts from the save that rank 0 loads, stops when rank 0 does, and ends with the last step, before there are outputs.
    """

    def __init__(
        self, stage: str, root: Path, params: Mapping[str, Any], runtime: Runtime, ranks: Ranks, stop: StopSignals
    ) -> None:
        self.stage, self.root, self.home = stage, root, home(root)
        self._ranks, self._stop = ranks, stop
        self._settings = dict(params), runtime.model_dump()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def keep_rollouts(self, step: int, rollouts: "Mapping[int, Trajectory]") -> None:
        """Nothing."""

    def load(self) -> dict[str, Any] | None:
        """The state that rank 0 loads.

        Raises:
            PipelineError: this rank has read other parameters than rank 0.
        """
        nothing: tuple[Any, dict[str, Any] | None] = None, None
        settings, saved = self._ranks.first(nothing)
        if settings != self._settings:
            raise PipelineError("params.yaml was edited while the ranks started; give the same command again")
        return saved

    @contextmanager
    def step(self, step: int, whole: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
        """To the end: rank 0 may need this one for the rest of its step, and is gone where it does not."""
        self._stop.deferred = True
        yield

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """Ends the process where rank 0 was asked to stop."""
        if self._ranks.first(None) is not None:
            raise SystemExit(0)

    def progress(self, total: int) -> ProgressBar:
        """No bar; the end of its block ends the process."""
        return _LastStep(self.stage, total, mode="off")

    def announce(self, line: str) -> None:
        """Nothing."""


class _LastStep(ProgressBar):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            raise SystemExit(0)


def describe(
    run: StageRun,
    key: str,
    params: Mapping[str, Any],
    known: Mapping[str, str],
    why: list[str],
    spent: Mapping[str, float],
) -> None:
    before = read_json(run.folder.about)
    why = before.get("why") or why  # what resumes has the reason of its first start
    uri = masked(tracking_uri(run.home))  # the feeder has the password from the environment
    about = {
        "stage": run.stage,
        "name": run_name(run.stage, params),
        "uid": before.get("uid") or uuid.uuid4().hex,
        "attempt": before.get("attempt", 0) + 1,
        "started_s": before.get("started_s") or now_s(),
        "attempt_s": now_s(),
        "spent": spent,
        "why": why,
        "root": str(run.home),
        "tracking_uri": uri,
        "params": params,
        "tags": run_tags(run.root, run.stage, key, known) | {"run.why": "\n".join(why)},
        **circumstances(run.root),
    }
    write_json(run.folder.about, about)
    if uri == own_store(run.home) and (old := moved_from(run.home)) is not None:
        say(f"{run.stage}: {moved(run.home, old)}")
    start = f"resumes at step {run.resumed_step}" if about["attempt"] > 1 else "new"
    tracked = f"tracking {uri}" if run.tracked else "not sent to MLflow, as runtime.mlflow is false"
    say(f"{run.stage}: run {run.folder.path.relative_to(run.home)} ({start}), {tracked}")
