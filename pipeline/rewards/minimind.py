"""MiniMind's own reward rules (commit d65ef2c), faults included, for comparison; docs/rewards.md lists what wins under them.

Its values are constants: the weights of params do not apply. Terms have the names of the default rules. Two things differ: a
tool call that would crash MiniMind (JSON that is no object, arguments that are none) is dropped as if it were no JSON, and tools
that MiniMind does not have take any arguments.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipeline.rewards.rules import clamped
from pipeline.rollout.records import Trajectory

ANSWER_CHARS = (20, 800)  # of a completion, thinking included
AGENT_CHARS = (5, 800)  # of an episode's last turn when no tool was called
THINKING_CHARS = (20, 300)
LENGTH = 0.5
THINKING, NO_THINKING = 1.0, 0.5
THINK_CLOSE = 0.25
NGRAM, REPETITION_CAP = 3, 0.5
MODEL_CLIP = 3.0
CALLS, FAULT = 0.5, 0.5
ANSWER = 2.5
UNFINISHED = 0.5
AGENT_CLIP = 3.0
NUMBER_TOLERANCE = 1e-6

_TOKEN = re.compile(r"\w+|[^\w\s]")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.])")
_REQUIRED = {  # arguments that must be truthy
    "calculate_math": ("expression",),
    "unit_converter": ("from_unit", "to_unit"),
    "get_current_weather": ("location",),
    "get_exchange_rate": ("from_currency", "to_currency"),
    "translate_text": ("text", "target_language"),
}

Call = tuple[str, Mapping[str, Any]]


def completion_terms(response: str, model_score: float) -> dict[str, float]:
    """Reward terms of a single-turn completion by name; their sum is the reward, without a bound.

    `length` of the whole response, thinking included; `thinking` whenever `</think>` appears, asked for or not; `repetition` of
    the answer; `model`, the clamped score. `unfinished` is always 0.

    Args:
        response: the sampled text after the generation prompt.
        model_score: the reward model's score of `answer_of(response)`.
    """
    return {
        "length": _length(response, ANSWER_CHARS),
        "thinking": _thinking(response),
        "repetition": -repetition(answer_of(response)),
        "model": clamped(model_score, MODEL_CLIP),
        "unfinished": 0.0,
    }


def agent_terms(
    trajectory: Trajectory, *, gt: Sequence[str], tools_offered: Collection[str], model_score: float | None
) -> dict[str, float]:
    """Reward terms of an episode by name; their sum, clamped to +- `AGENT_CLIP`, is the reward.

    Without a parsed call in any turn the expected answers are not consulted and the last turn is rewarded like a completion; with
    one, `tool_call` wants one valid call per expected answer, and `answer` is the share of distinct expected answers found.
    `tool_call` also pays for tags without a partner, in both cases.

    Args:
        trajectory: the episode.
        gt: expected answers.
        tools_offered: names of the offered tools.
        model_score: score of `last_answer(trajectory)`, which counts without calls alone; None without a reward model.
    """
    answers = [answer_of(turn.text) for turn in trajectory.turns]
    unpaired = sum(abs(answer.count("<tool_call>") - answer.count("</tool_call>")) for answer in answers)
    calls = [call for answer in answers for call in parse_calls(answer)]
    answer = last_answer(trajectory)
    terms = dict.fromkeys(("answer", "tool_call", "unfinished", "thinking", "repetition", "length", "model"), 0.0)
    terms["tool_call"] = -FAULT * unpaired
    if not calls:
        response = trajectory.turns[-1].text if trajectory.turns else ""
        return terms | {
            "length": _length(response, AGENT_CHARS),
            "thinking": _thinking(response),
            "repetition": -repetition(answer),
            "model": 0.0 if model_score is None else clamped(model_score, MODEL_CLIP),
        }
    valid = sum(name in tools_offered and _arguments_pass(name, arguments) for name, arguments in calls)
    gap = abs(valid - len(gt)) + len(calls) - valid
    unfinished = bool(parse_calls(answer))  # the last allowed turn still calls
    final = "" if unfinished else answer.rpartition("</tool_call>")[2]
    return terms | {
        "answer": ANSWER * len(found_answers(gt, final)) / len(gt) if gt else 0.0,
        "tool_call": terms["tool_call"] + (CALLS if gap == 0 else -FAULT * gap),
        "unfinished": -UNFINISHED if unfinished else 0.0,
        "repetition": -repetition(final or answer),
    }


def answer_of(response: str) -> str:
    """The stripped text after the first `</think>`, or the whole response."""
    before, closing, after = response.partition("</think>")
    return (after if closing else before).strip()


def last_answer(trajectory: Trajectory) -> str:
    """The answer of the last turn, cut off or not; empty without turns."""
    return answer_of(trajectory.turns[-1].text) if trajectory.turns else ""


def any_calls(trajectory: Trajectory) -> bool:
    """Whether a call was parsed in any turn."""
    return any(parse_calls(answer_of(turn.text)) for turn in trajectory.turns)


def parse_calls(answer: str) -> list[Call]:
    """The calls between tool tags; what is no JSON is dropped, and arguments in a string that is none are empty."""
    return [
        call
        for body in _CALL.findall(answer, 0, answer.rfind("</tool_call>") + len("</tool_call>"))
        if (call := _parse_call(body.strip()))
    ]


def repetition(text: str) -> float:
    """Share of duplicate word 3-grams, in [0, 0.5]; a run of Chinese is one word, so its repetition is not seen."""
    tokens = _TOKEN.findall(text.lower())
    ngrams = list(zip(*(tokens[offset:] for offset in range(NGRAM)), strict=False))
    if not ngrams:
        return 0.0
    return min(REPETITION_CAP, (len(ngrams) - len(set(ngrams))) * REPETITION_CAP * 2 / len(ngrams))


def found_answers(gt: Sequence[str], text: str) -> set[str]:
    """The expected answers found, each once: by a substring ("5" in "2025"), or as a number that touches no letter or dot."""
    lowered, numbers = text.lower(), [float(number) for number in _NUMBER.findall(text.replace(",", ""))]
    found = set()
    for item in gt:
        stripped = item.strip()
        digits = stripped.replace(",", "")
        as_number = _WHOLE_NUMBER.fullmatch(digits) and any(abs(number - float(digits)) < NUMBER_TOLERANCE for number in numbers)
        if stripped and (stripped.lower() in lowered or as_number):
            found.add(item)
    return found


def _length(response: str, chars: tuple[int, int]) -> float:
    return LENGTH if chars[0] <= len(response.strip()) <= chars[1] else -LENGTH


def _thinking(response: str) -> float:
    if "</think>" not in response:
        return 0.0
    length = len(response.partition("</think>")[0].strip())
    inside = THINKING_CHARS[0] <= length <= THINKING_CHARS[1]
    return (THINKING if inside else -NO_THINKING) + (THINK_CLOSE if response.count("</think>") == 1 else -THINK_CLOSE)


def _arguments_pass(name: str, arguments: Mapping[str, Any]) -> bool:
    if name == "unit_converter" and arguments.get("value") is None:
        return False
    return all(arguments.get(argument) for argument in _REQUIRED.get(name, ()))


def _parse_call(body: str) -> Call | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
