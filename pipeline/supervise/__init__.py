"""A stage's process: stop signals, the death of its parent, exclusive locks, and exit codes.

| exit code | meaning |
| --- | --- |
| 0 | finished |
| 1 | a programming mistake (traceback), or something lies in the way |
| 2 - 8 | a `PipelineError`: parameters, data, numerics or the guard, memory, held elsewhere, worse than the parent, disk full |
| 128 + n | stopped by signal n after saving what there was; a second signal, and for all but SIGINT 25 s, stop at once |
"""

from pipeline.supervise.exits import exit_on_error, explain, lasting_stderr, reason
from pipeline.supervise.locks import hold, hold_unless, is_held
from pipeline.supervise.signals import Stopped, StopSignals, follow_parent, signal_name

__all__ = [
    "StopSignals",
    "Stopped",
    "exit_on_error",
    "explain",
    "follow_parent",
    "hold",
    "hold_unless",
    "is_held",
    "lasting_stderr",
    "reason",
    "signal_name",
]
