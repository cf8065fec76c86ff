"""Stage data@SET: validate a source, normalise its rows, split off the held-out ones.

Reads   data.sets.SET.source (a JSONL file, or data/world.yaml)
Writes  data/prepared/SET/{train,held_out}.parquet, report.json
Scratch .runs/rows/ (a checksum per line of the source, for `python -m pipeline plan`)
Run     dvc repro --single-item data@SET
"""

import sys
from pathlib import Path

from pipeline.data.prepare import prepare
from pipeline.lineage.declaration import declaration
from pipeline.lineage.rows import remember_rows
from pipeline.params import load_params
from pipeline.stage import stage_process


def main(name: str) -> None:
    params = load_params()
    with stage_process(f"data@{name}", declaration("data", params, name)):
        source = Path(getattr(params.data.sets, name).source)
        prepare(name, source, Path("data/prepared") / name, params.data)
        remember_rows(source)


if __name__ == "__main__":
    main(sys.argv[1])
