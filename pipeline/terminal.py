"""Text for a terminal that others wrote: models, names of files, messages of programs. None of it may move the cursor."""

import re
import sys
from io import TextIOWrapper

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal acts on, newline and tab left out, and what turns the direction of writing."""


def escaped(text: object) -> str:
    """The text with control characters as JSON and Python write them, such as `\\u001b`."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def say(line: object) -> None:
    """Prints a line on standard error, at once and escaped."""
    print(escaped(line), file=sys.stderr, flush=True)


def show(line: object) -> None:
    """Prints a line on standard output, at once and escaped."""
    print(escaped(line), flush=True)


def bear_any_locale() -> None:
    """Makes standard output and error show what the locale has no character for as its escape, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
