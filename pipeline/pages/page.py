"""Self-contained HTML: no scripts, nothing loaded from elsewhere, every text escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.errors import PipelineError
from pipeline.reading.wording import shown


def render(template: str, **values: Any) -> str:
    """A page.

    Args:
        template: the name of a file beside this one.
        values: what it shows; texts may hold anything.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shown"] = shown
    return environment.get_template(template).render(values)


def write_page(path: Path, page: str) -> str:
    """Writes it; a line that says so.

    Raises:
        PipelineError: the path cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise PipelineError(f"{path}: cannot be written: {error.strerror}") from None
    return f"{path}: written, {len(page.encode(errors='replace')) / 1024:.0f} KiB, opens in any browser"
