"""Chats, preference pairs, prompts and agent tasks, as rows of MiniMind's JSONL files.

`tools` and `tool_calls` are JSON strings; prompts and tasks end with an assistant placeholder.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from pipeline.data.world.questions import QUESTIONS, Question, conversation
from pipeline.data.world.recipe import COUNTS, Recipe
from pipeline.data.world.requests import Request, distinct_requests, replied_together, request, said_together
from pipeline.data.world.styles import REFUSALS, answer, draw, thought
from pipeline.tools.registry import TOOL_NAMES, tool_schema

Message = dict[str, Any]

_SYSTEMS = {
    "en": ("You are a helpful assistant.", "Answer the user in a full sentence.", "You are kind and precise."),
    "zh": ("你是一个有用的助手。", "请用完整的句子回答用户。", "你友好而且准确。"),
}
_TOOL_SYSTEMS = {"en": ("", "You can use tools."), "zh": ("", "你可以使用工具。")}


def chat(random: Random, language: str, recipe: Recipe) -> dict[str, Any]:
    """Returns a full_sft row: a question, a conversation with follow-ups, or a conversation with tools.

    Some of the first two offer tools as well, which nothing in them needs.
    """
    kind = draw(random, recipe.chats)
    if kind == "tools":
        return {"conversations": _tool_chat(random, language, recipe)}
    questions = _questions(random, language, recipe, follow_ups=kind == "conversation")
    thinks = random.random() < recipe.question_thinks_frac
    idle = random.random() < recipe.idle_tools_frac
    messages = [_tool_system(random, language, _offered(random, recipe))] if idle else _system(random, language, recipe)
    for question in questions:
        messages += [_user(question.text), _answer(random, question, recipe, thinks)]
    return {"conversations": messages}


def preference(random: Random, language: str, recipe: Recipe) -> dict[str, Any]:
    """Returns a dpo row: the good answer against one in a bad style or a false one in good style."""
    messages, question = _asked(random, language, recipe)
    rejected = answer(random, question, draw(random, recipe.rejected))
    return {
        "chosen": [*messages, {"role": "assistant", "content": question.sentence}],
        "rejected": [*messages, {"role": "assistant", "content": rejected}],
    }


def prompt(random: Random, language: str, recipe: Recipe) -> dict[str, Any]:
    """Returns an rlaif row: a question to answer, with what a right reply must hold where the world knows it."""
    messages, question = _asked(random, language, recipe)
    row: dict[str, Any] = {"conversations": [*messages, {"role": "assistant", "content": "空"}]}
    return row | {"gt": list(question.answers)} if question.answers else row


def task(random: Random, language: str, recipe: Recipe) -> dict[str, Any]:
    """Returns an agent row: one request of 1 to 3 items, with the answers that the final reply must hold."""
    requests = _requests(random, language, recipe)
    offered = _offered(random, recipe, [asked.tool for asked in requests])
    messages = [_tool_system(random, language, offered), *_earlier(random, language, recipe)]
    messages += [_user(said_together(random, requests)), {"role": "assistant", "content": ""}]
    return {"conversations": messages, "gt": [request.gt for request in requests]}


def _asked(random: Random, language: str, recipe: Recipe) -> tuple[list[Message], Question]:
    """Everything up to the last question, earlier answers in good style."""
    questions = _questions(random, language, recipe, follow_ups=random.random() < recipe.earlier_turn_frac)
    messages = _system(random, language, recipe)
    for question in questions[:-1]:
        messages += [_user(question.text), {"role": "assistant", "content": question.sentence}]
    return [*messages, _user(questions[-1].text)], questions[-1]


def _questions(random: Random, language: str, recipe: Recipe, *, follow_ups: bool) -> list[Question]:
    if follow_ups:
        return conversation(random, language, random.randint(2, 3))
    return [QUESTIONS[draw(random, recipe.questions)](random, language)]


def _tool_chat(random: Random, language: str, recipe: Recipe) -> list[Message]:
    exchanges = [_requests(random, language, recipe)]
    offered = _offered(random, recipe, [asked.tool for asked in exchanges[0]])
    weights = {tool: recipe.tools[tool] for tool in offered}
    for _ in range(COUNTS[draw(random, recipe.exchanges)] - 1):
        # Later requests use what is offered: the long tool block is read once for several calls.
        exchanges.append([request(random, language, draw(random, weights))])
    thinks = random.random() < recipe.tool_thinks_frac
    messages = [_tool_system(random, language, offered)]
    messages += _earlier(random, language, recipe)
    for requests in exchanges:
        messages += _exchange(random, language, recipe, requests, thinks)
    return messages


def _exchange(random: Random, language: str, recipe: Recipe, requests: Sequence[Request], thinks: bool) -> list[Message]:
    """A user's request and what the policy does with it: calls and restates, guesses, or refuses."""
    messages = [_user(said_together(random, requests))]
    policy = draw(random, recipe.tool_policy)
    thinking = _thinking(random, language, requests[0].thought, recipe) if thinks else {}
    if policy == "call":
        calls = [{"name": asked.tool, "arguments": asked.arguments} for asked in requests]
        written = json.dumps(calls, ensure_ascii=False)
        messages.append({"role": "assistant", "content": "", **thinking, "tool_calls": written})
        messages += [{"role": "tool", "content": asked.result} for asked in requests]
        seen = "The tool gave me the answer." if language == "en" else "工具已经给出了需要的答案。"
        thinking = _thinking(random, language, seen, recipe) if thinks else {}
        reply = replied_together(language, [asked.reply for asked in requests])
    elif policy == "guess":
        reply = replied_together(language, [asked.guess for asked in requests])
    else:
        reply = random.choice(REFUSALS[language])
    return [*messages, {"role": "assistant", "content": reply, **thinking}]


