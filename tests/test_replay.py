"""What `python -m pipeline replay` owes: every point in MLflow once, wherever the feeder was interrupted."""

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException

from pipeline.errors import ParamsError, PipelineError
from pipeline.supervise import hold
from pipeline.tracking import proof
from pipeline.tracking import sender as sending
from pipeline.tracking.records import find_runs, noted_complete
from pipeline.tracking.replay import incomplete_runs, send_missing
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.saves import committed_sizes
from pipeline.tracking.sender import LAST_SAMPLES, TABLES_TAG, Sender
from pipeline.tracking.tables import as_text

URI = "fake:"
DATA = {"dvc.data/prepared/rlaif": "0123456789abcdef0123456789abcdef.dir", "dvc.data/tokenizer": "no data set"}


class Death(BaseException):
    """The process is killed."""


class Interrupted:
    """Lets `calls` calls through, then fails one: before or after it has had its effect, by death or by an error."""

    def __init__(self, calls: int, after: bool, error: BaseException) -> None:
        self.left, self.after, self.error = calls, after, error

    def __call__(self, effect: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error
        result = effect()
        if self.left == 0:
            raise self.error
        return result


class Store:
    """An MLflow that forgives nothing: a metric sent twice is there twice."""

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}
        self.interrupt: Callable[[Callable[[], Any]], Any] = lambda effect: effect()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self.interrupt(lambda: getattr(self, f"_{name}")(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.call(name, *arguments, **options)

    def _search_runs(self, experiments: list[str], wanted: str) -> list[Any]:
        return [self._view(run) for run in self.runs.values() if f"'{run.tags['run.uid']}'" in wanted and not run.deleted]

    def _view(self, run: SimpleNamespace) -> Any:
        latest: dict[str, Any] = {}
        for metric in run.metrics:
            latest[metric.key] = max(metric, latest.get(metric.key, metric), key=lambda metric: (metric.step, metric.timestamp))
        data = SimpleNamespace(metrics=latest, tags=dict(run.tags))
        inputs = SimpleNamespace(dataset_inputs=list(run.inputs))
        proto = SimpleNamespace(data=SimpleNamespace(metrics=list(latest.values())))
        return SimpleNamespace(
            info=SimpleNamespace(run_id=run.id, status=run.status), data=data, inputs=inputs, to_proto=lambda: proto
        )

    def _create_run(self, experiment: str, *, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        run = SimpleNamespace(
            id=f"run{len(self.runs)}", tags=dict(tags), metrics=[], inputs=[], artifacts={}, status="RUNNING", deleted=False
        )
        self.runs[run.id] = run
        return self._view(run)

    def _delete_run(self, run_id: str) -> None:
        self.runs[run_id].deleted = True

    def _log_batch(self, run_id: str, metrics: Any = (), tags: Any = (), params: Any = ()) -> None:
        self.runs[run_id].metrics += metrics
        self.runs[run_id].tags |= {tag.key: tag.value for tag in tags}

    def _log_inputs(self, run_id: str, datasets: list[Any]) -> None:
        self.runs[run_id].inputs += datasets

    def _log_dict(self, run_id: str, value: Any, name: str) -> None:
        self.runs[run_id].artifacts[name] = value

    def _log_text(self, run_id: str, text: str, name: str) -> None:
        self.runs[run_id].artifacts[name] = text

    def _list_artifacts(self, run_id: str, folder: str) -> list[Any]:
        return [SimpleNamespace(path=name) for name in self.runs[run_id].artifacts if name.startswith(f"{folder}/")]

    def _set_tag(self, run_id: str, name: str, value: str) -> None:
        self.runs[run_id].tags[name] = value

    def _update_run(self, run_id: str, *, status: str) -> None:
        self.runs[run_id].status = status

    def _set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.runs[run_id].status = status

    def kept(self) -> SimpleNamespace:
        (run,) = [run for run in self.runs.values() if not run.deleted]
        return run


class Trainer:
    """Writes a run folder as `StageRun` does, without the cost: every start goes on from the newest save."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.step, self.saved, self.time_s = folder, 0, 0, 0.0
        folder.path.mkdir(parents=True)
        self.attempt = self.furthest = 0

    def start(self) -> None:
        self.attempt += 1
        self.folder.exit.unlink(missing_ok=True)
        about = {"stage": "grpo", "name": "grpo", "uid": "u", "attempt": self.attempt, "started_s": 1.0}
        write_json(self.folder.about, {**about, "tracking_uri": URI, "params": {"grpo": {"lr": 1.0}}, "tags": DATA})
        sizes = committed_sizes(self.folder)
        for path, size in ((self.folder.metrics, sizes["metrics_bytes"]), (self.folder.samples, sizes["samples_bytes"])):
            with path.open("ab") as file:
                file.truncate(size)
        self.step = self.saved

    def train(self, steps: int, save: bool) -> None:
        for _ in range(steps):
            self.step, self.time_s = self.step + 1, self.time_s + 1
            self.furthest = max(self.furthest, self.step)
            metrics = {"loss": 10.0 + self.step, "nan": None} | ({"val/loss": float(self.step)} if self.step % 3 == 0 else {})
            _append(self.folder.metrics, {"step": self.step, "time_s": self.time_s, "metrics": metrics})
            for row in range(self.step % 3):
                _append(self.folder.samples, {"step": self.step, "text": f"{self.step}.{row}"})
        if save:
            sizes = {"metrics_bytes": self.folder.metrics.stat().st_size, "samples_bytes": self.folder.samples.stat().st_size}
            write_json(self.folder.commit(self.step), {"step": self.step, **sizes})
            self.saved = self.step

    def end(self, code: int | None) -> None:
        if code is not None:
            write_json(self.folder.exit, {"code": code, "reason": "r", "time_s": self.time_s})


def _append(path: Path, value: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


@contextmanager
def project(store: Store) -> Iterator[RunFolder]:
    """A run folder in a fresh repository whose store is the fake one; durability costs time and is tested elsewhere."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "open_store", lambda uri, root: store.interrupt(lambda: (store, "1")))
        patch.setattr(proof, "open_existing", lambda uri, root: (store, "1"))
        patch.setattr(sending, "write_json", lambda *arguments: store.interrupt(lambda: write_json(*arguments)))
        patch.setattr(sending, "MAX_METRICS", 3)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield RunFolder(Path(root).resolve() / ".runs" / "grpo" / "0123456789abcdef" / "1")


def expected(folder: RunFolder) -> tuple[Counter[Any], list[str]]:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    metrics = Counter((key, line["step"], value) for line in lines for key, value in line["metrics"].items())
    return metrics, [json.loads(line)["text"] for line in folder.samples.read_text().splitlines()]


def received(run: SimpleNamespace) -> tuple[Counter[Any], list[str]]:
    # what was not finite arrives as NaN, which equals nothing
    metrics = Counter((metric.key, metric.step, None if math.isnan(metric.value) else metric.value) for metric in run.metrics)
    tables = [entry["path"] for entry in json.loads(run.tags.get(TABLES_TAG, "[]"))]
    assert set(run.artifacts) - {LAST_SAMPLES} == {"params.json", *tables}
    assert [given.dataset.name for given in run.inputs] == ["data/prepared/rlaif"]
    rows = [dict(zip(run.artifacts[name]["columns"], row, strict=True)) for name in tables for row in run.artifacts[name]["data"]]
    if rows:
        assert run.artifacts[LAST_SAMPLES] == as_text([row for row in rows if row["step"] == rows[-1]["step"]])
    return metrics, [row["text"] for row in rows]


interruption = st.builds(
    Interrupted,
    st.integers(1, 25),
    st.booleans(),
    st.sampled_from([Death(), MlflowException("no answer"), OSError("connection reset")]),
)
attempt = st.fixed_dictionaries(
    {
        "bursts": st.lists(st.tuples(st.integers(1, 4), st.booleans(), interruption), min_size=1, max_size=3),
        "code": st.sampled_from([None, 1, 143]),
        "fed": st.lists(interruption, max_size=3),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(attempt, min_size=1, max_size=3))
def test_whatever_interrupts_the_feeder_a_replay_leaves_each_point_once(attempts: list[dict[str, Any]]) -> None:
    store = Store()
    with project(store) as folder:
        trainer = Trainer(folder)
        for each in attempts:
            trainer.start()
            feeder = Sender(folder)
            for steps, save, interrupted in each["bursts"]:
                trainer.train(steps, save)
                store.interrupt = interrupted
                try:
                    feeder.send(final=False)
                except Death:
                    feeder = Sender(folder)
                except (MlflowException, OSError):
                    pass
            trainer.end(each["code"])
            for interrupted in each["fed"]:
                store.interrupt = interrupted
                with suppress(Death, MlflowException, OSError):
                    feeder.send(final=True)
                    feeder.close(complete=True)
        trainer.start()
        trainer.train(trainer.furthest - trainer.step + 2, save=False)
        trainer.end(0)
        store.interrupt = lambda effect: effect()
        (line,) = send_missing([folder], None)
        assert line.endswith(f"FINISHED, complete in {URI}") and noted_complete(folder)
        assert received(store.kept()) == expected(folder)
        assert store.kept().status == "FINISHED"
        again = list(send_missing([folder], None))
        assert "sent 0 points and 0 samples" in again[0] and received(store.kept()) == expected(folder)


def test_runs_that_a_hung_server_makes_late_go_and_false_confirmations_are_found_out(ended: RunFolder) -> None:
    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "open_store", lambda uri, root: (store, "1"))
        for _ in range(3):
            store.create_run("1", start_time=0, tags={"run.uid": "u"}, run_name="grpo")
        deaf = lambda run_id, metrics=(), **options: None  # noqa: E731
        patch.setattr(store, "_log_batch", deaf)
        with pytest.raises(PipelineError, match="fake: lacks what it has confirmed"):
            list(send_missing([ended], None))
        assert not noted_complete(ended)
        patch.undo()
        patch.setattr(sending, "open_store", lambda uri, root: (store, "1"))
        list(send_missing([ended], None))
    assert received(store.kept()) == expected(ended) and noted_complete(ended)


@pytest.fixture
def ended() -> Iterator[RunFolder]:
    with project(Store()) as folder:
        trainer = Trainer(folder)
        trainer.start()
        trainer.train(5, save=True)
        trainer.end(0)
        yield folder


def test_a_run_is_named_by_folder_stage_or_mlflow_id(ended: RunFolder) -> None:
    newer = RunFolder(ended.path.with_name("2"))
    Trainer(newer).start()
    os.utime(ended.about, (1, 1))
    list(send_missing([ended], None))
    write_json(ended.feeder_note, {"run_id": "abc", "tracking_uri": URI, "complete": 1})
    assert find_runs(ended.root, ["grpo", "abc", str(ended.path), str(ended.path.relative_to(ended.root))]) == [
        newer,
        ended,
        ended,
        ended,
    ]
    assert incomplete_runs(ended.root, None) == [newer]
    assert incomplete_runs(ended.root, "other:") == [ended, newer]
    with pytest.raises(ParamsError, match="grop: no run folder, no stage"):
        find_runs(ended.root, ["grop"])


@contextmanager
def arrived() -> Iterator[tuple[Store, RunFolder]]:
    """A run of nine steps that has finished, and the store that has it."""
    store = Store()
    with project(store) as folder:
        trainer = Trainer(folder)
        trainer.start()
        trainer.train(9, save=True)
        trainer.end(0)
        list(send_missing([folder], None))
        yield store, folder


def test_a_store_that_was_lost_or_restored_in_part_is_asked_and_gets_what_it_lacks() -> None:
    """feeder.json says "complete" all the while."""
    with arrived() as (store, folder):
        tables = sorted(name for name in store.kept().artifacts if name.startswith("samples/"))
        assert incomplete_runs(folder.root, None) == [] and len(tables) > 2
        del store.kept().artifacts[tables[1]]
        assert incomplete_runs(folder.root, None) == [folder]
        list(send_missing([folder], None))
        assert received(store.kept()) == expected(folder) and incomplete_runs(folder.root, None) == []
        store.kept().metrics.pop()
        assert incomplete_runs(folder.root, None) == [folder]
        store.runs.clear()
        assert incomplete_runs(folder.root, None) == [folder]
        write_json(folder.gone, {"step": 9, "tracking_uri": URI})
        folder.samples.unlink()
        with pytest.raises(PipelineError, match="not complete in .*: MLflow lacks samples up to step 9, which `pipeline gc` has"):
            list(send_missing([folder], None))
        assert not noted_complete(folder)


def test_what_a_damaged_record_cannot_tell_is_not_said() -> None:
    """How the run ended, or all that it measured: what MLflow has of it stays, and `complete` is not said."""
    with arrived() as (store, folder):
        status, ended = store.kept().status, folder.exit.read_text()
        folder.exit.write_text(ended[:10])
        with pytest.raises(PipelineError, match="exit.json: unreadable, so how the run ended is not known"):
            list(send_missing([folder], None))
        assert store.kept().status == status == "FINISHED"
        size = folder.metrics.stat().st_size
        write_json(folder.exit, json.loads(ended) | {"metrics_bytes": size})
        list(send_missing([folder], None))
        write_json(folder.exit, json.loads(ended) | {"metrics_bytes": size + 1})
        with pytest.raises(PipelineError, match=f"ends before the run did, {size} of {size + 1} bytes are left"):
            list(send_missing([folder], None))


def test_what_is_still_sent_or_trained_is_refused_and_the_rest_goes(ended: RunFolder) -> None:
    other = RunFolder(ended.path.with_name("2"))
    trainer = Trainer(other)
    trainer.start()
    trainer.end(1)
    with hold(other.lock, wait=False):
        assert incomplete_runs(ended.root, None) == [ended]
        lines = send_missing([other, ended], None)
        assert "sent 11 points and 6 samples" in next(lines)
        with pytest.raises(PipelineError, match="is still training"):
            next(lines)
    with hold(other.feeder_lock, wait=False), pytest.raises(PipelineError, match="held by the live process"):
        list(send_missing([other], None))


def test_a_store_that_fails_is_one_line_per_run(ended: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: str, root: Path) -> None:
        raise MlflowException("connection refused\nlong story")

    monkeypatch.setattr(sending, "open_store", refuse)
    with pytest.raises(PipelineError) as error:
        list(send_missing([ended, ended], None))
    (line,) = error.value.lines  # of the same run, so the same line
    assert line.endswith(f": {URI}: failed after 0 points: connection refused; mend it and replay again")
    assert not noted_complete(ended) and read_json(ended.feeder_note) == {}
