"""Stage gate: fails where a model is worse than the one it started from, by the metrics in eval.gate.

Reads   metrics/eval.json
Writes  nothing; its exit code is 0 or 7
Run     dvc repro --single-item gate
"""

import json
from pathlib import Path

from pipeline.errors import GateError
from pipeline.evaluation.gate import regressions, unproven
from pipeline.lineage.declaration import declaration
from pipeline.params import load_params
from pipeline.stage import stage_process
from pipeline.terminal import say


def main() -> None:
    params = load_params()
    with stage_process("gate", declaration("gate", params)):
        metrics = params.eval.gate or ()
        measured = json.loads(Path("metrics/eval.json").read_text(encoding="utf-8"))
        for line in unproven(measured, metrics):
            say(f"gate: {line}")
        lines = list(regressions(measured, metrics))
        if lines:
            remedy = "keep the parent's model, train differently, or take the metric out of eval.gate:"
            say(f"gate: {remedy}")
            raise GateError(*lines)


if __name__ == "__main__":
    main()
