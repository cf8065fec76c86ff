"""A copy of this repository at tiny size, with the network cut for every process that runs in it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).parent / "offline_site"
RECORDS = ("dvc.lock", "metrics", "plots")
yaml = YAML(typ="safe", pure=True)

# What makes the lineage small; everything else is as in the repository.
TINY: dict[str, Any] = {
    "data.max_dropped_frac": 0.5,
    "tokenizer.vocab_size": 400,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.head_dim": 16,
    "model.intermediate_size": 48,
    "model.max_position_embeddings": 2048,
    "pretrain": {"batch_size": 16, "max_seq_len": 128, "warmup_steps": 1, "val_every": 4, "plot_every": 1},
    "full_sft": {"batch_size": 16, "max_seq_len": 2048, "warmup_steps": 1, "val_every": 2, "plot_every": 1},
    "lora": {"epochs": 1, "batch_size": 8, "warmup_steps": 0, "val_every": 2, "plot_every": 1, "rank": 2},
    "dpo": {"batch_size": 4, "max_seq_len": 1024, "warmup_steps": 1, "val_every": 2, "plot_every": 1},
    "reward": {"epochs": 1, "batch_size": 4, "warmup_steps": 1, "val_every": 2, "plot_every": 1},
    "ppo": {"batch_size": 4, "mini_batch_size": 4, "micro_batch_size": 2, "warmup_steps": 0, "critic_warmup_steps": 1},
    "grpo": {"batch_size": 4, "micro_batch_size": 4, "group_size": 2, "warmup_steps": 0},
    "agent": {"batch_size": 4, "micro_batch_size": 4, "group_size": 2, "warmup_steps": 0, "max_turns": 2},
    **{f"{name}.max_new_tokens": 8 for name in ("ppo", "grpo", "agent", "eval")},
    **{f"{name}.max_prompt_len": 1024 for name in ("ppo", "grpo")},
    "agent.max_prompt_len": 1920,
    "agent.max_total_len": 2048,
    "eval.panel_rows": 8,
    "eval.batch_size": 16,
    "eval.max_turns": 2,
    "runtime": {"device": "cpu", "threads": 1, "save_every_s": 0.001},
}
ROWS = {"pretrain": 60, "full_sft": 80, "lora": 20, "dpo": 20, "rlaif": 15, "agent": 10}


@dataclass(frozen=True)
class Project:
    """A folder to run commands in.

    Attributes:
        root: the folder.
        attempts: the file that lists what tried to reach the network.
    """

    root: Path
    attempts: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """Of a user who has activated the environment, without what pytest or the user's own settings would add."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "MLFLOW_", "PYTHON"))}
        return kept | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(SITE),
            "DVC_SITE_CACHE_DIR": str(self.attempts.parent / "dvc-site"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "LINEAGE_ATTEMPTS": str(self.attempts),
            **extra,
        }

    def start(self, *command: str, **extra: str) -> "subprocess.Popen[str]":
        """A process without network; `extra` are environment variables."""
        return subprocess.Popen(
            [*network_namespace(), *command],
            cwd=self.root,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **extra: str) -> tuple[int, str]:
        """Exit code and output."""
        with self.start(*command, **extra) as process:
            output, _ = process.communicate()
        return process.returncode, output

    def check(self, *command: str, **extra: str) -> str:
        """Output of a command that must succeed."""
        code, output = self.run(*command, **extra)
        assert code == 0, f"{' '.join(command)}: exit {code}\n{output[-6000:]}"
        return output

    def repro(self, *arguments: str, **extra: str) -> set[str]:
        """`dvc repro`; the stages that ran."""
        return set(re.findall(r"Running stage '([^']+)'", self.check("dvc", "repro", *arguments, **extra)))

    def stage(self, name: str) -> tuple[str, ...]:
        """The command of a stage, as dvc.yaml has it."""
        return sys.executable, "-m", *f"stages.{name}".split("@")

    def set_params(self, changes: Mapping[str, Any]) -> None:
        """Writes values to existing keys of params.yaml; a mapping changes several keys of a section."""
        path = self.root / "params.yaml"
        tree = yaml.load(path)
        for key, value in changes.items():
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                place = place[section]
            target, values = (place[last], value) if isinstance(value, Mapping) else (place, {last: value})
            assert set(values) <= set(target), f"{key}: params.yaml has no such key"
            target.update(values)
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)


@cache
def network_namespace() -> tuple[str, ...]:
    """The prefix of a command that gives it a network of its own, without any device that is up; empty where not allowed."""
    for prefix in (("unshare", "--net"), ("unshare", "--map-current-user", "--net")):
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return ()


def copy_repository(root: Path) -> Project:
    """What git would commit of this repository, as the first commit of a new one, at tiny size and without any result."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file() and Path(name).parts[0] not in RECORDS:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
    project = Project(root, root.parent / "attempts.txt")
    project.set_params(TINY)
    recipe = yaml.load(root / "data/world.yaml")
    recipe["rows"] = ROWS
    with (root / "data/world.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(recipe, file)
    project.check("git", "init", "--quiet")
    commit(project, "tiny")
    return project


def commit(project: Project, message: str) -> None:
    project.check("git", "add", "--all")
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    project.check("git", *author, "commit", "--quiet", "--allow-empty", "--message", message)
