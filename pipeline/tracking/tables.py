"""Generated samples as MLflow shows them: tables, few however long a run, and none rewritten; and a text of the last ones."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

# MLflow finds tables through a tag of at most 8000 characters, about 100 tables. A table ends with the step that makes it hold
# this share of the rows before it: their number grows with the logarithm of the rows. Runs that sample at the same steps have
# tables of the same names, which is how MLflow compares them.
TABLE_GROWTH = 0.25
FIRST_COLUMNS = ("prompt", "completion")  # MLflow groups by the first column and compares runs by the next

Row = dict[str, Any]


def cut(rows: Sequence[Row], before: int) -> Iterator[list[Row]]:
    """Whole tables of consecutive steps, and at last the rows that do not fill one yet, if any.

    Args:
        rows: in order of steps.
        before: number of rows in the tables before them.
    """
    part: list[Row] = []
    for _, step in groupby(rows, itemgetter("step")):
        part += step
        if len(part) >= TABLE_GROWTH * before:
            yield part
            part, before = [], before + len(part)
    yield part


def as_table(rows: Sequence[Row]) -> dict[str, Any]:
    """As MLflow stores tables: columns and rows; what a row lacks is None."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [*(key for key in FIRST_COLUMNS if key in keys), *(key for key in keys if key not in FIRST_COLUMNS)]
    return {"columns": columns, "data": [[row.get(key) for key in columns] for row in rows]}


def as_text(rows: Sequence[Row]) -> str:
    """Rows of one step to be read: what was written as it is, a prompt where it changes, numbers in one line."""
    parts, asked = [f"samples of step {rows[0]['step']}"], None
    for number, row in enumerate(rows, 1):
        texts = {key: value for key, value in row.items() if isinstance(value, str) and (key, value) != ("prompt", asked)}
        figures = [f"{key} {value:z.4g}" for key, value in row.items() if isinstance(value, float)]
        lines = [f"{key}: {value}" for key, value in texts.items()] + (["  ".join(figures)] if figures else [])
        parts.append("\n".join([f"--- {number} of {len(rows)}", *lines]))
        asked = row.get("prompt")
    return "\n\n".join(parts) + "\n"
