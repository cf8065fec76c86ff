"""What a stage script stands on: one process, one run folder, one record.

with stage_run("grpo", params={"grpo": ...}, inputs=["checkpoints/full_sft.pth"], runtime=params.runtime) as run:
    state = run.load()
    ...
    run.log(step, metrics)
    run.checkpoint(step, make_state)
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pipeline
from pipeline.diagnosis.guard import Guard
from pipeline.digests import digests
from pipeline.errors import GuardError
from pipeline.lineage.causes import reasons
from pipeline.lineage.declaration import is_recorded, undisturbed
from pipeline.params.schema import Runtime
from pipeline.supervise import Stopped, StopSignals, exit_on_error, explain, hold, is_held, lasting_stderr
from pipeline.tracking.console import ProgressBar
from pipeline.tracking.description import circumstances, run_name, run_tags
from pipeline.tracking.home import home
from pipeline.tracking.recorder import JsonLines, Recorder, now_s
from pipeline.tracking.records import Record
from pipeline.tracking.rollouts import write_rollouts
from pipeline.tracking.run_folder import RunFolder, open_run_folder, read_json, run_key, write_json
from pipeline.tracking.saves import NO_RECORDS, newest_save, prune_finished, read_save, write_save
from pipeline.tracking.space import check_space
from pipeline.tracking.store import tracking_uri
from pipeline.tracking.usage import Meter, spent_before
from pipeline.training.ranks import ALONE, Ranks, launched_ranks

if TYPE_CHECKING:
    from pipeline.rollout.records import Trajectory

FOLLOWERS_END_S = 5.0
LEFTOVER_S = 3600.0
OTHER_RANK_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo, the store of ranks and nccl say when the process at the other end of a connection is gone."""


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
        save = newest_save(folder) or {"step": 0, **NO_RECORDS}
        self.resumed_step: int = save["step"]
        self._has_save = "crc32" in save
        self._recorder = Recorder(
            JsonLines(folder.metrics, save["metrics_bytes"]), JsonLines(folder.samples, save["samples_bytes"])
        )
        self._guard = None if runtime.guard == "off" else Guard(stage, params, Record(folder).metrics)
        self._saved_at = time.monotonic()

    @property
    def scratch(self) -> Path:
        """The stage's folder for caches. Isolated copies share it: other processes may read and write there at any time."""
        return self.home / ".runs" / self.stage

    @property
    def stop_requested(self) -> bool:
        """Whether the process was asked to stop. `checkpoint` looks at it; long phases may too."""
        return self._stop.requested is not None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of an optimizer step; values that are not finite become null. The guard looks on."""
        self._recorder.log(step, metrics)
        for finding in self._guard.follow(step, metrics) if self._guard else ():
            self.announce(f"{finding.severity}: {finding}")

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends generated samples: one row of plain JSON values each."""
        self._recorder.log_samples(step, rows)

    def keep_rollouts(self, step: int, rollouts: "Mapping[int, Trajectory]") -> None:
        """Keeps every trajectory of a step, by key, for `replay-step`; nothing where `runtime.keep_rollouts` is off."""
        if self._runtime.keep_rollouts:
            write_rollouts(self.folder.rollout(step), rollouts)

    def load(self) -> dict[str, Any] | None:
        """The state of the newest intact save, or None for a fresh run. Records after that step are gone already."""
        return self._ranks.first(read_save(self.folder, self.resumed_step) if self._has_save else None)

    def should_save(self, step: int) -> bool:
        """Whether `runtime.save_every_s` seconds have passed since the last save (or the start), or the save of `step` stays."""
        return self._stays(step) or time.monotonic() - self._saved_at >= self._runtime.save_every_s

    def _stays(self, step: int) -> bool:
        return self._runtime.keep_every_steps is not None and step % self._runtime.keep_every_steps == 0

    def save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Writes a resumable state (tensors, plain values, containers) durably, with the records up to now.

        Returns:
            Whether it was written: one that is not finite is not.
        """
        records, keep = self._recorder.sync(), self._runtime.keep_saves
        saved = write_save(self.folder, step, state, records, keep=keep, stays=self._stays(step))
        self._saved_at = time.monotonic()
        return saved

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """To be called after every optimizer step and its `log`: saves when it is time, and stops, with all ranks, when asked to.

        Raises:
            Stopped: a signal asked for it; the state of `step` has been saved.
            GuardError: `runtime.guard` found a problem; the state of `step` has been saved.
        """
        self._stop.deferred = True
        signum = self._stop.requested
        problem = self._guard.problem if self._guard and self._runtime.guard == "stop" else None
        code = 128 + signum if signum is not None else GuardError.exit_code if problem else None
        if self._ranks.first(code) is None:
            if self.should_save(step):
                self.save(step, make_state())
            return
        saved = "saved" if self.save(step, make_state()) else "not saved"
        if signum is not None:
            raise Stopped(signum, f" after step {step}, {saved}; the same command resumes")
        raise GuardError(f"stopped by runtime.guard after step {step}, {saved}; with guard: warn it goes on. {problem}")

    def progress(self, total: int) -> ProgressBar:
        """A progress bar over `total` steps, as `runtime.progress` wants it."""
        return ProgressBar(self.stage, total, mode=self._runtime.progress, done=self.resumed_step)

    def announce(self, line: str) -> None:
        """Prints one lasting line on stderr: a warning, or what comes next in a long phase."""
        if self._runtime.progress != "off":
            print(f"{self.stage}: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Makes the records durable."""
        self._recorder.sync()
        self._recorder.close()


