"""Stage code: writes data/code/<stage>.json, what each stage's code is, comments and layout aside.

Reads   pipeline/, stages/
Writes  data/code/*.json
Run     dvc repro --single-item code
"""

from pathlib import Path

from pipeline.lineage.code_hash import write_code_hashes
from pipeline.stage import stage_process

if __name__ == "__main__":
    with stage_process("code"):
        write_code_hashes(Path.cwd(), Path("data/code"))
