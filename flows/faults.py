"""What a flow's log shows: faults whose message says all are a line, others have their traceback, and no text moves a cursor."""

import logging

from pipeline.errors import PipelineError
from pipeline.terminal import escaped


class FlowFault(RuntimeError):
    """A flow, or a stage in it, did not reach its end; the message has the reasons."""


class _Lines(logging.Filter):
    """Takes the traceback of such a fault away, and Prefect's second record of the same one; escapes what stages have printed."""

    _last: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escaped(record.getMessage()), ()
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, PipelineError | FlowFault):
            again, self._last = error is self._last, error
            record.exc_info = None
            return not again
        return True


_LINES = _Lines()


def log_faults_as_lines() -> None:
    """For the flow and task runs of this process, until it ends: Prefect logs a flow's fault once more when that has ended."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_LINES)