class Follower(StageRun):
    """What a rank other than the first has in place of a record: it takes every step and leaves nothing behind.

    It starts from the save that rank 0 loads, stops when rank 0 does, and ends with the last step, before there are outputs.
    """

    def __init__(self, stage: str, root: Path, ranks: Ranks, stop: StopSignals) -> None:
        self.stage, self.root, self.home = stage, root, home(root)
        self._ranks, self._stop = ranks, stop

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def keep_rollouts(self, step: int, rollouts: "Mapping[int, Trajectory]") -> None:
        """Nothing."""

    def load(self) -> dict[str, Any] | None:
        """The state that rank 0 loads."""
        return self._ranks.first(None)

    def checkpoint(self, step: int, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """Ends the process where rank 0 was asked to stop."""
        self._stop.deferred = True
        code = self._ranks.first(None)
        if code is not None:
            raise SystemExit(code)

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


@contextmanager
def stage_process(stage: str, *, root: Path | None = None, memory_hint: str = "use a smaller batch") -> Iterator[StopSignals]:
    """Makes this process the only one that runs `stage`, stoppable and with readable errors; for stages without a run too.

    Args:
        stage: the stage's name, as DVC calls it (`data@pretrain`).
        root: the repository; the current directory when left out.
        memory_hint: what to lower when memory runs out.

    Its code and reason are left in `.runs/<stage>/exit.json`, unless another process had the lock.

    Raises:
        SystemExit: instead of every exception of the block; the codes are in `pipeline.supervise`.
    """
    root = root or Path.cwd()
    folder = root / ".runs" / stage
    with (
        lasting_stderr(),
        exit_on_error(stage, memory_hint),
        StopSignals() as stop,
        hold(folder / "lock", wait=False),
        _recorded_exit(folder / "exit.json", stop, memory_hint),
        undisturbed(stage, root),
    ):
        yield stop


@contextmanager
def stage_run(
    stage: str,
    *,
    params: Mapping[str, Any],
    inputs: Sequence[str | Path],
    runtime: Runtime,
    root: Path | None = None,
    ranked: bool = False,
) -> Iterator[StageRun]:
    """Opens the run of a stage: the newest unfinished one of the same recipe, or a new one.

    The recipe is the stage's params, the digests of its inputs and `data/code/<stage>.json` where that exists. When the
    block ends without an exception the run is finished. Once its results are in dvc.lock, the next one starts at step 0;
    before that it goes on from the last save of the finished one, because DVC has lost what that made.

    Args:
        stage: name of the stage; one process at a time may run it.
        params: plain values of the sections that dvc.yaml lists for the stage, by section.
        inputs: files and folders that it reads, relative to `root`.
        runtime: execution settings; no part of the recipe.
        root: the repository; the current directory when left out.
        ranked: whether `runtime.ranks` processes share the work. This one is rank 0 then and starts the others, which run the
            same script as `Follower`s; under a launcher (torchrun) it is the rank that the environment names.

    Raises:
        SystemExit: as in `stage_process`.
    """
    root = (root or Path.cwd()).resolve()
    memory_hint = _memory_hint(stage, params)
    launched = launched_ranks() if ranked else ALONE
    if launched.rank:
        name = f"{stage}, rank {launched.rank}"
        with lasting_stderr(), exit_on_error(name, memory_hint), _other_ranks_gone(), StopSignals() as stop:
            yield Follower(stage, root, launched, stop)
        return
    with stage_process(stage, root=root, memory_hint=memory_hint) as stop, ExitStack() as stack:
        runs = home(root) / ".runs"
        _remove_leftovers(root, runs / stage, stage)
        known = digests(root, inputs)
        code_file = f"data/code/{stage}.json"
        code = digests(root, [code_file]) if (root / code_file).exists() else {}
        key = run_key(stage, params, known, code.get(code_file))
        recorded = is_recorded(stage, params, known | code, root / "dvc.lock")
        folder = _held_run_folder(stack, runs, stage, key, recorded=recorded)
        spent = spent_before(folder)
        folder.exit.unlink(missing_ok=True)
        wanted = runtime.ranks if ranked and launched.size == 1 else 1
        with _recorded_exit(folder.exit, stop, memory_hint), _followers(wanted):
            check_space(stage, folder, root, params, inputs, runtime)
            run = StageRun(stage, root, folder, params, runtime, stop, launched_ranks() if ranked else ALONE)
            stack.callback(run.close)
            why = reasons(root, run.home, stage, params, known | code)
            _describe(run, key, params, known | code, why, spent)
            if runtime.mlflow:
                _start_feeder(run)
            yield run
        prune_finished(runs / stage, folder)


def _remove_leftovers(root: Path, caches: Path, stage: str) -> None:
    """Removes what a process that was killed while it wrote outputs or a cache has left of them.

    Nobody else writes the outputs now. An isolated copy may be writing to the caches: of theirs only what is old goes.
    """
    for leftover in (root / "checkpoints").glob(f".{stage}.*"):
        leftover.unlink(missing_ok=True)
    for leftover in caches.glob("*/.*"):
        with suppress(FileNotFoundError):
            if now_s() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink()


def _held_run_folder(stack: ExitStack, runs: Path, stage: str, key: str, *, recorded: bool) -> RunFolder:
    """The run folder to go on in, held until `stack` closes. Where another workspace trains the recipe, waits for its end."""
    while True:
        folder = open_run_folder(runs, stage, key, recorded=recorded)
        if waits := is_held(folder.lock):
            print(f"{stage}: waits for another process with the same recipe ({folder.path})", file=sys.stderr, flush=True)
        with ExitStack() as held:
            held.enter_context(hold(folder.lock, wait=True))
            if not waits or open_run_folder(runs, stage, key, recorded=recorded) == folder:  # it may be finished by now
                stack.push(held.pop_all())
                return folder


@contextmanager
def _recorded_exit(path: Path, stop: StopSignals, memory_hint: str) -> Iterator[None]:
    """Leaves code, reason and time of the block's end, and what it used, in the file at `path`; also of an end at once."""
    further, meter = stop.on_abort, Meter()

    def record(code: int, reason: str) -> None:
        write_json(path, {"code": code, "reason": reason, "time_s": now_s(), "used": meter.read()})

    def abort(code: int, reason: str) -> None:
        record(code, reason)
        if further is not None:
            further(code, reason)

    stop.on_abort = abort
    try:
        yield
    except BaseException as error:  # recorded, and raised again
        code, lines = explain(error, memory_hint)
        with suppress(OSError):  # on a full disk, say: what has happened counts
            record(code, lines[-1])
        raise
    finally:
        stop.on_abort = further
    stop.deferred = True
    record(0, "finished")


@contextmanager
def _followers(ranks: int) -> Iterator[None]:
    """Runs this script once more for each rank from 1 on; they end with the block, whichever way.

    They have sessions of their own: a signal to this process group is for rank 0, which tells them.
    """
    if ranks == 1:
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    followers = [
        subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(1, ranks)
    ]
    try:
        yield
        _wait_for(followers)
    except RuntimeError:  # what torch raises when the other end of a connection is gone: the reason is the follower's
        if code := _wait_for(followers):
            raise SystemExit(code) from None
        raise
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()


@contextmanager
def _other_ranks_gone() -> Iterator[None]:
    """One line in place of a traceback where a rank that died takes a follower with it: the reason is that rank's to say."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in OTHER_RANK_GONE):
            raise Stopped(signal.SIGTERM, ", because another rank is gone") from None
        raise


def _wait_for(followers: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Gives the followers time to end; the exit code of one that failed, else of one that was stopped, else 0."""
    deadline = time.monotonic() + FOLLOWERS_END_S
    while None in (codes := [follower.poll() for follower in followers]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return min((code for code in codes if code and code > 0), default=0)


def _describe(
    run: StageRun,
    key: str,
    params: Mapping[str, Any],
    known: Mapping[str, str],
    why: list[str],
    spent: Mapping[str, float],
) -> None:
    before = read_json(run.folder.about)
    why = before.get("why") or why  # what resumes has the reason of its first start
    uri = tracking_uri(run.home)
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
        "tags": run_tags(run.root, run.stage, key, known)
        | {
            "run.why": "\
".join(why)
        },
        **circumstances(run.root),
    }
    write_json(run.folder.about, about)
    start = f"resumes at step {run.resumed_step}" if about["attempt"] > 1 else "new"
    print(f"{run.stage}: run {run.folder.path.relative_to(run.home)} ({start}), tracking {uri}", file=sys.stderr, flush=True)


def _start_feeder(run: StageRun) -> None:
    """Starts the process that carries the records to MLflow, detached: it outlives the trainer and may fail alone."""
    library = str(Path(pipeline.__file__).parents[1])
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH", "")]))
    with run.folder.feeder_log.open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "pipeline.tracking.feeder", str(run.folder.path)],
            cwd=run.home,  # an isolated copy may be removed before the feeder ends
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _memory_hint(stage: str, params: Mapping[str, Any]) -> str:
    own = params.get(stage, {})
    for name in ("micro_batch_size", "batch_size"):
        if name in own:
            return f"lower {stage}.{name} (now {own[name]}) in params.yaml"
    return "use a smaller model or batch"
