"""One trainer per GPU, across all flow runs of a Prefect server.

The server counts slots of the concurrency limit `gpu`; `make flows` sets it to `runtime.gpus`. A stage holds as many as it has
ranks while it runs. Whoever is killed holds them until the lease runs out. Without the limit nothing is counted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import httpx
from prefect import get_client, get_run_logger
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.asyncio import AcquireConcurrencySlotTimeoutError, ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.runtime import task_run

from pipeline.errors import ParamsError
from pipeline.params import load_params

TAG = "gpu"
_LIMIT = f"tag:{TAG}"  # limits with this prefix are the ones whose holders the API tells
TRAINING = frozenset({"pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent"})
LEASE_S = 60.0  # the shortest that Prefect allows
POLL_S = 3.0
ASK_S = 60.0  # for an answer of the API, before training goes on without


@contextmanager
def gpu_slots(stage: str, root: Path, stop: Event) -> Iterator[None]:
    """Holds a slot per GPU that the stage will use during the block; waits for them, and says in the log who has them.

    When the API stays away, the block runs without slots: a trainer too many on a GPU is a smaller loss than none. Needs to
    be called in a task run.

    Args:
        stage: a stage's name; those without a model hold nothing.
        root: the repository whose params.yaml says how many ranks train.
        stop: ends the waiting when it is set.

    Raises:
        ParamsError: params.yaml is wrong, or asks for more ranks than there are slots.
    """
    wanted = _slots(stage, root)
    held = ExitStack()
    if wanted:
        try:
            _occupy(held, stage, wanted, stop)
        except (httpx.HTTPError, ConcurrencySlotAcquisitionError, AcquireConcurrencySlotTimeoutError) as error:
            get_run_logger().warning("The Prefect API does not give out GPU slots (%s); %s runs without one", error, stage)
    try:
        yield
    finally:
        try:
            held.close()
        except httpx.HTTPError as error:
            get_run_logger().warning("The GPU slot could not be given back (%s); it is free in %.0f s", error, LEASE_S)


def _slots(stage: str, root: Path) -> int:
    if stage == "eval":
        return 1
    return load_params(root / "params.yaml").runtime.ranks if stage in TRAINING else 0


def _occupy(held: ExitStack, stage: str, wanted: int, stop: Event) -> None:
    told = ""
    while not stop.is_set() and (limit := _read_limit()) is not None:
        if wanted > limit.limit:
            raise ParamsError(
                f"params.yaml: runtime.ranks={wanted}: {stage} needs a GPU per rank, and runtime.gpus was "
                f"{limit.limit} when `make flows` started"
            )
        # Asked first: Prefect logs an error for every refusal.
        if wanted <= limit.limit - limit.active_slots and _is_given(held, wanted):
            return
        if (said := f"{_holders()} (runtime.gpus={limit.limit})") != told:
            get_run_logger().info("%s waits for a GPU in use by %s", stage, said)
            told = said
        stop.wait(POLL_S)


def _is_given(held: ExitStack, wanted: int) -> bool:
    """Whether there were as many slots; they are held until `held` closes."""
    slots = concurrency(
        _LIMIT,
        wanted,
        timeout_seconds=ASK_S,
        max_retries=0,
        lease_duration=LEASE_S,
        holder=ConcurrencyLeaseHolder(type="task_run", id=task_run.id),
        raise_on_lease_renewal_failure=False,
    )
    try:
        held.enter_context(slots)
    except ConcurrencySlotAcquisitionError as error:
        cause = error.__cause__
        if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED:
            return False  # another run was faster
        raise
    return True


def _read_limit() -> GlobalConcurrencyLimitResponse | None:
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(_LIMIT)
        except ObjectNotFound:
            return None


def _holders() -> str:
    """The stages that hold slots, with their flow runs."""
    found = []
    with get_client(sync_client=True) as client:
        for identifier in dict.fromkeys(client.read_concurrency_limit_by_tag(TAG).active_slots):
            try:
                holder = client.read_task_run(identifier)
                flow = client.read_flow_run(holder.flow_run_id) if holder.flow_run_id else None
                found.append(f"{holder.name} of flow run {flow.name} ({flow.id})" if flow else holder.name)
            except ObjectNotFound:
                found.append(f"task run {identifier}")
    return ", ".join(found) or "a run that was killed, until its lease ends"


def set_limit(gpus: int | None) -> None:
    """Makes the server give out `gpus` slots, or stop counting when None.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    with get_client(sync_client=True) as client:
        if gpus is not None:
            client.create_concurrency_limit(TAG, gpus)  # sets it, too, where it exists
            return
        try:
            client.delete_concurrency_limit_by_tag(TAG)
        except ObjectNotFound:
            return
