"""Episodes of the agent as MLflow traces: a conversation with its turns and tool calls as spans, every few steps of the run.

They are read from samples.jsonl, which holds what was sampled as text. What a single turn took is not recorded, so the spans say
the order of things and not their length. A trace's id is a function of run and step: sent twice it is there once.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow.entities import Span, SpanType, TraceInfo, TraceState
from mlflow.entities.trace_location import TraceLocation
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from pipeline.text.turns import ToolCall, parse_turn
from pipeline.tracking.fed_run import FedRun
from pipeline.tracking.records import Record

MAX_EPISODES = 20
AGENT = "agent"
PREVIEW = 200
_NS_PER_MS = 10**6
_BLOCK = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|<\|im_start\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_THINKS, _THINKS_NOT = "<think>\n", "<think>\n\n</think>\n\n"  # how a generation prompt ends

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote, and what its tool calls returned."""

    thinking: str | None
    answer: str
    calls: list[ToolCall]
    results: list[str]


def log_episodes(fed: FedRun) -> None:
    """Sends an episode of every N-th step that has samples, at most `MAX_EPISODES` of a run, and none twice.

    Raises:
        TRACKER_FAULTS: not all are sent.
    """
    record = Record(fed.folder)
    busiest: dict[int, dict[str, Any]] = {}  # of every step the episode with the most tool results
    for row in record.samples():
        if row["step"] not in busiest or _results(row) > _results(busiest[row["step"]]):
            busiest[row["step"]] = row
    chosen = list(busiest.values())[:: -(-len(busiest) // MAX_EPISODES) or 1]
    if not chosen:
        return
    client = TracingClient(fed.client.tracking_uri)
    found = fed.client.search_traces(locations=[fed.experiment_id], run_id=fed.id, include_spans=False)
    there = {trace.info.trace_id for trace in found}
    ended_s = {line["step"]: line["time_s"] for line in record.lines()}
    for row in chosen:
        info, spans = _trace(fed, row, ended_s.get(row["step"], record.started_s))
        if info.trace_id not in there:
            client.log_spans(fed.experiment_id, spans)
            client.start_trace(info)  # last: what a search finds is whole


def _results(row: Mapping[str, Any]) -> int:
    return str(row["completion"]).count("<tool_response>")


def read_episode(prompt: str, completion: str) -> tuple[list[Message], list[Turn]]:
    """The messages before the policy's first turn, and its turns.

    Args:
        prompt: rendered, up to and with the generation prompt.
        completion: everything behind it, what the tools returned included.
    """
    blocks = _BLOCK.findall(prompt + completion)
    given = len(_BLOCK.findall(prompt)) - 1  # the last is the first turn's beginning
    turns: list[Turn] = []
    for role, text in blocks[max(0, given) :]:
        if role == "assistant":
            turns.append(_turn(text))
        elif turns:
            turns[-1].results.extend(_RESULT.findall(text))
    return [{"role": role, "content": text} for role, text in blocks[: max(0, given)]], turns


def _turn(text: str) -> Turn:
    asked_not_to = text.startswith(_THINKS_NOT)
    opened = text.startswith(_THINKS) and not asked_not_to
    sampled = text.removeprefix(_THINKS_NOT) if asked_not_to else text.removeprefix(_THINKS)
    parsed = parse_turn(sampled, open_thinking=opened)
    return Turn(parsed.thinking, parsed.answer, parsed.calls, [])


def _trace(fed: FedRun, row: Mapping[str, Any], time_s: float) -> tuple[TraceInfo, list[Span]]:
    trace_id = "tr-" + hashlib.md5(f"{fed.uid}/{row['step']}".encode()).hexdigest()
    messages, turns = read_episode(row["prompt"], row["completion"])
    spans = list(_spans(trace_id, row, messages, turns, round(time_s * 1e9)))
    question = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    terms = {key: value for key, value in row.items() if isinstance(value, int | float)}
    info = TraceInfo(
        trace_id,
        TraceLocation.from_experiment_id(fed.experiment_id),
        request_time=round(time_s * 1000),
        state=TraceState.OK,
        request_preview=question[:PREVIEW],
        response_preview=(turns[-1].answer if turns else "")[:PREVIEW],
        execution_duration=0,
        trace_metadata={TraceMetadataKey.SOURCE_RUN: fed.id, "run.uid": fed.uid},
        tags={TraceTagKey.TRACE_NAME: f"{fed.stage} · step {row['step']}", "stop": str(row.get("stop")), **_short(terms)},
    )
    return info, spans


def _short(values: Mapping[str, float]) -> dict[str, str]:
    return {key: f"{value:.4g}" for key, value in values.items()}


def _spans(
    trace_id: str, row: Mapping[str, Any], messages: Sequence[Message], turns: Sequence[Turn], time_ns: int
) -> Iterator[Span]:
    """The episode, and below it its turns and their tool calls in order."""
    root, number = _Ids(trace_id, 1), 1
    scores = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    yield _span(
        root, None, f"{AGENT} episode", SpanType.AGENT, time_ns, {"messages": messages}, turns[-1].answer if turns else "", scores
    )
    said = list(messages)
    for index, turn in enumerate(turns, 1):
        number += 1
        own = _Ids(trace_id, number)
        reply = {"role": "assistant", "content": turn.answer, **({"reasoning": turn.thinking} if turn.thinking else {})}
        yield _span(own, root, f"turn {index}", SpanType.LLM, time_ns + number * _NS_PER_MS, {"messages": list(said)}, reply)
        said += [reply, *({"role": "tool", "content": result} for result in turn.results)]
        for call, result in zip(turn.calls, [*turn.results, *[None] * len(turn.calls)], strict=False):
            number += 1
            called = _Ids(trace_id, number)
            yield _span(called, own, call.name, SpanType.TOOL, time_ns + number * _NS_PER_MS, call.arguments, result)


@dataclass(frozen=True, slots=True)
class _Ids:
    trace: str
    number: int

    @property
    def hex(self) -> str:
        return f"{self.number:016x}"


def _span(
    ids: _Ids,
    parent: _Ids | None,
    name: str,
    kind: str,
    time_ns: int,
    inputs: Any,
    outputs: Any,
    more: Mapping[str, Any] | None = None,
) -> Span:
    attributes = {
        SpanAttributeKey.REQUEST_ID: ids.trace,
        SpanAttributeKey.SPAN_TYPE: kind,
        SpanAttributeKey.INPUTS: inputs,
        SpanAttributeKey.OUTPUTS: outputs,
        **(more or {}),
    }
    return Span.from_dict_v2(
        {
            "name": name,
            "context": {"trace_id": ids.trace.removeprefix("tr-"), "span_id": ids.hex},
            "parent_id": parent.hex if parent else None,
            "start_time": time_ns,
            "end_time": time_ns,
            "status_code": "OK",
            "status_message": "",
            "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
            "events": [],
        }
    )
