"""The recipe of the embedded world, `data/world.yaml`: complete, every weight of a mixture written out."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.data.world.styles import ANSWER_STYLES, REJECTED_STYLES, THOUGHT_STYLES
from pipeline.errors import DataError
from pipeline.tools.registry import TOOL_NAMES

Frac = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Mixture = dict[str, Frac]
SETS = ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent")


class Recipe(BaseModel):
    """Every value of data/world.yaml. A `Mixture` gives each of its fixed choices a fraction; they sum to 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    seed: Annotated[int, Field(ge=0)]
    rows: dict[str, Positive]
    zh_frac: Frac
    documents: Mixture
    chats: Mixture
    questions: Mixture
    answers: Mixture
    rejected: Mixture
    thoughts: Mixture
    tool_policy: Mixture
    tools: Mixture
    items: Mixture
    exchanges: Mixture
    offered: Mixture
    question_thinks_frac: Frac
    tool_thinks_frac: Frac
    system_frac: Frac
    idle_tools_frac: Frac
    earlier_turn_frac: Frac

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, choices in CHOICES.items():
            given = getattr(self, name)
            if set(given) != set(choices):
                raise ValueError(f"{name}: has {', '.join(given)}; must have exactly {', '.join(choices)}")
            if name != "rows" and abs(sum(given.values()) - 1) > 1e-6:
                raise ValueError(f"{name}: sums to {sum(given.values()):g}; must sum to 1")
        return self


CHOICES: dict[str, tuple[str, ...]] = {
    "rows": SETS,
    "documents": ("facts", "copies", "arithmetic", "records", "dialogue"),
    "chats": ("question", "conversation", "tools"),
    "questions": ("fact", "pair", "story", "small_talk"),
    "answers": ANSWER_STYLES,
    "rejected": REJECTED_STYLES,
    "thoughts": THOUGHT_STYLES,
    "tool_policy": ("call", "guess", "refuse"),
    "tools": TOOL_NAMES,
    "items": ("one", "two", "three"),
    "exchanges": ("one", "two", "three"),
    "offered": ("one", "two", "three", "four", "five", "six"),
}
COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}


def check_recipe(recipe: Mapping[str, Any]) -> Recipe:
    """Returns the validated recipe; DataError names every wrong key at once."""
    try:
        return Recipe.model_validate(dict(recipe))
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            where = ".".join(str(part) for part in fault["loc"])
            lines.append("world recipe: " + (f"{where}: " if where else "") + fault["msg"].removeprefix("Value error, "))
        raise DataError(*lines) from None
