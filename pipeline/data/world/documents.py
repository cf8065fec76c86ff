"""Pretraining texts: facts, copying (what induction is learned from), small arithmetic, JSON records, dialogues."""

import json
from collections.abc import Sequence
from random import Random

from pipeline.data.world.facts import RELATIONS, Relation
from pipeline.data.world.questions import COLOURS, NAMES, OBJECTS, QUESTIONS, capitalised, join
from pipeline.data.world.recipe import Recipe
from pipeline.data.world.requests import Request, distinct_requests, replied_together, request, said_together
from pipeline.data.world.styles import draw
from pipeline.tools.registry import TOOL_NAMES


def document(random: Random, language: str, recipe: Recipe) -> str:
    """Returns one text of about 100 to 400 characters."""
    kind = draw(random, recipe.documents)
    if kind == "records":
        return _records(random, language, recipe)
    return _DOCUMENTS[kind](random, language)


def statement(random: Random, language: str, relation: Relation, subject: str) -> str:
    """Returns one true sentence; half of the time in the words of the good answer."""
    wording, value = relation.wording[language], relation.values[language][subject]
    template = wording.answer if random.random() < 0.5 else random.choice(wording.statements)
    return capitalised(template.format(s=subject, v=value))


def _facts(random: Random, language: str) -> str:
    relation = random.choice(RELATIONS)
    if random.random() < 0.5:  # all about a few subjects
        subjects = random.sample(sorted(relation.values[language]), random.randint(2, 3))
        related = [other for other in RELATIONS if other.kind == relation.kind]
        pairs = [(other, subject) for subject in subjects for other in related if subject in other.values[language]]
    else:  # one relation over many subjects
        subjects = random.sample(sorted(relation.values[language]), random.randint(5, 7))
        pairs = [(relation, subject) for subject in subjects]
    return join(language, *(statement(random, language, *pair) for pair in pairs))


def _copies(random: Random, language: str) -> str:
    form = random.randrange(8)
    if form >= 3:  # a line of unrelated items, said again and again: nothing but copying predicts it
        line = " ".join(_item(random, language) for _ in range(random.randint(3, 8)))
        return "\n".join([line] * random.randint(3, 6))
    if form == 0:  # a number, again
        again = " again " if language == "en" else "再说"
        numbers = [str(random.randint(1, 10 ** random.randint(1, 6))) for _ in range(random.randint(8, 12))]
        return ", ".join(number + again + number for number in numbers)
    names = random.sample(NAMES[language], random.randint(4, 6))
    if form == 1:  # who has which number, recalled in another order
        told = {name: str(random.randint(10, 9999)) for name in names}
        verb, ask = (" has ", "Again: ") if language == "en" else ("有", "再说一遍：")
        recalled = random.sample(names, len(names))
        lines = [[f"{name}{verb}{told[name]}" for name in order] for order in (names, recalled)]
        return ", ".join(lines[0]) + ".\n" + ask + ", ".join(lines[1]) + "."
    words = [
        random.choice(COLOURS[language]) + (" " if language == "en" else "的") + random.choice(OBJECTS[language]) for _ in names
    ]
    line = ", ".join(f"{name}: {word}" for name, word in zip(names, words, strict=True))
    return f"{line}.\n{line}."


def _item(random: Random, language: str) -> str:
    """Returns something to copy: a made-up word, a number, an expression, a name, a word of the world or what a tool takes."""
    form = random.randrange(8)
    if form < 2:
        return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(2, 5)))
    if form == 2:
        return str(random.randint(0, 9999))
    if form == 3:
        return f"{random.randint(1, 99)}{random.choice('+-*')}{random.randint(1, 99)}"
    if form == 4:
        return random.choice(NAMES[language])
    if form >= 6:
        return str(random.choice(list(request(random, language, random.choice(TOOL_NAMES)).arguments.values())))
    relation = random.choice(RELATIONS)
    return random.choice(sorted(relation.values[language].items()))[random.randrange(2)]


def _arithmetic(random: Random, language: str) -> str:
    lines = []
    for _ in range(random.randint(8, 14)):
        a, b = random.randint(1, 20), random.randint(1, 20)
        form = random.randrange(4)
        if form == 0:
            lines.append(f"{a}+{b}={a + b}")
        elif form == 1:
            lines.append(f"{max(a, b)}-{min(a, b)}={abs(a - b)}")
        elif form == 2:
            lines.append(f"{a % 10}*{b % 10}={a % 10 * (b % 10)}")
        else:
            start = random.randint(1, 995)
            lines.append(", ".join(str(start + step) for step in range(4)))
    return "; ".join(lines)


def _records(random: Random, language: str, recipe: Recipe) -> str:
    """One to three requests with their calls, results and replies; half of the time one user text asks for all of them."""
    requests = distinct_requests(random, language, [draw(random, recipe.tools) for _ in range(random.randint(1, 3))])
    if random.random() < 0.5:
        return _record(language, said_together(random, requests), requests)
    return "\n".join(_record(language, asked.text, [asked]) for asked in requests)


def _record(language: str, text: str, requests: Sequence[Request]) -> str:
    calls = [json.dumps({"name": asked.tool, "arguments": asked.arguments}, ensure_ascii=False) for asked in requests]
    results = [asked.result for asked in requests]
    return "\n".join((text, *calls, *results, replied_together(language, [asked.reply for asked in requests])))


def _dialogue(random: Random, language: str) -> str:
    ask, answer = ("Question: ", "Answer: ") if language == "en" else ("问：", "答：")
    lines = []
    for _ in range(random.randint(3, 5)):
        question = random.choice(list(QUESTIONS.values()))(random, language)
        lines += [ask + question.text, answer + question.sentence]
    return "\n".join(lines)


_DOCUMENTS = {"facts": _facts, "copies": _copies, "arithmetic": _arithmetic, "dialogue": _dialogue}
