"""Carries one run's records to MLflow: `python -m pipeline.tracking.feeder RUN_FOLDER`.

A process of its own, started by the trainer and outliving it by seconds. While the trainer lives it sends what a save
has made final; after an orderly end, everything. It then closes the MLflow run with the truth: FINISHED for exit code 0,
KILLED after a signal, FAILED otherwise. Run on a folder again, it sends what is missing and nothing twice. It sends nothing
that it cannot note in feeder.json; when a full disk keeps it from that, it closes the MLflow run all the same.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from pipeline.errors import PipelineError
from pipeline.supervise import exit_on_error, hold, is_held, lasting_stderr
from pipeline.tracking.description import flatten
from pipeline.tracking.recorder import now_s
from pipeline.tracking.run_folder import RunFolder, read_json, write_json
from pipeline.tracking.saves import committed_sizes
from pipeline.tracking.store import open_store

POLL_S = 1.0
GIVE_UP_S = 20.0  # without a working server or disk, counted from the end of the trainer
MAX_METRICS = 1000  # per request
MAX_PARAMS = 100
# MLflow finds tables through a tag of at most 8000 characters, about 100 tables. A table is sent once it holds this share
# of the rows before it: their number grows with the logarithm of the rows, and none is ever rewritten.
TABLE_GROWTH = 0.25
TABLES_TAG = "mlflow.loggedArtifacts"


@dataclass
class Cursor:
    """What MLflow has received (feeder.json). `sent` is the last step and its keys; `pending` a batch in flight."""

    run_id: str = ""
    sent: tuple[int, list[str]] = (-1, [])
    pending: tuple[int, list[str]] | None = None
    sample_step: int = -1
    sample_rows: int = 0
    tables: list[str] = field(default_factory=list)

    def is_new(self, step: int, key: str) -> bool:
        """Whether the metric comes after what was sent, so that each (step, key) arrives once."""
        last, keys = self.sent
        return step > last or (step == last and key not in keys)

    def after(self, metrics: list[Metric]) -> tuple[int, list[str]]:
        """`sent` as it will be once `metrics`, in order of steps, have arrived."""
        step = metrics[-1].step
        keys = [metric.key for metric in metrics if metric.step == step]
        return step, (self.sent[1] + keys if self.sent[0] == step else keys)


class Feeder:
    """Sends one run folder to one MLflow run.

    Raises:
        PipelineError: the folder has no readable run.json.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._about = read_json(folder.about)
        if not self._about:
            raise PipelineError(f"{folder.about}: missing or unreadable; the next start of the stage writes it again")
        self._positions = {"metrics": 0, "samples": 0}
        self._seen_samples = 0
        self._client: MlflowClient | None = None
        self._cursor = Cursor()

    def run(self) -> int:
        """Feeds until the trainer has ended and all is sent; the exit code is 1 when the server or the disk stayed away."""
        ended_at: float | None = None
        while True:
            alive = is_held(self._folder.lock)
            try:
                self._follow_attempt()
                client = self._connect()
                self._send_all(client, final=not alive)
                if not alive:
                    self._close(client, self._cursor.run_id)
                    return 0
            except (MlflowException, OSError) as error:
                _note(f"not sent: {error}")
                self._client = None
            if not alive:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > GIVE_UP_S:
                    self._give_up()
                    return 1
            time.sleep(POLL_S)

    def _give_up(self) -> None:
        """Closes the MLflow run although records are missing there, which needs the server but no space on this disk."""
        try:
            client, run_id = self._find()
            self._close(client, run_id)
        except (MlflowException, OSError) as error:
            _note(f"not closed: {error}")

    def _follow_attempt(self) -> None:
        """Starts again at the top of the files when the trainer was restarted: it has cut them."""
        about = read_json(self._folder.about) or self._about
        if about["attempt"] != self._about["attempt"]:
            self._about = about
            self._positions = {"metrics": 0, "samples": 0}
            self._client = None

    def _connect(self) -> MlflowClient:
        if self._client is not None:
            return self._client
        client, run_id = self._find()
        state = read_json(self._folder.cursor)
        # Another server, or a store that was deleted, receives the whole history.
        self._cursor = Cursor(**state) if state.get("run_id") == run_id else Cursor(run_id=run_id)
        self._settle_pending(client)
        self._save_cursor()
        self._describe(client)
        client.update_run(run_id, status="RUNNING")
        self._client = client
        return client

    def _find(self) -> tuple[MlflowClient, str]:
        """A client and the id of the MLflow run, made when it is new."""
        about = self._about
        client, experiment_id = open_store(about["tracking_uri"], Path(about["root"]))
        found = client.search_runs([experiment_id], f"tags.`run.uid` = '{about['uid']}'", max_results=1)
        return client, found[0].info.run_id if found else self._create(client, experiment_id)

    def _create(self, client: MlflowClient, experiment_id: str) -> str:
        about = self._about
        tags = {"run.uid": about["uid"], "mlflow.source.name": f"stages/{about['stage']}.py"}
        run = client.create_run(experiment_id, start_time=_ms(about["started_s"]), tags=tags, run_name=about["name"])
        return str(run.info.run_id)

    def _describe(self, client: MlflowClient) -> None:
        """Params never change within a recipe, so sending them again is harmless; tags may have changed."""
        about, run_id = self._about, self._cursor.run_id
        tags = {**about["tags"], "run.folder": str(self._folder.path), "run.resumed": str(about["attempt"] - 1)}
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        params = [Param(name, value) for name, value in flatten(about["params"]).items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        client.log_dict(run_id, about["params"], "params.json")  # MLflow cuts long values short

    def _settle_pending(self, client: MlflowClient) -> None:
        """Asks MLflow whether a batch arrived whose confirmation was lost."""
        if self._cursor.pending is None:
            return
        step, keys = self._cursor.pending
        if any(metric.step == step for metric in client.get_metric_history(self._cursor.run_id, keys[-1])):
            self._cursor.sent = (step, keys)
        self._cursor.pending = None

    def _send_all(self, client: MlflowClient, *, final: bool) -> None:
        everything = final and bool(read_json(self._folder.exit))
        sizes = committed_sizes(self._folder)
        metrics_end = self._folder.metrics.stat().st_size if everything else sizes["metrics_bytes"]
        samples_end = self._folder.samples.stat().st_size if everything else sizes["samples_bytes"]
        for batch in _batches(self._new_metrics(metrics_end)):
            self._cursor.pending = self._cursor.after(batch)
            self._save_cursor()
            client.log_batch(self._cursor.run_id, metrics=batch)
            self._cursor.sent, self._cursor.pending = self._cursor.pending, None
            self._save_cursor()
        self._positions["metrics"] = max(metrics_end, self._positions["metrics"])
        if samples_end != self._seen_samples or final:
            self._send_samples(client, samples_end, final)
            self._seen_samples = samples_end

    def _new_metrics(self, end: int) -> Iterator[Metric]:
        for line in _lines(self._folder.metrics, self._positions["metrics"], end):
            for key, value in line["metrics"].items():
                if value is not None and self._cursor.is_new(line["step"], key):
                    yield Metric(key, value, _ms(line["time_s"]), line["step"])

    def _send_samples(self, client: MlflowClient, end: int, final: bool) -> None:
        lines = _lines(self._folder.samples, self._positions["samples"], end)
        rows = [row for row in lines if row["step"] > self._cursor.sample_step]
        if not rows or (not final and len(rows) < TABLE_GROWTH * self._cursor.sample_rows):
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[row.get(key) for key in columns] for row in rows]}
        name = f"samples/{rows[-1]['step']:08d}.json"
        cursor = self._cursor
        client.log_dict(cursor.run_id, table, name)
        tables = [*cursor.tables, name]
        client.set_tag(cursor.run_id, TABLES_TAG, json.dumps([{"path": path, "type": "table"} for path in tables]))
        cursor.tables, cursor.sample_step = tables, rows[-1]["step"]
        cursor.sample_rows += len(rows)
        self._save_cursor()
        self._positions["samples"] = end

    def _close(self, client: MlflowClient, run_id: str) -> None:
        end = read_json(self._folder.exit)
        code = end.get("code")
        status = "FINISHED" if code == 0 else "KILLED" if code is None or code > 128 else "FAILED"
        client.set_tag(run_id, "exit.reason", end.get("reason", "killed; the process left no word"))
        client.set_terminated(run_id, status, _ms(end.get("time_s", now_s())))

    def _save_cursor(self) -> None:
        write_json(self._folder.cursor, asdict(self._cursor))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _lines(path: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    """The JSON lines between two byte positions; none when `end` lies before `start`.

    What follows the last line's end is left out: a full disk or an end at once may have torn it. So are damaged lines.
    """
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read(max(0, end - start)).split(b"\n")[:-1]
    for line in lines:
        with suppress(ValueError):
            yield json.loads(line)


def _note(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _batches(metrics: Iterable[Metric]) -> Iterator[list[Metric]]:
    batch: list[Metric] = []
    for metric in metrics:
        batch.append(metric)
        if len(batch) == MAX_METRICS:
            yield batch
            batch = []
    if batch:
        yield batch


def main() -> int:
    """Feeds the folder named on the command line; a second feeder of the same folder waits for the first."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with suppress(OSError):
        os.nice(10)  # never at the cost of training
    folder = RunFolder(Path(sys.argv[1]).resolve())
    # Its log may lie on a full disk, which must not end it.
    with lasting_stderr(), exit_on_error("feeder"), hold(folder.feeder_lock, wait=True):
        return Feeder(folder).run()


if __name__ == "__main__":
    sys.exit(main())
