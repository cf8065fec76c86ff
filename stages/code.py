"""Writes data/code/<stage>.json: what each stage's code is, comments and layout aside."""

from pathlib import Path

from pipeline.lineage.code_hash import write_code_hashes

if __name__ == "__main__":
    write_code_hashes(Path.cwd(), Path("data/code"))
