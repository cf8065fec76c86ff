"""What dvc.yaml says, what the design wants, and what DVC really does with it."""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import dvc_here
import pytest
from ruamel.yaml import YAML

os.environ["DVC_NO_ANALYTICS"] = "1"
from dvc.dependency import ParamsDependency
from dvc.repo import Repo
from dvc.utils.serialize import _yaml

from pipeline.lineage.declaration import is_recorded

ROOT = Path(__file__).resolve().parents[1]
yaml = YAML(typ="safe", pure=True)
TRAINING = ("pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent")
SETS = ("pretrain", "full_sft", "lora", "dpo", "rlaif", "agent")
ENCODED = ("pretrain", "full_sft", "lora", "dpo")
STAGES = {"code", "tokenizer", "eval", "gate", *TRAINING, *(f"data@{s}" for s in SETS), *(f"encode@{s}" for s in ENCODED)}

# Written by hand from what each value means; the most specific prefix counts.
DIRECT = {
    **{f"data.sets.{name}.source": {f"data@{name}"} for name in SETS},
    "data.held_out_frac": {f"data@{name}" for name in SETS},
    "data.held_out_max_rows": {f"data@{name}" for name in SETS},
    "data.seed": {f"data@{name}" for name in SETS},
    # Wherever rows may be dropped: a lower share aborts the stage.
    "data.max_dropped_frac": {*(f"data@{s}" for s in SETS), *(f"encode@{s}" for s in ENCODED), "ppo", "grpo", "agent"},
    "tokenizer": {"tokenizer"},
    "model": {"pretrain"},
    **{name: {name} for name in (*TRAINING, "eval")},
    "eval.gate": {"gate"},
    **{f"{name}.max_seq_len": {f"encode@{name}"} for name in ENCODED},
    "reward.external": {"ppo", "grpo", "agent", "eval"},
    "rewards": {"ppo", "grpo", "agent", "eval"},
    **{f"rewards.{name}": {"agent"} for name in ("tool_call", "agent_clip")},  # terms of tool tasks alone
    "tools": {"agent", "eval"},  # nowhere else are calls answered
    "runtime": set(),
}

