"""Stage encode@SET: tokenise a prepared set once.

Reads   data/prepared/SET, data/tokenizer
Writes  data/encoded/SET/{train,held_out}.arrow, report.json
Run     dvc repro --single-item encode@SET
"""

import sys
from pathlib import Path

from pipeline.data.encode import encode_set
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_process
from pipeline.text.tokenizer import load_tokenizer


def main(name: str) -> None:
    params = load_params()
    with stage_process(f"encode@{name}", declaration("encode", params, name)):
        encode_set(
            name,
            Path("data/prepared") / name,
            Path("data/encoded") / name,
            load_tokenizer(Path("data/tokenizer")),
            max_seq_len=getattr(params, name).max_seq_len,
            max_dropped_frac=params.data.max_dropped_frac,
        )


if __name__ == "__main__":
    main(sys.argv[1])
