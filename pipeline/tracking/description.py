"""How a run is called and tagged: its name, params, git state, input digests and library versions."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.lineage.git import git
from pipeline.tracking.rebuild import EXPERIMENT, Rebuild

GIT_S = 20.0
"""How long the start of a run waits for git."""
LIBRARIES = ("torch", "transformers", "tokenizers")
_OTHER_DVC = ("dvc.stage", "dvc.experiment")
# Stages rewrite these tracked files themselves; they say nothing about the code that runs.
_WRITTEN_BY_STAGES = (":!dvc.lock", ":!metrics", ":!plots")


def run_name(stage: str, params: Mapping[str, Any]) -> str:
    """A short name to tell runs apart, such as `grpo · cispo lr 1e-4 · s42`."""
    own = params.get(stage)
    own = own if isinstance(own, Mapping) else {}
    settings = [str(own["loss"])] if "loss" in own else []
    settings += [f"lr {_scientific(own['lr'])}"] if "lr" in own else []
    seed = [f"s{own['seed']}"] if "seed" in own else []
    return " · ".join([stage, *([" ".join(settings)] if settings else []), *seed])


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def run_tags(root: Path, stage: str, key: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Tags that join a run with git, DVC and the libraries. A dirty tree is one with edited tracked files."""
    tags = {"dvc.stage": os.environ.get("DVC_STAGE", stage), "run.key": key, "version.python": platform.python_version()}
    tags |= {f"version.{name}": version(name) for name in LIBRARIES}
    tags |= {f"dvc.{path}": value for path, value in digests.items()}
    if experiment := os.environ.get(EXPERIMENT):
        tags["dvc.experiment"] = experiment
    return tags | _git_tags(root)


def _git_tags(root: Path) -> dict[str, str]:
    """Commit and state of the tree; where git fails, which may not cost a run, why they are unknown; nothing without commits."""
    try:
        commit = git(root, "rev-parse", "--quiet", "--verify", "HEAD", allow_no=True, timeout_s=GIT_S).strip()
        changes = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN_BY_STAGES, timeout_s=GIT_S)
    except PipelineError as error:
        return {"git.unknown": str(error)}
    return {"git.commit": commit, "git.dirty": str(bool(changes)).lower()} if commit else {}


def input_digests(tags: Mapping[str, str]) -> dict[str, str]:
    """Path -> digest of what a run read: back from `run_tags`."""
    return {tag.removeprefix("dvc."): value for tag, value in tags.items() if tag.startswith("dvc.") and tag not in _OTHER_DVC}


def circumstances(root: Path) -> dict[str, Any]:
    """What run.json says of where and for what a run was started: workspace, rebuild, params.yaml as it was."""
    params_file, rebuild = root / "params.yaml", Rebuild.current()
    return {
        "workspace": str(root),
        "rebuild": rebuild.note() if rebuild else None,
        "params_file": params_file.read_text(encoding="utf-8") if params_file.exists() else None,
    }


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"grpo.lr": "0.0001"}` from nested params, as MLflow wants them."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat
