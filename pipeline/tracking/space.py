"""Whether the disk has room for what a stage that trains will write: asked before hours of work, not after."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.errors import DiskSpaceError
from pipeline.params.needs import ADAMW, FLOAT_BYTES
from pipeline.params.schema import ModelParams, Runtime
from pipeline.params.sizes import num_parameters
from pipeline.tracking.run_folder import RunFolder

ROLLOUT_BYTES = 7  # of a sampled token in `rollouts/`: id, logprob, and its share of the prompt
COPIES_OF_OUTPUT = 2  # the checkpoint, and what DVC keeps of it in its cache


def check_space(
    stage: str, folder: RunFolder, root: Path, params: Mapping[str, Any], inputs: Sequence[str | Path], runtime: Runtime
) -> None:
    """Compares what the run at `folder` will write with what is free.

    `keep_saves` + 1 states (one is written before one is removed), rollouts of all steps and the states that replays begin with,
    less what lies there, and the outputs below `root`. Saves of `keep_every_steps` come on top.

    Raises:
        DiskSpaceError: in one line, what is needed and free, and how to mend it.
    """
    weights = _trained_bytes(stage, root, params, inputs)
    if not weights:
        return
    state = ADAMW * weights * (2 if stage == "ppo" else 1)  # ppo trains a critic of the policy's size beside it
    steps = _sampling_steps(stage, root, params, inputs) if runtime.keep_rollouts else 0
    rollouts = steps * _rollout_bytes(params[stage]) if steps else 0
    states = runtime.keep_saves + 1 + (steps // runtime.replay_every_steps if runtime.replay_every_steps else 0)
    written = [*folder.path.glob("state-*.pt"), *folder.rollouts.glob("*.npz")]
    there = sum(_size(path) for path in written if path.is_file())
    needed: defaultdict[int, int] = defaultdict(int)
    free: dict[int, int] = {}
    for place, size in (
        (folder.path, max(0, states * state + rollouts - there)),
        (root, COPIES_OF_OUTPUT * weights),
    ):
        device = os.stat(place).st_dev
        needed[device] += size
        free[device] = shutil.disk_usage(place).free
    for device, size in needed.items():
        if size > free[device]:
            raise DiskSpaceError(
                f"{folder.path}: needs about {_shown(size)} on its disk, for saves of {_shown(state)}"
                + (f", rollouts of {_shown(rollouts)}" if rollouts else "")
                + f" and outputs, and {_shown(free[device])} are free; `python -m pipeline gc` frees some, or lower "
                f"runtime.keep_saves={runtime.keep_saves}" + (", or set runtime.keep_rollouts: false" if rollouts else "")
            )


def _trained_bytes(stage: str, root: Path, params: Mapping[str, Any], inputs: Sequence[str | Path]) -> int:
    """Size in fp32 of the weights that the stage trains, those of a critic left out; 0 where it trains none."""
    own = params.get(stage, {})
    if "lr" not in own:
        return 0
    if "model" in params:  # from the beginning
        vocab_size = Tokenizer.from_file(str(root / "data/tokenizer/tokenizer.json")).get_vocab_size()
        return FLOAT_BYTES * num_parameters(ModelParams.model_validate(params["model"]), vocab_size)
    start = max((path for path in (root / name for name in inputs) if path.suffix == ".pth"), key=_size, default=None)
    if start is None:
        return 0
    if "rank" not in own:
        return _size(start)
    # an adapter is two factors of a matrix, `rank` wide
    width = json.loads(start.with_suffix(".json").read_text(encoding="utf-8"))["model"]["hidden_size"]
    return int(_size(start) * min(1.0, 2 * own["rank"] / width))


def _sampling_steps(stage: str, root: Path, params: Mapping[str, Any], inputs: Sequence[str | Path]) -> int:
    """Steps of the whole run of a stage that samples; 0 of another."""
    own = params.get(stage, {})
    reports = [path for path in (root / name / "report.json" for name in inputs) if path.is_file()]
    if "max_new_tokens" not in own or not reports:
        return 0
    prompts = json.loads(reports[0].read_text(encoding="utf-8"))["train"]
    steps = int(own["epochs"] * -(-prompts // own["batch_size"]))
    return min(steps, own["max_steps"] or steps)


def _rollout_bytes(own: Mapping[str, Any]) -> int:
    """Of the trajectories of a step, if each is as long as it may be and no group is sampled anew."""
    rows = own["batch_size"] * own.get("group_size", 1)
    tokens = own["max_new_tokens"] * own.get("max_turns", 1)
    return int(ROLLOUT_BYTES * tokens * rows)


def _size(path: Path) -> int:
    return path.stat().st_size


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
