"""Errors that a user can mend: one line each, with the exit code that the process ends with.

Programming mistakes stay ordinary Python exceptions and end with a traceback.
"""

from pipeline.masking import masked


class PipelineError(Exception):
    """A failure with a one-line explanation; `lines` may hold several independent faults. Passwords in addresses are masked."""

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        lines = tuple(map(masked, lines))
        super().__init__("\n".join(lines))
        self.lines = lines


class ParamsError(PipelineError):
    """params.yaml or a command-line value is wrong."""

    exit_code = 2


class DataError(PipelineError):
    """An input file is malformed, too many rows were dropped, or a file does not fit another one."""

    exit_code = 3


class NumericsError(PipelineError):
    """Loss or gradients were not finite for too many steps in a row."""

    exit_code = 4


class GuardError(PipelineError):
    """`runtime.guard: stop` found a problem in what a run measured."""

    exit_code = 4


class OutOfMemoryError(PipelineError):
    """The device ran out of memory; the line names the parameter to lower."""

    exit_code = 5


class HeldError(PipelineError):
    """Another live process trains the same outputs."""

    exit_code = 6


class GateError(PipelineError):
    """A model is worse than the one it started from, and `eval.gate` forbids that."""

    exit_code = 7


class DiskSpaceError(PipelineError):
    """The disk has no room for what a stage writes."""

    exit_code = 8