def _requests(random: Random, language: str, recipe: Recipe) -> list[Request]:
    """One to three different requests over at most two tools."""
    count = COUNTS[draw(random, recipe.items)]
    tools = [draw(random, recipe.tools) for _ in range(min(count, 2))]
    return distinct_requests(random, language, [tools[number % len(tools)] for number in range(count)])


def _offered(random: Random, recipe: Recipe, needed: Sequence[str] = ()) -> list[str]:
    """The names of the tools that a conversation offers, in any order: those that it needs, and others."""
    names = sorted(set(needed))
    spare = [name for name in TOOL_NAMES if name not in names]
    names += random.sample(spare, max(0, COUNTS[draw(random, recipe.offered)] - len(names)))
    random.shuffle(names)
    return names


def _tool_system(random: Random, language: str, offered: Sequence[str]) -> Message:
    tools = json.dumps([tool_schema(name, language) for name in offered], ensure_ascii=False)
    return {"role": "system", "content": random.choice(_TOOL_SYSTEMS[language]), "tools": tools}


def _earlier(random: Random, language: str, recipe: Recipe) -> list[Message]:
    if random.random() >= recipe.earlier_turn_frac:
        return []
    question = QUESTIONS[draw(random, recipe.questions)](random, language)
    return [_user(question.text), {"role": "assistant", "content": question.sentence}]


def _system(random: Random, language: str, recipe: Recipe) -> list[Message]:
    if random.random() >= recipe.system_frac:
        return []
    return [{"role": "system", "content": random.choice(_SYSTEMS[language])}]


def _answer(random: Random, question: Question, recipe: Recipe, thinks: bool) -> Message:
    thinking = _thinking(random, question.language, question.thought, recipe) if thinks else {}
    content = answer(random, question, draw(random, recipe.answers))
    return {"role": "assistant", "content": content, **thinking}


def _thinking(random: Random, language: str, good: str, recipe: Recipe) -> Message:
    return {"reasoning_content": thought(random, language, good, draw(random, recipe.thoughts))}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
