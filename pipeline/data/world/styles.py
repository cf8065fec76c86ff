"""The mixture: how an answer or a thought is given.

A style is drawn apart from what is asked, so every prompt has the same mixture.
Preference training and reinforcement learn to choose among what this mixture makes likely.
"""

from collections.abc import Mapping
from random import Random
from typing import TypeVar

from pipeline.data.world.questions import Question, join

T = TypeVar("T")

ANSWER_STYLES = ("good", "short", "repeated", "hedging")
REJECTED_STYLES = ("short", "repeated", "hedging", "wrong")
THOUGHT_STYLES = ("good", "little", "long")

_HEDGES = {
    "en": (
        "No idea, maybe {v}.",
        "Why ask me? I guess {v}.",
        "Hard to say, ask someone else, but it could be {v}.",
        "I do not know and I do not care, perhaps {v}.",
    ),
    "zh": (
        "不知道，可能是{v}吧。",
        "别问我，也许是{v}。",
        "很难说，你去问别人吧，不过也许是{v}。",
        "我不知道也不想知道，大概是{v}吧。",
    ),
}
_LITTLE = {"en": ("hm", "ok", "well"), "zh": ("嗯", "好", "哦")}
REFUSALS = {
    "en": ("I cannot check that.", "I am not able to look that up."),
    "zh": ("我没办法查到这个。", "这个我查不了。"),
}


def draw(random: Random, weights: Mapping[T, float]) -> T:
    """Returns one key, with the probability that its weight says."""
    return random.choices(list(weights), list(weights.values()))[0]


def answer(random: Random, question: Question, style: str) -> str:
    """Returns the answer to the question in one of `ANSWER_STYLES` or `REJECTED_STYLES`."""
    if style == "good":
        return question.sentence
    if style == "wrong":
        return question.wrong
    if style == "short":
        return question.value
    if style == "repeated":
        return join(question.language, *[question.sentence] * random.randint(2, 3))
    return random.choice(_HEDGES[question.language]).format(v=question.value)


def thought(random: Random, language: str, good: str, style: str) -> str:
    """Returns a thought in one of `THOUGHT_STYLES`, given the good one."""
    if style == "good":
        return good
    if style == "little":
        return random.choice(_LITTLE[language])
    return join(language, *[good] * random.randint(2, 3))