STUB = """
import hashlib, json, sys
from pathlib import Path

def value(tree, key):
    for part in key.split("."):
        tree = tree[part]
    return tree

name = "@".join([Path(sys.argv[0]).stem, *sys.argv[1:]])
stage = json.loads(Path("stubs.json").read_text())[name]
params = json.loads(Path("params.yaml").read_text())
seen = hashlib.sha256(json.dumps([value(params, key) for key in stage["params"]]).encode())
for dep in stage["deps"]:
    for path in sorted(Path(dep).rglob("*")) if Path(dep).is_dir() else [Path(dep)]:
        seen.update(path.read_bytes() if path.is_file() and path.suffix != ".pyc" else b"")
for out in map(Path, stage["outs"]):
    path = out if out.suffix else out / "content.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"x": int(seen.hexdigest()[:8], 16)}))
with open("ran.txt", "a") as ran:
    ran.write(name + "\\n")
"""


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        found.update(leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


PARAMS = yaml.load(ROOT / "params.yaml")
KEYS = leaves(PARAMS)


def expected(key: str) -> set[str]:
    while key not in DIRECT:
        key = key.rpartition(".")[0]
    return DIRECT[key]


class Lineage:
    """dvc.yaml as DVC resolves it."""

    def __init__(self, root: Path) -> None:
        with Repo(str(root)) as repo:
            stages = list(repo.index.stages)
            self.deps, self.params, self.outs, self.cmd = {}, {}, {}, {}
            for stage in stages:
                self.cmd[stage.name] = stage.cmd
                self.deps[stage.name] = [str(d.def_path) for d in stage.deps if not isinstance(d, ParamsDependency)]
                self.params[stage.name] = [p for d in stage.deps if isinstance(d, ParamsDependency) for p in d.params]
                self.outs[stage.name] = {str(o.def_path): o for o in stage.outs}

    def downstream(self, names: set[str]) -> set[str]:
        """`names` and every stage that reads, directly or not, what they write."""
        while True:
            written = {out for name in names for out in self.outs[name]}
            more = {name for name, deps in self.deps.items() if written & set(deps)} | names
            if more == names:
                return names
            names = more


@pytest.fixture(scope="module", autouse=True)
def each_text_is_parsed_once() -> Iterator[None]:
    """DVC parses params.yaml anew for every stage and every hash of it, which is most of what its commands take here."""
    parse = _yaml.parse_yaml
    trees: dict[tuple[str, str], Any] = {}

    def remembered(text: str, path: str, typ: str = "safe") -> Any:
        if typ != "safe":
            return parse(text, path, typ)
        key = text, str(path)
        if key not in trees:
            trees[key] = parse(text, path)
        return copy.deepcopy(trees[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_yaml, "parse_yaml", remembered)
        yield


@pytest.fixture(scope="module")
def lineage() -> Lineage:
    return Lineage(ROOT)


def templated_paths() -> dict[str, set[str]]:
    """Key -> stages whose `deps` hold `${key}`; such a key needs no line in `params`."""
    found: dict[str, set[str]] = {}
    for name, stage in yaml.load(ROOT / "dvc.yaml")["stages"].items():
        for dep in stage.get("do", stage)["deps"]:
            for key in re.findall(r"\$\{([\w.]+)\}", dep):
                if key == "item.source":
                    for item in SETS:
                        found.setdefault(f"data.sets.{item}.source", set()).add(f"{name}@{item}")
                elif key not in ("item", "key"):
                    found.setdefault(key, set()).add(name)
    return found


def listed(lineage: Lineage, key: str) -> set[str]:
    by_params = {name for name, keys in lineage.params.items() if any(key == k or key.startswith(f"{k}.") for k in keys)}
    return by_params | templated_paths().get(key, set())


def test_stages_and_what_each_writes(lineage: Lineage) -> None:
    assert set(lineage.cmd) == STAGES
    scripts = {name.partition("@")[0] for name in STAGES} - {"code"}
    assert set(lineage.outs["code"]) == {f"data/code/{name}.json" for name in scripts}
    for name, cmd in lineage.cmd.items():
        assert cmd == "exec python -m stages." + name.replace("@", " ")
        if name != "code":
            assert f"data/code/{name.partition('@')[0]}.json" in lineage.deps[name]
    for name in TRAINING:
        assert {f"checkpoints/{name}.pth", f"checkpoints/{name}.json"} < set(lineage.outs[name])
        assert lineage.outs[name][f"plots/{name}.csv"].plot["x"] == "step"
    for name in (*TRAINING, "tokenizer", "eval"):
        metric = lineage.outs[name][f"metrics/{name}.json"]
        assert metric.metric and not metric.use_cache


def test_artifacts_name_every_checkpoint() -> None:
    artifacts = yaml.load(ROOT / "dvc.yaml")["artifacts"]
    assert {name: a["path"] for name, a in artifacts.items()} == {
        f"minimind-{name.replace('_', '-')}": f"checkpoints/{name}.pth" for name in TRAINING
    }
    assert {a["type"] for a in artifacts.values()} == {"model"}


@pytest.mark.parametrize("name", [n for n in sorted(STAGES) if n not in ("code",) and not n.startswith("data@")])
def test_inputs_come_from_a_stage_or_from_the_user(lineage: Lineage, name: str) -> None:
    written = {out for outs in lineage.outs.values() for out in outs}
    assert [dep for dep in lineage.deps[name] if dep not in written and dep != "external/None"] == []


def test_outs_are_ignored_by_git_and_records_are_not(lineage: Lineage) -> None:
    outs = {path: out.use_cache for outs in lineage.outs.values() for path, out in outs.items()}
    probes = [path if Path(path).suffix else f"{path}/file" for path in outs]
    answer = subprocess.run(["git", "check-ignore", "--no-index", *probes], cwd=ROOT, capture_output=True, text=True)
    ignored = set(answer.stdout.split())
    assert {path: probe in ignored for path, probe in zip(outs, probes, strict=True)} == outs


@pytest.mark.parametrize("key", KEYS)
def test_key_is_listed_by_the_stages_it_decides(lineage: Lineage, key: str) -> None:
    assert listed(lineage, key) == expected(key)


def test_every_key_but_runtime_decides_something() -> None:
    assert {key for key in KEYS if not expected(key)} == {key for key in KEYS if key.startswith("runtime.")}


@pytest.fixture(scope="module")
def scratch(lineage: Lineage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with this dvc.yaml and these parameters whose stages only hash what they declare; brought up to date."""
    folder = tmp_path_factory.mktemp("scratch")
    for name in ("dvc.yaml", ".gitignore", ".dvcignore", "external/None"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("stages", "pipeline", "data", "external/other"):
        (folder / name).mkdir()
    for name in {name.partition("@")[0] for name in STAGES}:
        (folder / f"stages/{name}.py").write_text(STUB)
    (folder / "pipeline/__init__.py").write_text("")
    (folder / "data/world.yaml").write_text("seed: 1\n")
    (folder / "data/other.jsonl").write_text("{}\n")
    (folder / "external/other/weights").write_text("1")
    write(folder, set())
    write_stubs(folder, lineage)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    dvc_here.init(folder, no_scm=False)
    dvc_here.reproduce(folder)
    assert set((folder / "ran.txt").read_text().split()) == STAGES
    return folder


def write_stubs(folder: Path, lineage: Lineage) -> None:
    """What each stub reads and writes."""
    stubs = {
        name: {"deps": lineage.deps[name], "params": lineage.params[name], "outs": list(lineage.outs[name])} for name in STAGES
    }
    (folder / "stubs.json").write_text(json.dumps(stubs))


def changed(key: str, value: Any) -> Any:
    if key.startswith("data.sets."):
        return "data/other.jsonl"
    if value is None and key != "model.rope_scaling":
        return "other"
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[1:]
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


def write(folder: Path, changes: set[str]) -> None:
    """params.yaml with every key of `changes` changed; JSON is YAML, and a stub reads it in no time."""
    tree = json.loads(json.dumps(PARAMS))
    for key in changes:
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section[part]
        section[last] = changed(key, KEYS[key])
    (folder / "params.yaml").write_text(json.dumps(tree))


@pytest.mark.slow
def test_dvc_sees_every_listed_key(scratch: Path, lineage: Lineage) -> None:
    write(scratch, set(KEYS))
    said = dvc_here.status(scratch)
    write(scratch, set())
    for name in STAGES - {"code"}:
        found = {key: answer for part in said.get(name, []) for key, answer in part.get("changed deps", {}).items()}
        assert set(found.get("params.yaml", {})) == set(lineage.params[name])
        sources = {
            "data/other.jsonl" if key.startswith("data.") else "external/other"
            for key, names in templated_paths().items()
            if name in names
        }
        assert {key for key in found if key.startswith(("external/other", "data/other"))} == sources


@pytest.mark.slow
def test_dvc_reruns_the_stages_that_list_a_key_and_all_that_follow(scratch: Path, lineage: Lineage) -> None:
    changes: set[str] = set()
    for keys in ({"runtime.threads", "rewards.answer"}, {"lora.max_seq_len", "data.sets.agent.source"}):
        changes |= keys
        write(scratch, changes)
        write_stubs(scratch, Lineage(scratch))
        (scratch / "ran.txt").write_text("")
        dvc_here.reproduce(scratch)
        wanted = lineage.downstream(set().union(*map(expected, keys)))
        assert set((scratch / "ran.txt").read_text().split()) == wanted, keys


@pytest.mark.slow
@pytest.mark.parametrize("there", [set(), set(templated_paths())], ids=["from none", "from all"])
def test_a_file_that_is_named_or_named_no_more_reruns_the_stages_it_decides(scratch: Path, there: set[str]) -> None:
    """Two keys may resolve to one path, `external/None` or `external/other`: DVC does not miss the input that is gone."""
    write(scratch, there)
    with chdir(scratch), Repo() as repo:
        repo.commit(force=True)  # records what is there as made with it
    for key in templated_paths():
        write(scratch, there ^ {key})
        assert set(dvc_here.status(scratch)) == expected(key), key
    write(scratch, there)
    assert dvc_here.status(scratch) == {}


def test_a_lock_file_that_dvc_is_writing_for_a_sibling_ends_no_stage(tmp_path: Path) -> None:
    lock = """schema: '2.0'
stages:
  grpo:
    cmd: exec python -m stages.grpo
    deps:
    - path: data/code/grpo.json
      hash: md5
      md5: aaaa
      size: 3
    params:
      params.yaml:
        grpo.lr: 0.0001
    outs:
    - path: checkpoints/grpo.pth
      md5: bbbb
"""
    path = tmp_path / "dvc.lock"
    known = []
    for size in range(len(lock) + 1):
        path.write_text(lock[:size])
        known.append(is_recorded("grpo", {"grpo": {"lr": 1e-4}}, {"data/code/grpo.json": "aaaa"}, path))
    assert known[-1] and not any(known[: lock.index("0.0001")])
    assert not is_recorded("grpo", {"grpo": {"lr": 2e-4}}, {"data/code/grpo.json": "aaaa"}, path)
    assert not is_recorded("grpo", {"grpo": {"lr": 1e-4}}, {"data/code/grpo.json": "cccc"}, path)
    assert not is_recorded("grpo", {"grpo": {"lr": 1e-4}}, {}, path)  # an input of then is none any more
    assert not is_recorded("grpo", {"grpo": {"lr": 1e-4}}, {}, tmp_path / "none")
