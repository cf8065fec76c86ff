"""MLflow's own pages in headless Chromium, of a rebuild with two runs of a stage and an evaluation, and of what was rebuilt here,
where there is one.

With MLFLOW_PAGES=FOLDER the pictures of `python -m pytest -m browser tests/browser/test_mlflow_ui.py` land there: look at them.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fed_runs import Seen, feed, make_workspace, train
from mlflow_pages import opened, pictures, served

from pipeline.tracking import store
from pipeline.tracking.rebuild import Rebuild
from pipeline.tracking.views import REINFORCEMENT, page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shown:
    """A store behind its pages.

    Attributes:
        url: of the server, with a slash.
        said: the first line of `python -m pipeline.tracking.ui`.
    """

    url: str
    said: str
    seen: Seen


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    root = tmp_path_factory.mktemp("workspace")
    make_workspace(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
        rebuild = Rebuild("elsewhere/1/1", "elsewhere", 1, time.time() - 600)
        patch.setattr(Rebuild, "current", classmethod(lambda cls: rebuild))
        for lr in (0.3, 0.6):
            feed(train(root, lr=lr))
            feed(train(root, "eval", lr=lr))
        with served(root, root / "ui.log") as (url, said):
            yield Shown(url, said, Seen(store.EXPERIMENT))


@pytest.fixture
def tab(shown: Shown) -> Iterator[Any]:
    with opened(shown.url) as page_of_store:
        yield page_of_store


@pytest.fixture
def picture(tab: Any, tmp_path: Path) -> Any:
    return pictures(tab, tmp_path)


def test_the_printed_address_opens_the_runs_with_their_headline_metrics(shown: Shown, tab: Any, picture: Any) -> None:
    address = shown.said.partition(": ")[2]
    assert address == f"{shown.url}{page(shown.seen.id)}"
    tab.goto(address)
    rebuild = tab.get_by_role("link", name="rebuild · ")
    rebuild.wait_for()
    for name in ("agent · cispo lr 3e-1 · s7", "agent · cispo lr 6e-1 · s7", "eval"):
        assert tab.get_by_role("link", name=name, exact=True).first.is_visible()  # unfolded
    for header in ("tool/success", "reward/mean", "Models"):
        assert tab.get_by_role("columnheader", name=header).first.is_visible()
    assert tab.get_by_role("link", name="minimind-agent").count() == 2
    picture("runs")


def test_the_list_of_experiments_leads_there_too(shown: Shown, tab: Any, picture: Any) -> None:
    tab.goto(f"{shown.url}#/experiments")
    tab.get_by_text("Model training").click()
    link = tab.get_by_role("link", name=store.EXPERIMENT, exact=True)
    link.wait_for()
    picture("experiments")
    link.click()
    tab.get_by_role("link", name="rebuild · ").wait_for()
    assert "/runs" in tab.url


def test_rewards_of_two_runs_are_drawn_in_one_chart(shown: Shown, tab: Any, picture: Any) -> None:
    tab.goto(f"{shown.url}{page(shown.seen.id, REINFORCEMENT)}&compareRunsMode=CHART")
    chart = tab.locator("[data-testid='experiment-view-compare-runs-card']").filter(has_text="reward/mean").first
    chart.wait_for()
    chart.locator(".scatterlayer .trace").nth(1).wait_for(state="attached")
    first = tab.locator("[data-testid='experiment-view-compare-runs-card']").first
    assert "reward/mean" in first.inner_text()
    picture("charts")


def test_samples_are_a_table_by_prompt(shown: Shown, tab: Any, picture: Any) -> None:
    tab.goto(f"{shown.url}{page(shown.seen.id, REINFORCEMENT)}&compareRunsMode=ARTIFACT")
    tab.locator("button", has_text="Group by:").filter(has_text="prompt").wait_for()
    assert tab.locator("button", has_text="Compare:").filter(has_text="completion").is_visible()
    tab.get_by_text("no tool").nth(1).wait_for()  # what both runs wrote
    picture("samples")


def test_the_best_version_of_a_model_is_marked(shown: Shown, tab: Any, picture: Any) -> None:
    tab.goto(f"{shown.url}#/models/minimind-agent")
    tab.get_by_role("link", name="Version 2").wait_for()
    old, new = (tab.get_by_role("row").filter(has_text=f"Version {number}").inner_text() for number in (1, 2))
    assert "best" in new and "eval.tool_success\n: 0.6" in new
    assert "best" not in old and "eval.tool_success\n: 0.3" in old
    picture("model")


def test_an_episode_is_a_trace_of_turns_and_tool_calls(shown: Shown, tab: Any, picture: Any) -> None:
    trace = shown.seen.traces()[0].info
    address = f"#/experiments/{shown.seen.id}/traces?workflowType=machine_learning&selectedEvaluationId={trace.trace_id}"
    tab.goto(f"{shown.url}{address}")
    spans = [tab.get_by_text(name, exact=True).first for name in ("agent episode", "turn 1", "calculate", "turn 2")]
    for span in spans:
        span.wait_for()
    heights = [span.bounding_box()["y"] for span in spans]
    assert heights == sorted(heights)  # a tree in the order in which it happened
    spans[2].click()
    tab.get_by_text("2*3", exact=False).first.wait_for()
    assert tab.get_by_text("expression", exact=False).first.is_visible()  # what the tool was given, by name
    picture("trace")


def test_a_rebuild_lists_its_stages(shown: Shown, tab: Any, picture: Any) -> None:
    (rebuild,) = shown.seen.rebuilds()
    tab.goto(f"{shown.url}#/experiments/{shown.seen.id}/runs/{rebuild.info.run_id}?workflowType=machine_learning")
    tab.get_by_text("in this rebuild").wait_for()
    tab.get_by_text("Finished").first.wait_for()
    rows = [row.split() for row in tab.get_by_role("row").all_inner_texts()]
    assert [row[:2] for row in rows if row[:1] in (["agent"], ["eval"])] == [["agent", "ran"], ["eval", "ran"]], rows
    picture("rebuild")


@pytest.mark.skipif(not (ROOT / "mlflow.db").is_file(), reason="nothing was rebuilt in this folder: `make repro`")
def test_the_rebuild_of_this_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs with their names, rewards of three stages in one chart, samples by prompt, and models with their best version."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{ROOT / 'mlflow.db'}")
    seen = Seen(store.EXPERIMENT)
    newest = [max((ROOT / ".runs" / stage).glob("*/*/run.json"), key=os.path.getmtime) for stage in ("ppo", "grpo", "agent")]
    with served(ROOT, tmp_path / "ui.log") as (url, _), opened(url) as tab:
        tab.goto(f"{url}{page(seen.id)}")
        for path in newest:
            tab.get_by_role("link", name=json.loads(path.read_text())["name"], exact=True).first.wait_for()
        tab.goto(f"{url}{page(seen.id, REINFORCEMENT)}&compareRunsMode=CHART")
        chart = tab.locator("[data-testid='experiment-view-compare-runs-card']").filter(has_text="reward/mean").first
        traces = chart.locator(".scatterlayer .trace")
        traces.nth(2).wait_for(state="attached")
        assert traces.count() >= len(newest)
        tab.goto(f"{url}{page(seen.id, REINFORCEMENT)}&compareRunsMode=ARTIFACT")
        tab.locator("button", has_text="Group by:").filter(has_text="prompt").wait_for()
        tab.goto(f"{url}#/models/minimind-grpo")
        tab.get_by_text("best").first.wait_for()
        assert len([row for row in tab.get_by_role("row").all_inner_texts() if "best" in row]) == 1  # of all versions
        tab.screenshot(path=Path(os.environ.get("MLFLOW_PAGES") or tmp_path) / "mlflow-own-model.png")
