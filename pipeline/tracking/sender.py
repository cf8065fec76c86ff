"""Brings what a run folder holds to one MLflow run: every metric and sample once, whatever has arrived before.

What MLflow has is asked of MLflow: the last step of every metric, and the tables that the run's tag lists. Points leave in the
order of steps and a batch arrives as a whole or not at all, so "last step" says everything. Nothing has to be noted on this side:
a sender that is killed at any place, an answer that is lost, a restored store and another store are all the same case.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from sqlite3 import Error as SqliteError
from typing import Any

from google.protobuf.json_format import ParseError
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from pipeline.errors import PipelineError
from pipeline.masking import masked
from pipeline.terminal import say
from pipeline.tracking.additions import begin, end
from pipeline.tracking.description import flatten
from pipeline.tracking.fed_run import FedRun
from pipeline.tracking.names import tag_key
from pipeline.tracking.rebuild_runs import leave
from pipeline.tracking.recorder import now_s
from pipeline.tracking.run_folder import RunFolder, cut_record, read_json, write_json
from pipeline.tracking.saves import committed_sizes
from pipeline.tracking.shapes import read_samples, read_steps
from pipeline.tracking.store import SAMPLES, open_store, with_password
from pipeline.tracking.tables import as_table, as_text, cut

TRACKER_FAULTS = (MlflowException, SQLAlchemyError, SqliteError, ParseError, ValueError, OSError)
"""What a store that is stopped, hung, read-only, full or out of its mind makes of a call; a later one may succeed."""
MAX_METRICS = 1000  # per request
MAX_PARAMS = 100
TABLES_TAG = "mlflow.loggedArtifacts"
FOUND_TAG = "guard.found"
LAST_SAMPLES = "samples.txt"
"""Those of the last step once more: MLflow's page that compares runs shows no tables, and of files only those at the top."""


@dataclass
class Arrived:
    """What the MLflow run holds.

    Attributes:
        steps: the last step of every metric.
        tables: artifacts that hold samples, in order of steps.
        in_flight: further such artifacts, which the tag does not list: they may be torn, and are written again.
        described: whether `params.json` is there.
        found: what the guard had to say, a line per finding.
    """

    client: MlflowClient
    run_id: str
    steps: dict[str, int]
    tables: list[str]
    in_flight: list[str]
    described: bool = False
    found: str = ""


