"""A rich console for what others wrote."""

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from pipeline.terminal import escaped


class EscapingConsole(Console):
    """Shows control characters escaped: rich itself lets most of them through to the terminal."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        shown = (each if each.control else Segment(escaped(each.text), each.style) for each in buffer)
        return super()._render_buffer(shown)
