"""What a run's page shows beyond metrics, params and samples. All of it can be done again at any time."""

from pipeline.tracking.datasets import log_datasets
from pipeline.tracking.episodes import AGENT, log_episodes
from pipeline.tracking.fed_run import EVALUATION, FedRun
from pipeline.tracking.models import judge_models, log_model
from pipeline.tracking.rebuild_runs import enter, leave


def begin(fed: FedRun, *, live: bool) -> None:
    """For a run that is there: its rebuild, and the data that it reads.

    Args:
        live: whether its trainer lives.

    Raises:
        TRACKER_FAULTS: not all is done.
    """
    enter(fed, live=live)
    log_datasets(fed)


def end(fed: FedRun, *, complete: bool) -> None:
    """For a run that has been closed.

    Args:
        complete: whether MLflow has all its records.

    Raises:
        TRACKER_FAULTS: not all is done.
    """
    if complete and fed.stage == AGENT:
        log_episodes(fed)
    if complete and fed.finished:
        log_model(fed)
        if fed.stage == EVALUATION:
            judge_models(fed)
    leave(fed)