class Sender:
    """Sends one run folder to one MLflow run.

    Args:
        folder: the run.
        uri: of the store; the one that the run was started with when left out.

    Attributes:
        points: metrics sent.
        rows: samples sent.

    Raises:
        PipelineError: the folder has no readable run.json.
    """

    def __init__(self, folder: RunFolder, uri: str | None = None) -> None:
        self.points = self.rows = 0
        self._folder = folder
        self._about = read_json(folder.about)
        if not self._about:
            raise PipelineError(f"{folder.about}: missing or unreadable; the next start of the stage writes it again")
        self._uri = uri
        self._arrived: Arrived | None = None
        self._metrics_read = self._system_read = 0  # bytes
        self._samples_read = self._samples_before = 0  # bytes, and the rows in them
        self._samples_seen = -1

    @property
    def uri(self) -> str:
        """Of the store that receives, with its password.

        Raises:
            PipelineError: the environment does not have that.
        """
        return self._uri or with_password(str(self._about["tracking_uri"]))

    def send(self, *, final: bool) -> None:
        """Sends what is missing: with a living trainer what a save has made final, after an orderly end everything.

        Args:
            final: whether the trainer has ended.

        Raises:
            TRACKER_FAULTS: not all is sent; the next call goes on.
        """
        self._follow_attempt()
        everything = final and bool(read_json(self._folder.exit))
        sizes = committed_sizes(self._folder)
        metrics_end = self._folder.metrics.stat().st_size if everything else sizes["metrics_bytes"]
        samples_end = _size(self._folder.samples) if everything else sizes["samples_bytes"]
        arrived = self._arrived or self._open(final=final)
        self._arrived = None  # after a fault MLflow is asked anew
        self._metrics_read = self._send_metrics(arrived, self._folder.metrics, self._metrics_read, metrics_end)
        self._system_read = self._send_metrics(arrived, self._folder.system, self._system_read, _size(self._folder.system))
        if not arrived.described:
            self._send_params(arrived)
        if (found := "\n".join(read_json(self._folder.guard).values())) != arrived.found:
            arrived.client.set_tag(arrived.run_id, FOUND_TAG, found)
            arrived.found = found
        if samples_end != self._samples_seen or final:
            self._send_samples(arrived, samples_end, final)
            self._samples_seen = samples_end
        self._arrived = arrived

    def close(self, *, complete: bool) -> str:
        """Ends the MLflow run with the truth, and returns it: FINISHED for exit code 0, KILLED after a signal, FAILED otherwise.

        Args:
            complete: whether all has been sent, which feeder.json then says.

        Raises:
            TRACKER_FAULTS: the run is not closed, or MLflow has not what it said that it had received.
            PipelineError: how it ended cannot be read, or its record has been cut since.
        """
        client, experiment_id = self.store()
        run = self._find(client, experiment_id) or self._create(client, experiment_id)
        exited = read_json(self._folder.exit)
        if not exited and self._folder.exit.exists():
            raise PipelineError(
                f"{self._folder.exit}: unreadable, so how the run ended is not known; without it the run counts as killed"
            )
        if complete and (lost := cut_record(self._folder)):
            raise PipelineError(lost)
        code = exited.get("code")
        status = "FINISHED" if code == 0 else "KILLED" if code is None or code > 128 else "FAILED"
        client.set_tag(run.info.run_id, "exit.reason", exited.get("reason", "killed; the process left no word"))
        client.set_terminated(run.info.run_id, status, _ms(exited.get("time_s", now_s())))
        end(self._fed(client, experiment_id, run), complete=complete)
        if complete:
            self._check(self._find(client, experiment_id), status)
        self._write_note(run.info.run_id, self._about["attempt"] if complete else None)
        return status

    def _check(self, run: Run | None, status: str) -> None:
        arrived, self._arrived = self._arrived, None
        if not run or not arrived or run.info.status != status or last_steps(run) != arrived.steps:
            raise MlflowException(f"{masked(self.uri)} lacks what it has confirmed")

    def _follow_attempt(self) -> None:
        """Starts again at the top of the files when the trainer was restarted: it has cut them."""
        about = read_json(self._folder.about) or self._about
        if about["attempt"] != self._about["attempt"]:
            self._about, self._arrived = about, None

    def close_rebuild(self) -> None:
        """Brings the rebuild above the run up to date, which closes it when it is over.

        Raises:
            TRACKER_FAULTS: it is as it was.
        """
        client, experiment_id = self.store()
        if run := self._find(client, experiment_id):
            leave(self._fed(client, experiment_id, run))

    def _fed(self, client: MlflowClient, experiment_id: str, run: Run) -> FedRun:
        return FedRun(client, experiment_id, run, self._folder, self._about)

    def store(self) -> tuple[MlflowClient, str]:
        """A client of the store that receives, and the id of the experiment there."""
        return open_store(self.uri, self._folder.root)

    def _open(self, *, final: bool) -> Arrived:
        """The MLflow run, made when it is new, with params and tags, and what it holds."""
        client, experiment_id = self.store()
        run = self._find(client, experiment_id) or self._create(client, experiment_id)
        run_id = run.info.run_id
        self._write_note(run_id, None)
        self._describe(client, run_id)
        begin(self._fed(client, experiment_id, run), live=not final)
        if not final:
            client.update_run(run_id, status="RUNNING")
        tables = [entry["path"] for entry in json.loads(run.data.tags.get(TABLES_TAG, "[]"))]
        there = sorted(file.path for file in client.list_artifacts(run_id, SAMPLES))
        self._metrics_read = self._system_read = self._samples_read = self._samples_before = 0
        self._samples_seen = -1
        # Of a store that was restored without all of its artifacts, tables behind the first one that is not there count as torn.
        whole = list(takewhile(lambda path: path in there, tables))
        return Arrived(client, run_id, last_steps(run), whole, [path for path in there if path not in whole])

    def _find(self, client: MlflowClient, experiment_id: str) -> Run | None:
        """This run in MLflow. A request to make it that a hung server answers late makes one more, which stays empty and goes."""
        found = client.search_runs([experiment_id], f"tags.`run.uid` = '{self._about['uid']}'")
        fullest = sorted(found, key=lambda run: (-len(run.data.metrics), run.info.run_id))
        for other in fullest[1:]:
            if not other.data.metrics:
                client.delete_run(other.info.run_id)
        return fullest[0] if fullest else None

    def _create(self, client: MlflowClient, experiment_id: str) -> Run:
        about = self._about
        tags = {"run.uid": about["uid"], "mlflow.source.name": f"stages/{about['stage']}.py"}
        return client.create_run(experiment_id, start_time=_ms(about["started_s"]), tags=tags, run_name=about["name"])

    def _describe(self, client: MlflowClient, run_id: str) -> None:
        """Params never change within a recipe, so sending them again is harmless; tags may have changed."""
        about = self._about
        tags = {**about["tags"], "run.folder": str(self._folder.path), "run.resumed": str(about["attempt"] - 1)}
        if text := about.get("params_file"):
            tags["params.sha256"] = hashlib.sha256(text.encode()).hexdigest()
        client.log_batch(run_id, tags=[RunTag(tag_key(name), value) for name, value in tags.items()])
        params = [Param(name, value) for name, value in flatten(about["params"]).items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[start : start + MAX_PARAMS])

    def _send_params(self, arrived: Arrived) -> None:
        """The run's own params as they are (MLflow cuts long values short), the whole file of them, and why it ran."""
        arrived.client.log_dict(arrived.run_id, self._about["params"], "params.json")
        if text := self._about.get("params_file"):
            arrived.client.log_text(arrived.run_id, text, "params.yaml")
        if why := self._about.get("why"):
            arrived.client.log_text(arrived.run_id, "\n".join(why) + "\n", "why.txt")
        arrived.described = True

    def _send_metrics(self, arrived: Arrived, path: Path, start: int, end: int) -> int:
        """Sends the points between two positions of a file that MLflow has not; returns the position to go on from."""
        missing = self._missing_metrics(arrived.steps, path, start, end)
        while batch := list(islice(missing, MAX_METRICS)):
            arrived.client.log_batch(arrived.run_id, metrics=batch)
            arrived.steps |= {metric.key: metric.step for metric in batch}
            self.points += len(batch)
        return max(start, end)

    def _missing_metrics(self, steps: dict[str, int], path: Path, start: int, end: int) -> Iterator[Metric]:
        for line in read_steps(path, start, end):
            for key, value in line["metrics"].items():
                if line["step"] > steps.get(key, -1):
                    # what was not finite is NaN there: left out, an older value would be the last one
                    yield Metric(key, math.nan if value is None else value, _ms(line["time_s"]), line["step"])

    def _send_samples(self, arrived: Arrived, end: int, final: bool) -> None:
        """Sends rows as tables that are named by their last step; those in flight get the rows that they were to have."""
        new = list(read_samples(self._folder.samples, self._samples_read, end))
        if new:
            newest = [row for row in new if row["step"] == new[-1]["step"]]
            arrived.client.log_text(arrived.run_id, as_text(newest), LAST_SAMPLES)
        last = table_step(arrived.tables[-1]) if arrived.tables else -1
        rows = [row for row in new if row["step"] > last]
        before = self._samples_before + len(new) - len(rows)
        while arrived.in_flight and rows and (final or rows[-1]["step"] >= table_step(arrived.in_flight[0])):
            name = arrived.in_flight[0]
            part = [row for row in rows if row["step"] <= table_step(name)]
            self._send_table(arrived, name, part)
            arrived.in_flight.pop(0)
            rows, before = rows[len(part) :], before + len(part)
        if arrived.in_flight:
            return
        *whole, rest = cut(rows, before)
        for part in [*whole, *([rest] if final and rest else [])]:
            self._send_table(arrived, f"{SAMPLES}/{part[-1]['step']:08d}.json", part)
        if final or not rest:
            self._samples_read, self._samples_before = max(end, self._samples_read), before + len(rows)

    def _send_table(self, arrived: Arrived, name: str, rows: list[dict[str, Any]]) -> None:
        arrived.client.log_dict(arrived.run_id, as_table(rows), name)
        tables = [*arrived.tables, name]
        listed = json.dumps([{"path": path, "type": "table"} for path in tables])
        arrived.client.set_tag(arrived.run_id, TABLES_TAG, listed)  # only now the table counts
        arrived.tables = tables
        self.rows += len(rows)

    def _write_note(self, run_id: str, complete: int | None) -> None:
        """feeder.json, for people and for `replay --all`; on a full disk what it says stays behind, no more."""
        try:
            write_json(self._folder.feeder_note, {"run_id": run_id, "tracking_uri": masked(self.uri), "complete": complete})
        except OSError as error:
            note(f"{self._folder.feeder_note}: not written: {error}")


def note(line: str) -> None:
    """Prints a line with the time in front on stderr, without passwords."""
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {masked(line)}")


def last_steps(run: Run) -> dict[str, int]:
    """The last step of every metric that MLflow has of a run."""
    return {metric.key: metric.step for metric in run.to_proto().data.metrics}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _size(path: Path) -> int:
    """In bytes; 0 for what is not there: samples that `pipeline gc` has removed, say, because a store has them."""
    return path.stat().st_size if path.exists() else 0


def table_step(table: str) -> int:
    """The last step of a table, which is its name."""
    return int(Path(table).stem)
