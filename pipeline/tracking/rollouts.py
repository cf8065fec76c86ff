"""What a step of ppo, grpo or agent sampled, kept in the run folder: what `replay-step` computes the step from again.

`rollouts/STEP.npz` holds N trajectories, one after another in flat arrays:

| array | holds |
| --- | --- |
| keys [N] int64 | the key that each was sampled with, unique within a step |
| prompts [N, 2] int64, prompt_ids int32 | where each one's prompt begins and ends in `prompt_ids`; a group shares its prompt |
| lengths [N] int32 | how many ids follow the prompt |
| ids int32, sampled bool, logprobs float32 | those ids, as in `Trajectory` |
| rest uint8 | JSON: per trajectory `stop`, `open_thinking` and `tool_results` as pairs of content and is_error |

Texts are not kept: they are what the ids say.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from pipeline.errors import DataError
from pipeline.tracking.run_folder import named

if TYPE_CHECKING:
    from pipeline.rollout.records import Trajectory, Turn
    from pipeline.text.tokenizer import Tokenizer

DAMAGED = (OSError, EOFError, ValueError, LookupError, NotImplementedError, RuntimeError, BadZipFile, zlib.error)
"""What readers of zip files and arrays raise on bytes that somebody has cut or flipped."""
_ARRAYS = {
    "keys": ("int64", 1),
    "prompts": ("int64", 2),
    "prompt_ids": ("int32", 1),
    "lengths": ("int32", 1),
    "ids": ("int32", 1),
    "sampled": ("bool", 1),
    "logprobs": ("float32", 1),
    "rest": ("uint8", 1),
}
"""Type and number of dimensions of each array."""


def write_rollouts(path: Path, rollouts: "Mapping[int, Trajectory]") -> None:
    """Writes the trajectories of a step, in their order; the same ones give the same bytes.

    The file is there as a whole or not at all, but not synced: a run that goes on after a power cut samples its steps anew.
    """
    import numpy as np  # stages that sample nothing do without

    trajectories = list(rollouts.values())
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    prompt_ids: list[int] = []
    for trajectory in trajectories:
        prompt = tuple(trajectory.prompt_ids)
        if prompt not in places:
            places[prompt] = len(prompt_ids), len(prompt_ids) + len(prompt)
            prompt_ids += prompt
    arrays: dict[str, np.ndarray] = {
        "keys": np.array(list(rollouts), np.int64),
        "prompts": np.array([places[tuple(t.prompt_ids)] for t in trajectories], np.int64).reshape(-1, 2),
        "prompt_ids": np.array(prompt_ids, np.int32),
        "lengths": np.array([len(t.ids) for t in trajectories], np.int32),
        "ids": np.array([id_ for t in trajectories for id_ in t.ids], np.int32),
        "sampled": np.array([flag for t in trajectories for flag in t.sampled], np.bool_),
        "logprobs": np.array([logprob for t in trajectories for logprob in t.logprobs], np.float32),
        "rest": np.frombuffer(json.dumps([_rest(t) for t in trajectories]).encode(), np.uint8),
    }
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named(temporary), temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def _rest(trajectory: "Trajectory") -> dict[str, Any]:
    results = [[(result.content, result.is_error) for result in turn] for turn in trajectory.tool_results]
    return {"stop": trajectory.stop, "open_thinking": trajectory.open_thinking, "tool_results": results}


def read_rollouts(path: Path, tokenizer: "Tokenizer") -> "dict[int, Trajectory]":
    """The trajectories that `write_rollouts` was given, by key; their turns are read from the ids again.

    Raises:
        DataError: the file is missing, torn or damaged.
    """
    arrays = _read(path)
    try:
        rest = json.loads(bytes(arrays["rest"]))
        return dict(zip(arrays["keys"], _trajectories(arrays, rest, tokenizer), strict=True))
    except (*DAMAGED, TypeError, AttributeError) as error:  # `rest` may be JSON of any kind
        raise _damaged(path, error) from None


def read_ids(path: Path) -> list[tuple[list[int], list[int]]]:
    """Per trajectory the ids of its prompt and those behind it.

    Raises:
        DataError: the file is missing, torn or damaged.
    """
    arrays = _read(path, ("prompts", "prompt_ids", "lengths", "ids"))
    ends = pairwise(accumulate(arrays["lengths"], initial=0))
    try:
        return [
            (arrays["prompt_ids"][start:stop], arrays["ids"][begin:end])
            for (begin, end), (start, stop) in zip(ends, arrays["prompts"], strict=True)
        ]
    except ValueError as error:
        raise _damaged(path, error) from None


def _read(path: Path, names: Iterable[str] = _ARRAYS) -> dict[str, list[Any]]:
    """These arrays of a file as lists."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in names}
            for name, array in arrays.items():
                if (array.dtype.name, array.ndim) != _ARRAYS[name] or (name in ("ids", "prompt_ids") and (array < 0).any()):
                    raise ValueError(f"{name} is not what a run writes")
            return {name: array.tolist() for name, array in arrays.items()}
    except FileNotFoundError:
        why = "the run had runtime.keep_rollouts: false, or `python -m pipeline gc` has removed it"
        raise DataError(f"{path}: no such file, so this step cannot be replayed; {why}") from None
    except DAMAGED as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: torn or damaged, so this step cannot be replayed ({error})")


def _trajectories(arrays: dict[str, list[Any]], rest: list[dict[str, Any]], tokenizer: "Tokenizer") -> "Iterator[Trajectory]":
    from pipeline.rollout.records import StopReason, Trajectory
    from pipeline.tools.registry import ToolResult

    ends = pairwise(accumulate(arrays["lengths"], initial=0))
    for (begin, end), (start, stop), other in zip(ends, arrays["prompts"], rest, strict=True):
        trajectory = Trajectory(
            prompt_ids=arrays["prompt_ids"][start:stop],
            ids=arrays["ids"][begin:end],
            sampled=arrays["sampled"][begin:end],
            logprobs=arrays["logprobs"][begin:end],
            turns=[],
            tool_results=[[ToolResult(*result) for result in turn] for turn in other["tool_results"]],
            stop=StopReason(other["stop"]),
            open_thinking=other["open_thinking"],
        )
        trajectory.turns = list(_turns(trajectory, tokenizer))
        yield trajectory


def _turns(trajectory: "Trajectory", tokenizer: "Tokenizer") -> "Iterator[Turn]":
    """Each unbroken run of sampled ids as `run_episodes` read it: all ended by themselves, but for a last one at a limit."""
    from pipeline.rollout.episodes import read_turn
    from pipeline.rollout.records import Completion, StopReason

    flagged = zip(trajectory.ids, trajectory.sampled, strict=True)
    runs = [[id_ for id_, _ in run] for sampled, run in groupby(flagged, key=lambda pair: pair[1]) if sampled]
    for number, ids in enumerate(runs, start=1):
        cut = number == len(runs) and trajectory.stop is StopReason.LENGTH
        completion = Completion(ids, [], StopReason.LENGTH if cut else StopReason.EOS)
        yield read_turn(tokenizer, completion, open_thinking=trajectory.open_thinking)
