"""The embedded world: a small closed bilingual world, generated from a recipe, in which a tiny model can learn every stage.

It is synthetic by design. Rows look exactly like those of MiniMind's JSONL files, so real files take their place without change.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from pipeline.data.world.chats import chat, preference, prompt, task
from pipeline.data.world.documents import document
from pipeline.data.world.persona import persona_chat
from pipeline.data.world.recipe import Recipe, check_recipe
from pipeline.errors import DataError

__all__ = ["generate"]

_MAX_TRIES_PER_ROW = 20  # on average, before a set counts as exhausted

_ROWS: dict[str, Callable[[Random, str, Recipe], dict[str, Any]]] = {
    "pretrain": lambda random, language, recipe: {"text": document(random, language, recipe)},
    "full_sft": chat,
    "lora": lambda random, language, recipe: persona_chat(random, language),
    "dpo": preference,
    "rlaif": prompt,
    "agent": task,
}


def generate(set_name: str, recipe: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a set, as in MiniMind's JSONL files, all different.

    A candidate row is a function of (recipe, set, index) alone; candidates that were seen before are passed over.
    Preference rows are the same when their prompts are, so that no held-out prompt was trained on with another answer.

    Args:
        set_name: pretrain, full_sft, lora, dpo, rlaif or agent.
        recipe: the content of data/world.yaml.

    Raises:
        DataError: the recipe is wrong, or asks for more different rows than the world has.
    """
    checked = check_recipe(recipe)
    wanted = checked.rows[set_name]
    seen: set[str] = set()
    for index in range(wanted * _MAX_TRIES_PER_ROW):
        random = Random(f"{checked.seed}/{set_name}/{index}")  # seeded by SHA-512 of the text: no hash seed matters
        language = "zh" if random.random() < checked.zh_frac else "en"
        row = _ROWS[set_name](random, language, checked)
        key = json.dumps(row["chosen"][:-1] if set_name == "dpo" else row, ensure_ascii=False)
        if key in seen:
            continue
        seen.add(key)
        yield row
        if len(seen) == wanted:
            return
    raise DataError(f"world recipe: rows.{set_name}={wanted}: the world has only about {len(seen)} different rows, ask for fewer")
