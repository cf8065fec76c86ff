"""The HTML pages in headless Chromium: no errors, no requests, nothing wider than the window."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import HOSTILE, answers, curves, origin, write_run

from pipeline.pages.compare_page import compare_page
from pipeline.pages.page import write_page
from pipeline.pages.whence_page import whence_page
from pipeline.reading.compare import compare

pytestmark = pytest.mark.browser

WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # of the extra `test`; tests without a browser do without it

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both pages, with long names, hostile texts, many metrics and an unbroken line."""
    home = tmp_path_factory.mktemp("home")
    for number in (1, 2, 3):
        samples = answers(number, [1, 20]) + [{"step": 20, "prompt": "x" * 500, "completion": "y" * 3000 + str(number)}]
        note = {"note": f"{HOSTILE} {number}", "path": "external/" + "long_name" * 30 + str(number)}
        write_run(home, number, params=note, metrics=curves(number, 40, 1.0 + number), samples=samples)
    write_page(home / "compare.html", compare_page(compare(home, home, ["mlflow1", "mlflow2", "mlflow3"])))
    write_page(home / "whence.html", whence_page(origin(".runs/grpo/key1/1"), home))
    return {name: home / f"{name}.html" for name in ("compare", "whence")}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["compare", "whence"])
def test_a_page_opens_clean(chromium: Any, pages: dict[str, Path], name: str, scheme: str, width: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[name].as_uri())
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.locator("svg.chart path.line").count() > 5 and page.locator("script, img").count() == 0
    paper, ink = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert (_lightness(paper) > _lightness(ink)) == (scheme == "light")
    widths = page.evaluate("[...document.querySelectorAll('figure')].map(each => each.getBoundingClientRect().width)")
    assert min(widths) > 250  # its labels can be read
    context.close()


def _lightness(colour: str) -> int:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
