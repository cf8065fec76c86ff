"""MLflow's own page that compares runs, in headless Chromium: two runs of grpo, tiny but trained here, recorded and sent.

With MLFLOW_PAGES=FOLDER its pictures land there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fed_runs import Seen, feed
from mlflow_pages import ROOT, opened, pictures, served
from test_group_loop import Run, make_settings
from tiny_runs import CPU, prompts, sets_fixture, tokenizer_fixture

from pipeline.params import load_params
from pipeline.stage import stage_run
from pipeline.text.tokenizer import Tokenizer
from pipeline.tracking import store
from pipeline.tracking.run_folder import RunFolder
from pipeline.tracking.shapes import read_samples
from pipeline.tracking.tables import as_text
from pipeline.tracking.views import REINFORCEMENT, page
from pipeline.training.group_loop import train_group

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

tokenizer, sets = tokenizer_fixture, sets_fixture(rlaif=prompts(12))
METRICS = ("advantages/abs_max", "advantages/mean", "advantages/std", "policy/approx_kl", "reward/mean")


@dataclass(frozen=True)
class Compared:
    """Two runs behind MLflow's pages.

    Attributes:
        url: of the server, with a slash.
        experiment: its id.
        names: of the runs.
        last: their last metrics.
        texts: their last samples, as a person reads them.
    """

    url: str
    experiment: str
    names: list[str]
    last: list[dict[str, float]]
    texts: list[str]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, sets: Path, tokenizer: Tokenizer) -> Iterator[Compared]:
    root = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
        folders = [train(root, sets, tokenizer, lr) for lr in (1e-3, 3e-3)]
        feed(*folders)
        with served(root, root / "ui.log") as (url, _):
            seen = Seen(store.EXPERIMENT)
            runs = [seen.run(folder) for folder in folders]
            last = [run.data.metrics for run in runs]
            yield Compared(url, seen.id, [run.info.run_name for run in runs], last, [last_samples(f) for f in folders])


def train(root: Path, sets: Path, tokenizer: Tokenizer, lr: float) -> RunFolder:
    """Six steps of two updates each, so that the policy leaves the one that sampled."""
    settings = make_settings(epochs=2, lr=lr, updates_per_rollout=2)
    quiet = {"device": "cpu", "threads": 1, "progress": "off", "mlflow": False}
    runtime = load_params(ROOT / "params.yaml").runtime.model_copy(update=quiet)
    with stage_run("grpo", params={"grpo": settings.model_dump()}, inputs=[], runtime=runtime, root=root) as run:
        train_group(Run(sets, tokenizer, settings).task, settings, CPU, run)
    folder: RunFolder = run.folder
    return folder


def last_samples(folder: RunFolder) -> str:
    rows = list(read_samples(folder.samples))
    return as_text([row for row in rows if row["step"] == rows[-1]["step"]])


@pytest.fixture
def tab(compared: Compared) -> Iterator[Any]:
    with opened(compared.url) as page_of_store:
        yield page_of_store


@pytest.fixture
def comparison(compared: Compared, tab: Any) -> Any:
    """The page as a person comes to it: both runs ticked, then the button."""
    tab.goto(f"{compared.url}{page(compared.experiment)}")
    for name in compared.names:
        tab.get_by_role("row").filter(has_text=name).locator(".ag-checkbox-input").check()
    tab.get_by_role("button", name="Compare").click()
    tab.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    return tab


def in_order(compared: Compared, tab: Any) -> list[int]:
    """Which of the runs stands in which column."""
    header = tab.get_by_role("row").filter(has_text="Run Name:").inner_text()
    return sorted(range(2), key=lambda number: header.index(compared.names[number]))


def shown_metrics(tab: Any) -> dict[str, list[float]]:
    """The table as it is drawn: names in one grid, values in another, line by line."""
    names, values = (tab.get_by_role("grid").nth(number).inner_text().split() for number in range(2))
    assert len(values) == 2 * len(names)
    return {name: [float(each) for each in values[2 * line : 2 * line + 2]] for line, name in enumerate(names)}


def test_rewards_kl_and_advantages_of_two_runs_stand_side_by_side(compared: Compared, comparison: Any, tmp_path: Path) -> None:
    shown: dict[str, list[float]] = {}
    comparison.get_by_text("policy/approx_kl", exact=True).scroll_into_view_if_needed()
    pictures(comparison, tmp_path)("compare")
    while not shown.keys() >= set(METRICS):
        comparison.get_by_role("grid").nth(1).hover()
        before = len(shown)
        shown |= shown_metrics(comparison)
        comparison.mouse.wheel(0, 200)
        comparison.wait_for_timeout(500)
        assert before < len(shown), shown.keys()  # until the end of the table
    runs = in_order(compared, comparison)
    for metric in METRICS:
        # as rounded there: three decimals, small values as 1.234e-5
        assert shown[metric] == pytest.approx([compared.last[run][metric] for run in runs], rel=1e-3, abs=5.1e-4), metric
    for metric in ("policy/approx_kl", "reward/mean"):
        assert shown[metric][0] != shown[metric][1] and all(shown[metric])


@pytest.mark.parametrize("metric", ["reward/mean", "policy/approx_kl", "advantages/std"])
def test_a_metric_there_leads_to_the_curves_of_both(compared: Compared, comparison: Any, metric: str) -> None:
    comparison.get_by_role("link", name=metric, exact=True).click()
    for name in compared.names:
        comparison.get_by_text(f"{name} ({metric})", exact=True).first.wait_for()  # legend
    curves = comparison.locator(".scatterlayer .trace path.js-line")
    assert len({curve.get_attribute("d") for curve in curves.all()}) == 2


def test_samples_of_two_runs_stand_side_by_side(compared: Compared, comparison: Any, tmp_path: Path) -> None:
    comparison.get_by_text("samples.txt", exact=True).click()
    texts = comparison.locator("pre").filter(has_text="samples of step 6")
    texts.nth(1).wait_for()
    comparison.get_by_text("samples.txt", exact=True).scroll_into_view_if_needed()
    pictures(comparison, tmp_path)("compare-samples")
    shown = [texts.nth(column).inner_text() for column in range(2)]
    assert shown[0] != shown[1]
    for text, run in zip(shown, in_order(compared, comparison), strict=True):
        assert text.split() == compared.texts[run].split()
    left, right = (texts.nth(column).bounding_box() for column in range(2))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]


def test_tables_of_samples_of_two_runs_stand_side_by_side(compared: Compared, tab: Any) -> None:
    tab.goto(f"{compared.url}{page(compared.experiment, REINFORCEMENT)}&compareRunsMode=ARTIFACT")
    tab.locator("button", has_text="Group by:").filter(has_text="prompt").wait_for()
    columns = [tab.get_by_role("columnheader").filter(has_text=name) for name in compared.names]  # of completions
    for column in columns:
        column.wait_for()
    left, right = (column.bounding_box() for column in columns)
    assert left["x"] != right["x"] and left["y"] == right["y"]
