"""The flows with overrides against a real, temporary Prefect server: experiments, sweeps, their reports, and stopping."""

import _thread
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import small_lineage
from prefect.artifacts import Artifact
from prefect.testing.utilities import prefect_test_harness
from small_lineage import ran

from flows import minimind as minimind_module
from flows import sweep as sweep_module
from flows.experiments import ExperimentFailed
from flows.minimind import minimind
from flows.sweep import choose_metric, conclusion, measured_apart, sweep
from pipeline.errors import ParamsError
from pipeline.lineage.experiment import Experiment
from pipeline.lineage.headlines import EVAL_HEADLINES, HEADLINES
from pipeline.lineage.records import final_metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lineage.make(tmp_path_factory.mktemp("lineage"))


@pytest.fixture(autouse=True)
def workspace(lineage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lineage / "ran.txt").write_text("")
    for module in (minimind_module, sweep_module):
        monkeypatch.setattr(module, "ROOT", lineage)
        monkeypatch.setattr(module.os, "cpu_count", lambda: 2)


def report(key: str) -> str:
    artifact = Artifact.get(key)
    assert artifact is not None and isinstance(artifact.data, str)
    return artifact.data


def experiments(lineage: Path) -> list[str]:
    return [name.rpartition("/")[2] for name in small_lineage.git(lineage, "for-each-ref", "refs/exps").splitlines()]


@pytest.mark.faults
def test_a_failed_experiment_goes_on_where_it_was_and_a_finished_one_runs_nothing(lineage: Path) -> None:
    (lineage / "fails").touch()
    overrides = ["pretrain.lr=2e-3", "grpo.lr=0.75"]
    with pytest.raises(ExperimentFailed, match="grpo: told to fail"):
        minimind("grpo", overrides)
    (copy,) = (lineage / ".runs/experiments").glob("*/workspace")
    assert f"`{copy}`, stays" in report("plan-grpo") and experiments(lineage) == []
    (lineage / "fails").unlink()
    minimind("grpo", overrides)
    assert ran(lineage) == ["base 0.75", "grpo 0.75", "grpo 0.75"] and not copy.exists()
    minimind("grpo", overrides)
    assert len(ran(lineage)) == 3
    (name,) = experiments(lineage)
    text = report("plan-grpo")
    assert f"Experiment **{name}**: `grpo.lr=0.75 pretrain.lr=2e-3`" in text and f"`dvc exp apply {name}`" in text
    assert "| grpo | up to date | |  |" in text and "`reward/mean` 9.25, `policy/ref_kl` 0.5" in text


@pytest.mark.slow
def test_a_sweep_tries_all_names_the_best_and_survives_a_member(lineage: Path) -> None:
    (lineage / "fails").touch()
    sweep("grpo", {"grpo.lr": [0.75, 0.5, 0.25], "grpo.kl_coef": [0.02]}, concurrency=2)
    (lineage / "fails").unlink()
    assert sorted(ran(lineage)) == ["grpo 0.25", "grpo 0.5", "grpo 0.75"]
    text = report("sweep-grpo")
    best = next(name for name in experiments(lineage) if "lr-0.25" in name)
    assert text.startswith(f"Best: **{best}** with `reward/mean` 9.75")
    assert text.partition("\n")[0].endswith(f" `dvc exp apply {best}` takes it into the workspace.")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[1], row[2]) for row in rows[:2]] == [("9.75", "finished"), ("9.5", "finished")]
    assert rows[2][1] == "" and "grpo: told to fail" in rows[2][2]

    for name in experiments(lineage):
        small_lineage.dvc(lineage, "exp", "remove", name)
    sweep("grpo", {"grpo.lr": [0.25], "grpo.kl_coef": [0.02]})  # DVC's run cache has what it needs
    assert len(ran(lineage)) == 3 and report("sweep-grpo").startswith(f"Best: **{best}** with `reward/mean` 9.75")
    assert "| grpo | did not have to run |" in report("plan-grpo")
    small_lineage.dvc(lineage, "exp", "apply", best)
    assert (lineage / "grpo.txt").read_text().endswith("0.25")
    small_lineage.git(lineage, "checkout", "--", ".")
    small_lineage.dvc(lineage, "checkout", "--quiet")


@pytest.mark.faults
def test_a_sweep_without_a_result_fails(lineage: Path) -> None:
    (lineage / "fails").touch()
    with pytest.raises(RuntimeError, match="no member succeeded.*grpo: told to fail"):
        sweep("grpo", {"grpo.lr": [0.875]})
    (lineage / "fails").unlink()


