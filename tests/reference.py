"""Reference figures, written down once: what MiniMind's formulas give in fp64, its chat template, small models of its make."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "oracle"


def figures(name: str) -> dict[str, Any]:
    """Inputs and results of `ppo`, `grpo` or `dpo`."""
    found: dict[str, Any] = json.loads((FOLDER / "rl_figures.json").read_text(encoding="utf-8"))[name]
    return found


def conversations() -> list[dict[str, Any]]:
    """Conversations with the text that the template renders; keys other than these two and `why` are its arguments."""
    found: list[dict[str, Any]] = json.loads((FOLDER / "chat_template.json").read_text(encoding="utf-8"))
    return found


def models() -> dict[str, Any]:
    """Of each `minimind_<name>.pth` in `FOLDER`, written as MiniMind does: its sizes, ids, and what it makes of them in fp32."""
    found: dict[str, Any] = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
    return found
