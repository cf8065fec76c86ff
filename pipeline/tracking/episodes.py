"""Episodes of the agent as MLflow traces: a conversation with its turns and tool calls as spans, every few steps of the run.

They are read from samples.jsonl, which holds what was sampled as text. All episodes of a step are sampled together, and only what
that took is recorded: an episode's span is that time, which its turns and calls share by the number of their characters. Where
nothing is recorded a character takes a millisecond. The span's attribute `times` says which of the two it is.

A trace's id is a function of run and step: sent twice it is there once.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
MEASURED = "the step's sampling as measured, of all its episodes together; turns and calls share it by their characters"
ASSUMED = "not measured: a millisecond per character"
_BLOCK = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|<\|im_start\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_THINKS, _THINKS_NOT = "<think>\n", "<think>\n\n</think>\n\n"  # how a generation prompt ends

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote, in how many characters, and what its tool calls returned."""

    length: int
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
    logged = {line["step"]: line for line in record.lines()}
    for row in chosen:
        info, spans = _trace(fed, row, logged.get(row["step"], {"time_s": record.started_s, "metrics": {}}))
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
    return Turn(len(sampled), parsed.thinking, parsed.answer, parsed.calls, [])


def _trace(fed: FedRun, row: Mapping[str, Any], line: Mapping[str, Any]) -> tuple[TraceInfo, list[Span]]:
    trace_id = "tr-" + hashlib.md5(f"{fed.uid}/{row['step']}".encode()).hexdigest()
    messages, turns = read_episode(row["prompt"], row["completion"])
    clock = _Clock.of(line, sum(_length(turn) for turn in turns))
    begin_ns, end_ns = clock.whole
    question = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    terms = {key: value for key, value in row.items() if isinstance(value, int | float)}
    info = TraceInfo(
        trace_id,
        TraceLocation.from_experiment_id(fed.experiment_id),
        request_time=begin_ns // 10**6,
        state=TraceState.OK,
        request_preview=question[:PREVIEW],
        response_preview=(turns[-1].answer if turns else "")[:PREVIEW],
        execution_duration=round((end_ns - begin_ns) / 1e6),
        trace_metadata={TraceMetadataKey.SOURCE_RUN: fed.id, "run.uid": fed.uid},
        tags={TraceTagKey.TRACE_NAME: f"{fed.stage} · step {row['step']}", "stop": str(row.get("stop")), **_short(terms)},
    )
    return info, _spans(trace_id, row, messages, turns, clock)


def _short(values: Mapping[str, float]) -> dict[str, str]:
    return {key: f"{value:.4g}" for key, value in values.items()}


def _spans(
    trace_id: str, row: Mapping[str, Any], messages: Sequence[Message], turns: Sequence[Turn], clock: "_Clock"
) -> list[Span]:
    """The episode, and below it its turns and their tool calls in order."""
    scores = {key: value for key, value in row.items() if key not in ("prompt", "completion")} | {"times": clock.times}
    answer = turns[-1].answer if turns else ""
    root = _Ids(trace_id, 1)
    spans = [_span(root, None, f"{AGENT} episode", SpanType.AGENT, clock.whole, {"messages": messages}, answer, scores)]
    said, place = list(messages), 0
    for index, turn in enumerate(turns, 1):
        own = _Ids(trace_id, len(spans) + 1)
        reply = {"role": "assistant", "content": turn.answer, **({"reasoning": turn.thinking} if turn.thinking else {})}
        time = clock.of_characters(place + 1, place + _length(turn))
        spans.append(_span(own, root, f"turn {index}", SpanType.LLM, time, {"messages": list(said)}, reply))
        said += [reply, *({"role": "tool", "content": result} for result in turn.results)]
        place += turn.length + 2
        for call, result in _answered(turn):
            begin, place = place, place + len(result or "") + 1
            called = _Ids(trace_id, len(spans) + 1)
            spans.append(_span(called, own, call.name, SpanType.TOOL, clock.of_characters(begin, place), call.arguments, result))
    return spans


def _answered(turn: Turn) -> list[tuple[ToolCall, str | None]]:
    """Its calls, each with what it returned, if anything."""
    return list(zip(turn.calls, [*turn.results, *[None] * len(turn.calls)], strict=False))


def _length(turn: Turn) -> int:
    """Characters of the turn and of what its calls returned, and a few more, so that everything takes time and has its order."""
    return turn.length + 2 + sum(len(result or "") + 1 for _, result in _answered(turn))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Where the characters of an episode lie in time.

    Attributes:
        start_s: Unix time of the first one.
        seconds: that all took.
        length: their number.
        times: how this is known.
    """

    start_s: float
    seconds: float
    length: int
    times: str

    @classmethod
    def of(cls, line: Mapping[str, Any], length: int) -> Self:
        """From what was logged of the step, which begins with sampling."""
        step_s, rollout_s = (line["metrics"].get(f"time/{name}") for name in ("step_s", "rollout_s"))
        if step_s and rollout_s:
            return cls(line["time_s"] - step_s, rollout_s, length, MEASURED)
        return cls(line["time_s"], length / 1000, length, ASSUMED)

    @property
    def whole(self) -> tuple[int, int]:
        """Begin and end of the episode, Unix time in nanoseconds."""
        return self.of_characters(0, self.length)

    def of_characters(self, first: int, end: int) -> tuple[int, int]:
        """Begin and end of some of its characters."""
        start_ns, of_one = round(self.start_s * 1e9), 1e9 * self.seconds / max(1, self.length)
        return start_ns + round(first * of_one), start_ns + round(end * of_one)


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
    time_ns: tuple[int, int],
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
            "start_time": time_ns[0],
            "end_time": time_ns[1],
            "status_code": "OK",
            "status_message": "",
            "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
            "events": [],
        }
    )
