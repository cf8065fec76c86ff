"""A lineage in git with this repository's params.yaml and stages of a moment: what experiments need, without training."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DVC = """
stages:
  code:
    cmd: exec python -m stages.run code
    deps: [stages, pipeline]
    outs: [code.txt]
  base:
    cmd: exec python -m stages.run base
    deps: [code.txt, data/raw/rows.jsonl]
    params: [pretrain.lr]
    outs: [base.txt]
  grpo:
    cmd: exec python -m stages.run grpo
    deps: [base.txt, code.txt]
    params: [grpo.lr, grpo.kl_coef]
    outs: [grpo.txt]
    metrics: [metrics/grpo.json: {cache: false}]
  eval:
    cmd: exec python -m stages.run eval
    deps: [grpo.txt]
    outs: [eval.txt]
"""
# `ran.txt` of the home lists what ran where. grpo fails while `fails` lies there, and waits while `slow` does, until it is told
# to stop. Its metric falls with the rate.
RUN = """
import json, os, signal, sys, time
from pathlib import Path
from ruamel.yaml import YAML
from pipeline.factor import FACTOR

name, home = sys.argv[1], Path(os.environ.get("MINIMIND_HOME", "."))
params = YAML(typ="safe").load(Path("params.yaml"))
lr = params["grpo"]["lr"]
with (home / "ran.txt").open("a") as ran:
    ran.write(f"{name} {lr:g} {Path.cwd() == home.resolve()}\\n")
if name == "code":
    Path("code.txt").write_text(f"factor {FACTOR}\\n")
if name == "base":
    Path("base.txt").write_text(Path("data/raw/rows.jsonl").read_text() + str(params["pretrain"]["lr"]))
if name == "grpo":
    if (home / "fails").exists() and lr > 0.5:
        print("grpo: told to fail", file=sys.stderr)
        sys.exit(2)
    if (home / "slow").exists():
        signal.signal(signal.SIGTERM, lambda *_: ((home / f"saved-{lr:g}").touch(), os._exit(143)))
        (home / f"started-{lr:g}").touch()
        time.sleep(600)
    Path("grpo.txt").write_text(Path("base.txt").read_text() + str(lr))
    Path("metrics/grpo.json").write_text(json.dumps({"reward/mean": FACTOR - lr, "policy/ref_kl": 0.5}))
if name == "eval":
    Path("eval.txt").write_text(Path("grpo.txt").read_text())
"""
IGNORED = ("__pycache__/", "/.runs/", "/ran.txt", "/code.txt", "/base.txt", "/grpo.txt", "/eval.txt", "/data/raw/")
IGNORED += ("/fails", "/slow", "/saved-*", "/started-*")


def make(root: Path) -> Path:
    """The lineage in a new git repository, up to date and committed; `root/ran.txt` is empty."""
    for name, text in {
        "dvc.yaml": DVC,
        "stages/run.py": RUN,
        "stages/__init__.py": "",
        "pipeline/__init__.py": "",
        "pipeline/factor.py": "FACTOR = 10\n",
        ".gitignore": "\n".join(IGNORED) + "\n",
        ".dvcignore": "__pycache__/\n.runs/\n",
        "data/raw/rows.jsonl": "{}\n",
        "metrics/README.md": "What stages measured.\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(ROOT / "params.yaml", root)
    git(root, "init", "--quiet")
    dvc(root, "init", "--quiet")
    dvc(root, "repro", "--quiet")
    commit(root, "lineage")
    (root / "ran.txt").write_text("")
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message", message)


def dvc(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def ran(root: Path) -> list[str]:
    """`stage rate` of what ran in isolated copies, in order; what ran in the workspace itself raises."""
    lines = (root / "ran.txt").read_text().splitlines()
    assert not [line for line in lines if line.endswith("True")], lines
    return [line.rpartition(" ")[0] for line in lines]
