"""What a stage script stands on: one process, one run folder, one record.

with stage_run("grpo", params={"grpo": ...}, inputs=["checkpoints/full_sft.pth"], runtime=params.runtime) as run:
    state = run.load()
    ...
    run.log(step, metrics)
    run.checkpoint(step, make_state)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.digests import digests
from pipeline.errors import DataError
from pipeline.lineage.agreement import undisturbed
from pipeline.lineage.causes import reasons
from pipeline.lineage.damage import remedies
from pipeline.lineage.declaration import Declaration, is_recorded, outputs_of
from pipeline.lineage.ran_code import check_code
from pipeline.params.schema import Runtime
from pipeline.stage.processes import followers, other_ranks_gone, start_feeder
from pipeline.stage.results import results
from pipeline.stage.run import Follower, StageRun, describe
from pipeline.supervise import StopSignals, exit_on_error, hold, is_held, lasting_stderr, reason
from pipeline.terminal import say
from pipeline.tracking.home import home
from pipeline.tracking.outlook import heavy_step
from pipeline.tracking.recorder import now_s
from pipeline.tracking.run_folder import RunFolder, open_run_folder, run_key, write_json
from pipeline.tracking.saves import prune_finished
from pipeline.tracking.space import check_space
from pipeline.tracking.usage import Meter, spent_before
from pipeline.training.ranks import ALONE, launched_ranks

__all__ = ["StageRun", "stage_process", "stage_run"]

LEFTOVER_S = 3600.0


@contextmanager
def stage_process(
    stage: str,
    used: Declaration | None = None,
    *,
    root: Path | None = None,
    memory_hint: str = "use a smaller batch",
    quiet: bool = False,
) -> Iterator[StopSignals]:
    """Makes this process the only one that runs `stage`, stoppable and with readable errors; for stages without a run too.

    Args:
        stage: the stage's name, as DVC calls it (`data@pretrain`).
        used: parameters and inputs as the script has read them: what DVC is going to record has to be the same.
        root: the repository; the current directory when left out.
        memory_hint: what to lower when memory runs out.
        quiet: whether to end without a line of results.

    Its code and reason are left in `.runs/<stage>/exit.json`, unless another process had the lock.

    Raises:
        SystemExit: instead of every exception of the block; the codes are in `pipeline.supervise`.
    """
    root = root or Path.cwd()
    folder = root / ".runs" / stage
    with lasting_stderr(), exit_on_error(stage, memory_hint):
        with (
            StopSignals() as stop,
            hold(folder / "lock", wait=False),
            _recorded_exit(folder / "exit.json", stop, memory_hint),
            undisturbed(stage, root, used),
            _remedied(root, used),
        ):
            stop.say = lambda words: say(f"{stage}: {words}")
            check_code(stage, root)
            yield stop
        if not quiet:
            say(f"{stage}: {results(stage, root)}")


@contextmanager
def _remedied(root: Path, used: Declaration | None) -> Iterator[None]:
    """Adds to a fault of the data what brings inputs back that are not as DVC has recorded them."""
    try:
        yield
    except DataError as error:
        raise DataError(*error.lines, *remedies(root, used.deps if used else ())) from error


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
        with lasting_stderr(), exit_on_error(name, memory_hint), other_ranks_gone(), StopSignals() as stop:
            check_code(stage, root)
            yield Follower(stage, root, params, runtime, launched, stop)
        return
    used = Declaration([Path(path).as_posix() for path in inputs], dict(params))
    quiet = runtime.progress == "off"
    with stage_process(stage, used, root=root, memory_hint=memory_hint, quiet=quiet) as stop, ExitStack() as stack:
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
        folder.progress.unlink(missing_ok=True)  # of an attempt before
        wanted = runtime.ranks if ranked and launched.size == 1 else 1
        with _recorded_exit(folder.exit, stop, memory_hint, partial(_made, root, stage, folder)), followers(wanted, stop):
            check_space(stage, folder, root, params, inputs, runtime)
            run = StageRun(stage, root, folder, params, runtime, stop, launched_ranks() if ranked else ALONE)
            stack.callback(run.close)
            why = reasons(root, run.home, stage, params, known | code)
            describe(run, key, params, known | code, why, spent)
            if (line := heavy_step(stage, root)) is not None:
                run.announce(line)
            if runtime.mlflow:
                start_feeder(run.folder, run.home)
            with run.saved_at_stop():
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
            say(f"{stage}: waits for another process with the same recipe ({folder.path})")
        with ExitStack() as held:
            held.enter_context(hold(folder.lock, wait=True))
            if not waits or open_run_folder(runs, stage, key, recorded=recorded) == folder:  # it may be finished by now
                stack.push(held.pop_all())
                return folder


def _made(root: Path, stage: str, folder: RunFolder) -> dict[str, Any]:
    """Digests of what the stage wrote: these bytes are its run's, whatever DVC records, and whatever lies there later.

    And how long its record is, so that one that is cut later is not taken for whole.
    """
    outputs = digests(root, [path for path in outputs_of(stage, root / "dvc.yaml") if (root / path).exists()])
    return {"outputs": outputs, "metrics_bytes": folder.metrics.stat().st_size if folder.metrics.exists() else 0}


@contextmanager
def _recorded_exit(
    path: Path, stop: StopSignals, memory_hint: str, made: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[None]:
    """Leaves code, reason and time of the block's end, and what it used, in the file at `path`; also of an end at once.

    Of a good end also what `made` says.
    """
    further, meter = stop.on_abort, Meter()

    def record(code: int, reason: str, **more: Any) -> None:
        write_json(path, {"code": code, "reason": reason, "time_s": now_s(), "used": meter.read(), **more})

    def abort(code: int, reason: str) -> None:
        record(code, reason)
        further(code, reason)

    stop.on_abort = abort
    try:
        yield
    except BaseException as error:  # recorded, and raised again
        with suppress(OSError):  # on a full disk, say: what has happened counts
            record(*reason(error, memory_hint))
        raise
    finally:
        stop.on_abort = further
    stop.deferred = True
    record(0, "finished", **made())


def _memory_hint(stage: str, params: Mapping[str, Any]) -> str:
    own = params.get(stage, {})
    batch = "micro_batch_size" if "micro_batch_size" in own else "batch_size"
    knobs = [f"{stage}.{name} (now {own[name]})" for name in (batch, "cache_gib") if name in own]
    return f"lower {' or '.join(knobs)} in params.yaml" if knobs else "use a smaller model or batch"
