"""What the Prefect server itself does for flow runs that break down: `python -m flows.automations` creates or updates it.

A flow run whose process died is run again, with its own parameters. One whose worker died with it cannot report anything; it is
marked as crashed when its heartbeats stay away, and then run again as well. Both hold for every deployment of the flow.

A server that was started again in between holds back the crash of a run that had begun less than five minutes before it: Prefect
waits a quarter of an hour for the event of that begin, and only then starts the run again.
"""

from datetime import timedelta
from typing import Annotated

from prefect import get_client
from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture, RunDeployment
from prefect.client.schemas.objects import StateType
from pydantic import Field

FLOW = "minimind"
SILENT_S = 90
"""Without a heartbeat for this long a flow run counts as crashed: three times `flows.heartbeat_frequency` of prefect.toml."""
Restarts = Annotated[int, Field(ge=0, le=3, description="How often this run has crashed and been started again.")]
"""A parameter of every flow with deployments. Prefect refuses a run whose count leaves the range: so a flow that crashes every
time ends."""

# All parameters at once, whatever the flow has. A run that was being cancelled gets a count that is refused.
_SAME_PARAMETERS = (
    "{{ dict(flow_run.parameters, restarts=flow_run.parameters.get('restarts', 0)"
    " + (99 if event.payload['intended']['from'] in ('CANCELLING', 'CANCELLED') else 1)) | tojson }}"
)
_OURS: dict[str, str | list[str]] = {"prefect.resource.role": "flow", "prefect.resource.name": FLOW}
_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", "TimedOut")}


def automations() -> list[AutomationCore]:
    """Both automations, as they should be on the server."""
    return [
        AutomationCore(
            name=f"{FLOW}: start crashed runs again",
            description="A new run of the same deployment with the same parameters; a few times, and never after a cancel.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Crashed"},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=_OURS,
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[
                RunDeployment(
                    source="inferred",
                    deployment_id=None,
                    parameters={"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": _SAME_PARAMETERS}},
                    job_variables=None,
                )
            ],
        ),
        AutomationCore(
            name=f"{FLOW}: runs that fell silent have crashed",
            description="The process and its worker were killed, or the machine is gone.",
            trigger=EventTrigger(
                after={_HEARTBEAT},
                expect={_HEARTBEAT, *_ENDS},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=_OURS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=SILENT_S),
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED, name="Crashed", message=f"No heartbeat for {SILENT_S} s.", force=False
                )
            ],
        ),
    ]


def ensure_automations() -> None:
    """Creates or updates them on the server of `PREFECT_API_URL`; what a user added or switched off beside them is left alone.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    with get_client(sync_client=True) as client:
        for automation in automations():
            known = next(iter(client.read_automations_by_name(automation.name)), None)
            if known is None:
                client.create_automation(automation)
                continue
            automation.enabled = known.enabled
            # An update makes the server forget whose heartbeats it is waiting for.
            if AutomationCore(**known.model_dump()).model_dump() != automation.model_dump():
                client.update_automation(known.id, automation)


if __name__ == "__main__":
    ensure_automations()
