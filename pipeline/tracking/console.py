"""Progress on a terminal: a bar with the figures that matter and the time left; plain lines elsewhere."""

import time
from datetime import timedelta
from typing import Literal, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.terminal import escaped, say

Mode = Literal["auto", "on", "off"]
LINE_EVERY_S = 30.0
"""Between lines that say how far a stage is, where there is no bar."""


class ProgressBar:
    """A bar over optimizer steps; use as a context manager.

    Args:
        title: the stage.
        total: steps of the whole run.
        mode: `auto` shows the bar on a terminal only, `off` silences `note` too.
        done: steps done before, when the run resumes.
    """

    def __init__(self, title: str, total: int, *, mode: Mode = "auto", done: int = 0) -> None:
        console = Console(stderr=True)
        self._quiet = mode == "off"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=mode == "off" or (mode == "auto" and not console.is_terminal),
        )
        self._title, self._total, self._done = title, total, done
        self._began = self._told = time.monotonic()
        self._task = self._bar.add_task(title, total=total, completed=done, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, **figures: float) -> None:
        """Moves the bar to `step` and shows figures such as `loss=..., reward=..., tokens_per_s=...`.

        Without a bar, as in a file or in the log of a flow, it prints a line now and then.
        """
        self._bar.update(self._task, completed=step, figures=_figures(figures))
        now = time.monotonic()
        if self._bar.disable and not self._quiet and now - self._told >= LINE_EVERY_S and step > self._done:
            self._told = now
            left = timedelta(seconds=round((now - self._began) / (step - self._done) * (self._total - step)))
            line = f"{self._title}: step {step} of {self._total}, {left} left, {_figures(figures)}"
            say(line)

    def note(self, step: int, **figures: float) -> None:
        """Prints one lasting line, such as a validation result; on a terminal it appears above the bar."""
        if self._quiet:
            return
        line = f"{self._title}: step {step} {_figures(figures)}"
        if self._bar.disable:
            say(line)
        else:
            self._bar.console.print(escaped(line), highlight=False, markup=False)


def _figures(figures: dict[str, float]) -> str:
    return " ".join(f"{name.replace('_per_s', '/s')} {_short(value)}" for name, value in figures.items())


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