@pytest.mark.faults
def test_an_interrupted_sweep_stops_its_members_with_a_save(lineage: Path) -> None:
    (lineage / "slow").touch()

    def interrupt() -> None:
        end = time.monotonic() + 90
        while len(list(lineage.glob("started-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        sweep("grpo", {"grpo.lr": [1.25, 1.5, 1.75]}, concurrency=2)
    (lineage / "slow").unlink()
    assert sorted(path.name for path in lineage.glob("saved-*")) == ["saved-1.25", "saved-1.5"]
    assert not [child for child in psutil.Process().children(recursive=True) if "stages.run" in " ".join(child.cmdline())]
    assert len(list((lineage / ".runs/experiments").glob("grpo-*-1.*/workspace"))) == 2  # for the next try


@pytest.mark.parametrize(
    ("grid", "options", "line"),
    [
        ({}, {}, "grid: must give each key a list"),
        ({"grpo.lr": []}, {}, "grid: must give each key a list"),
        ({"grpo.seed": list(range(40)), "ppo.seed": list(range(26))}, {}, "grid: 1040 combinations, of at most 1000; give fewer"),
        ({"grpo.lrr": [1]}, {}, "grpo.lrr: unknown key; did you mean `lr`"),
        ({"grpo.lr": [1e-4]}, {"concurrency": 0}, "concurrency=0: must be >= 1"),
        ({"grpo.lr": [1e-4]}, {"metric": "reward/std"}, "goal: must be max or min, as reward/std is no headline metric"),
    ],
)
def test_a_wrong_sweep_is_one_line(grid: dict[str, list[Any]], options: dict[str, Any], line: str) -> None:
    with pytest.raises(ParamsError, match=line):
        sweep("grpo", grid, **options)


class Records(logging.Handler):
    """What a logger says of errors: the message, and whether a traceback follows."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[tuple[str, bool]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.getMessage(), bool(record.exc_info)))


def test_the_log_has_a_line_for_a_wrong_override_and_a_traceback_for_a_mistake_in_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger, records = logging.getLogger("prefect.flow_runs"), Records()
    logger.addHandler(records)
    try:
        with pytest.raises(ParamsError) as caught:
            minimind("grpo", ["grpo.lrr=1"])
        logger.error("Engine execution exited with unexpected exception", exc_info=caught.value)  # as a worker's process does
        (line, has_traceback), *more = records.seen
        assert "override: grpo.lrr: unknown key; did you mean `lr`?" in line and not has_traceback and not more
        monkeypatch.setattr(minimind_module, "run_experiment", lambda *_: {}["nothing"])
        with pytest.raises(KeyError):
            minimind("grpo", ["grpo.lr=1e-3"])
        assert [has_traceback for _, has_traceback in records.seen] == [False, True]
    finally:
        logger.removeHandler(records)


def test_a_sweep_says_whether_seeds_may_have_made_the_difference() -> None:
    def found(**values: float) -> list[tuple[Experiment, float]]:
        """Name to value, the best first; a name is the rate and the seed."""
        parts = {name: name.split("_") for name in values}
        overrides = {name: {"grpo.lr": float(part[0][1:]), "grpo.seed": int(part[1])} for name, part in parts.items()}
        return [(Experiment(name, ROOT, "grpo", overrides[name], ""), value) for name, value in values.items()]

    assert conclusion([], "reward/mean", "max") == "No member has `reward/mean`."
    one = conclusion(found(r2_1=0.9, r1_1=0.5), "reward/mean", "max")
    assert one.startswith(
        "Best: **r2_1** with `reward/mean` 0.9 against 0.5 of the next, `grpo.lr=1.0`; one seed cannot tell more."
    )
    clear = conclusion(found(r2_1=0.9, r2_2=0.88, r1_1=0.5, r1_2=0.49), "reward/mean", "max")
    assert clear.startswith("Best: **r2_1** with `reward/mean` 0.9 (mean of 2 seeds: 0.89) against 0.495 of the next,")
    assert "; more than seeds differ." in clear
    lucky = conclusion(found(r2_1=0.1, r1_1=0.2, r1_2=0.3, r2_2=0.9), "val/loss", "min")  # the best member is of the worse rate
    assert lucky.startswith(
        "Best: **r1_1** with `val/loss` 0.2 (mean of 2 seeds: 0.25) against 0.5 of the next, `grpo.lr=2.0`; other"
    )


def test_a_grid_that_changes_what_the_metric_means_has_no_best(tmp_path: Path) -> None:
    """Twice the weight of answers gives a higher mean reward; another rate does not change what it means."""
    small_lineage.git(tmp_path, "init", "--quiet")

    def kept(name: str, rate: float, weight: float) -> Experiment:
        params = {"params.yaml": {"grpo.lr": rate, "rewards.answer": weight}}
        entry = {"cmd": "train", "params": params, "outs": [{"path": "grpo.pth", "md5": "a" * 32}]}
        (tmp_path / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"grpo": entry}}))
        small_lineage.commit(tmp_path, name)
        small_lineage.git(tmp_path, "update-ref", f"refs/exps/{'a' * 2}/{'b' * 38}/{name}", "HEAD")
        return Experiment(name, tmp_path, "grpo", {}, "")

    plain, faster, paid = kept("plain", 0.1, 1.0), kept("faster", 0.2, 1.0), kept("paid", 0.1, 2.0)
    gone = Experiment("gone", tmp_path, "grpo", {}, "")
    assert measured_apart([plain, faster], "reward/mean") is None and measured_apart([], "reward/mean") is None
    assert measured_apart([gone], "reward/mean") is None
    said = measured_apart([plain, faster, paid], "reward/mean")
    assert said == (
        "No best: `reward/mean` was measured with another rewards.answer, so its values do not compare; choose another metric."
    )
    assert measured_apart([plain, paid], "policy/ref_kl") is None


def test_metrics_to_go_by() -> None:
    assert choose_metric("grpo", {"grpo.lr": [1]}, None, None) == ("reward/mean", "max")
    assert choose_metric("pretrain", {"pretrain.lr": [1]}, None, None) == ("val/loss", "min")
    assert choose_metric("eval", {"dpo.beta": [1]}, None, None) == ("dpo/reward_mean", "max")
    assert choose_metric("all", {"dpo.beta": [1]}, "grpo/bits_per_byte", None) == ("grpo/bits_per_byte", "min")
    with pytest.raises(ParamsError, match="metric: must be given for stage eval"):
        choose_metric("eval", {"eval.temperature": [1]}, None, None)


def test_headlines_are_among_the_metrics() -> None:
    for stage, keys in HEADLINES.items():
        assert set(keys) <= set(final_metrics(ROOT, stage)), stage
    assert {f"grpo/{key}" for key in EVAL_HEADLINES} <= set(final_metrics(ROOT, "eval"))
