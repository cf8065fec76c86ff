"""The HTML pages as text: nothing that was generated becomes markup, nothing is loaded; drawings hang together."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import HOSTILE, answers, curves, origin, write_run
from typer.testing import CliRunner

from pipeline.__main__ import app
from pipeline.lineage.whence import Origin, Step
from pipeline.pages.chart import MAX_POINTS, chart, charts
from pipeline.pages.compare_page import compare_page
from pipeline.pages.lineage import draw
from pipeline.pages.whence_page import whence_page
from pipeline.reading.compare import compare
from pipeline.tracking.records import Series


class Page(HTMLParser):
    """Tags, attributes that would load or run something, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "srcset") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(params=["compare", "whence"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    for number in (1, 2):
        note = {"note": f"{HOSTILE} {number}", "lr": float(number)}
        write_run(tmp_path, number, params=note, metrics=curves(number, 20, 1.0), samples=answers(number, [1, 20]))
    if request.param == "compare":
        return compare_page(compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]))
    return whence_page(origin(".runs/grpo/key1/1", file=HOSTILE), tmp_path)


def test_hostile_text_stays_text(page: str) -> None:
    read = Page(page)
    assert not read.tags & {"script", "img", "iframe", "object", "embed"} and read.loads == []
    assert read.text.count(HOSTILE) >= 3
    assert "question 0 </script>" in read.text


def test_pages_load_nothing(page: str) -> None:
    assert not re.search(r"url\((?!#head\))|@import|<link[^>]+href=\"(?!data:)", page)
    assert re.findall(r'href="(?!data:)([^"]+)"', page) == ["http://127.0.0.1:5000/#/runs/mlflow1"] + (
        ["http://127.0.0.1:5000/#/runs/mlflow2"] if "mlflow2" in page else []
    )


def test_answers_part_where_they_differ(tmp_path: Path) -> None:
    for number, text in ((1, "the same, then <b>one"), (2, "the same, then <i>two")):
        rows = [("p", text), ("p", text), ("ends", text[: 13 + number]), ("equal", "as it is")]
        samples = [{"step": 1, "prompt": prompt, "completion": completion} for prompt, completion in rows]
        write_run(tmp_path, number, samples=samples)
    html = compare_page(compare(tmp_path, tmp_path, ["mlflow1", "mlflow2"]))
    assert 'the same, then &lt;<mark>b</mark><span class="parts">&gt;one</span>' in html
    assert 'the same, then &lt;<mark>i</mark><span class="parts">&gt;two</span>' in html
    assert 'the same, then<mark>∎</mark><span class="parts"></span>' in html and html.count(">as it is</div>") == 2
    assert html.count('<div class="text prompt">') == 3  # a prompt that was sampled twice stands once


def test_pages_without_run_folders_are_whole(tmp_path: Path) -> None:
    found = origin("")
    gone = Step("model", found.steps[-1].params, found.steps[-1].deps, found.steps[-1].outs, None)
    html = whence_page(Origin("f", "m" * 32, "model.pth", {}, True, [], [*found.steps[:-1], gone], {}, {}), tmp_path)
    assert "there is no folder of it here" in html and "the workspace" in html and "<h2>Curves" not in html


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(app, ["compare", "grpo", "mlflow1", "--html", "absent/page.html"])
    assert str(failed.exception) == "absent/page.html: cannot be written: No such file or directory"
    assert CliRunner().invoke(app, ["compare", "grpo", "mlflow1", "--html", "page.html"]).exit_code == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# Charts


def test_a_line_runs_from_corner_to_corner() -> None:
    drawn = chart("Loss", "train/loss", [Series([0, 10], [1.0, 3.0])])
    (line,) = drawn.lines
    across, down = zip(*line.points, strict=True)
    assert across == (52.0, 388.0) and down[0] > down[1] > 30  # SVG's y grows downwards; the range has 5 % to spare
    assert drawn.x_ticks[0] == (52.0, "0") and drawn.x_ticks[-1] == (388.0, "10")
    assert [label for _, label in drawn.y_ticks] == ["1", "2", "3"]


def test_long_curves_are_means_of_neighbours() -> None:
    """1000 steps in windows of 4: as many points as fit, the last one at the last step."""
    drawn = chart("Loss", "train/loss", [Series(list(range(1, 1001)), [float(step % 2) for step in range(1000)])])
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn.lines[0].path)
    assert len(points) == 250 <= MAX_POINTS and len({y for _, y in points}) == 1 and float(points[-1][0]) == 388.0


def test_flat_single_and_missing_curves_are_drawn() -> None:
    drawn = chart("Loss", "x", [Series([5], [2.0]), None, Series([5, 6], [2.0, 2.0])])
    assert [line.colour for line in drawn.lines] == [0, 2] and "nan" not in str(drawn)


def test_charts_are_grouped_and_constant_ones_left_out() -> None:
    moving = Series([1, 2], [0.0, 1.0])
    found = charts(
        [
            {
                "time/step_s": moving,
                "policy/ref_kl": moving,
                "val/loss_start": Series([0], [1.0]),
                "stop/context": Series([1, 2], [0.0, 0.0]),
            },
            {"reward/mean": moving},
        ]
    )
    assert [(each.group, each.title) for each in found] == [
        ("Reward", "reward/mean"),
        ("KL", "policy/ref_kl"),
        ("Further metrics", "time/step_s"),
    ]


# Lineage


def test_boxes_stand_apart_and_arrows_point_down() -> None:
    drawing = draw(origin(""))
    assert {box.title for box in drawing.boxes} == {"raw", "data", "late", "tokenizer", "encode", "model"}
    for one, other in itertools.combinations(drawing.boxes, 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y, (one, other)
    assert all(
        0 <= box.x and box.x + box.width <= drawing.width and box.y + box.height <= drawing.height for box in drawing.boxes
    )
    top, bottom = (min(drawing.boxes, key=lambda box: box.y), max(drawing.boxes, key=lambda box: box.y))
    assert (top.title, top.kind, bottom.title, bottom.kind) == ("raw", "source", "model", "file")


def test_arrows_that_follow_from_others_are_left_out() -> None:
    """raw -> data -> tokenizer -> encode -> model, raw -> late -> model: 6 arrows for 9 reads; one passes two layers."""
    arrows = draw(origin("")).arrows
    assert sum(ends for _, ends in arrows) == 6 and len(arrows) == 8
