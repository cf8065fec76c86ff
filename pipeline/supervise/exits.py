"""How a stage's process ends: exit codes, and one readable line per fault."""

import errno
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, TextIO, cast

from pipeline.errors import DiskSpaceError, OutOfMemoryError, PipelineError
from pipeline.masking import masked
from pipeline.supervise.signals import Stopped
from pipeline.terminal import bear_any_locale, say

_TRACEBACK = "Traceback (most recent call last)"


def explain(error: BaseException, memory_hint: str = "use a smaller batch") -> tuple[int, list[str]]:
    """The exit code that stands for `error`, and the lines to print: readable for what a user can mend, else a traceback."""
    match error:
        case PipelineError():
            return error.exit_code, list(error.lines)
        case Stopped():
            return 128 + error.signum, [str(error)]
        case KeyboardInterrupt():
            return 128 + signal.SIGINT, ["interrupted"]
        case SystemExit():
            return (error.code if isinstance(error.code, int) else int(error.code is not None)), [f"exit {error.code}"]
    if (full := _full_disk(error)) is not None:
        place = full.filename or "the disk"
        advice = "free some (`python -m pipeline gc` helps) and run the same command: what was saved is kept"
        return DiskSpaceError.exit_code, [f"{place}: no space left; {advice}"]
    if _is_out_of_memory(error):
        said = (str(error).splitlines() or ["host memory"])[0]
        return OutOfMemoryError.exit_code, [f"out of memory ({said[:200]}): {memory_hint}"]
    return 1, masked("".join(traceback.format_exception(error))).splitlines()


def reason(error: BaseException, memory_hint: str = "use a smaller batch") -> tuple[int, str]:
    """The exit code that stands for `error`, and why in one line: the first fault, or of a traceback what was raised."""
    code, lines = explain(error, memory_hint)
    if lines[0].startswith(_TRACEBACK):
        return code, masked("".join(traceback.format_exception_only(error))).splitlines()[0]
    return code, lines[0]


def _full_disk(error: BaseException | None) -> OSError | None:
    """The error that says so, which `torch.save` hides behind one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    signs = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


@contextmanager
def exit_on_error(name: str, memory_hint: str = "use a smaller batch") -> Iterator[None]:
    """Ends the process with the exit code of what the block raises, after one readable line per fault on stderr.

    Args:
        name: printed before the lines: the stage.
        memory_hint: what to lower when memory runs out.
    """
    bear_any_locale()
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # the process ends here, whatever it was
        code, lines = explain(error, memory_hint)
        for line in lines:
            say(line if len(lines) > 1 and code == 1 else f"{name}: {line}")
        raise SystemExit(code) from error


class _LastingStream:
    """A text stream whose reader may go away: from then on what is written is lost, and nobody is told."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """Keeps a closed terminal or a broken pipe from ending the block: training, and above all its last save, go on."""
    with redirect_stderr(cast(TextIO, _LastingStream(sys.stderr))):
        yield
