"""Profiles are complete and valid, and `use` never loses edits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ParamsError
from pipeline.lineage.profiles import use_profile
from pipeline.params import parse_params
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("micro", "minimind", "minimind-moe")


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        found.update(leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_profile_is_valid_and_complete(name: str) -> None:
    tree = read_yaml(ROOT / f"profiles/{name}.yaml")
    parse_params(tree, name)
    assert set(leaves(tree)) == set(leaves(read_yaml(ROOT / "profiles/micro.yaml")))


def test_params_are_profile_micro() -> None:
    assert (ROOT / "params.yaml").read_bytes() == (ROOT / "profiles/micro.yaml").read_bytes()


def test_expert_profile_differs_in_the_experts_alone() -> None:
    dense, experts = (leaves(read_yaml(ROOT / f"profiles/{name}.yaml")) for name in ("minimind", "minimind-moe"))
    assert {key: (dense[key], experts[key]) for key in dense if dense[key] != experts[key]} == {"model.use_moe": (False, True)}
    assert experts["model.num_experts_per_tok"] == 1 and experts["model.norm_topk_prob"] is False


def test_minimind_has_the_published_number_of_parameters() -> None:
    """Counted by hand from the shapes: 63,912,192 dense; 198,416,640 with experts, 63,936,768 of them active."""
    for name, expected in (("minimind", 63_912_192), ("minimind-moe", 198_416_640)):
        params = parse_params(read_yaml(ROOT / f"profiles/{name}.yaml"))
        model, width, head = params.model, params.model.hidden_size, params.model.head_dim
        attention = 2 * width * head * (model.num_attention_heads + model.num_key_value_heads) + 2 * head
        mlp = 3 * width * model.intermediate_size
        if model.use_moe:
            mlp = model.num_experts * (3 * width * model.moe_intermediate_size + width)
        layers = model.num_hidden_layers * (attention + mlp + 2 * width)
        assert params.tokenizer.vocab_size * width + layers + width == expected


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    for name in NAMES:
        (tmp_path / f"profiles/{name}.yaml").write_bytes((ROOT / f"profiles/{name}.yaml").read_bytes())
    (tmp_path / "params.yaml").write_text("# mine, committed\n", encoding="utf-8")
    for command in ("init -q", "add params.yaml", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def use(project: Path, *args: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pipeline", "use", *args]
    done = subprocess.run(
        command, cwd=project, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_use_replaces_a_committed_file_or_a_profile(project: Path) -> None:
    for name in ("minimind", "minimind-moe", "micro"):
        use_profile(name, project)
        assert (project / "params.yaml").read_bytes() == (project / f"profiles/{name}.yaml").read_bytes()


def test_use_writes_a_missing_file(project: Path) -> None:
    (project / "params.yaml").unlink()
    use_profile("micro", project)
    assert (project / "params.yaml").exists()


def test_use_refuses_to_lose_edits(project: Path) -> None:
    edited = (project / "profiles/micro.yaml").read_text(encoding="utf-8").replace("lr: 5.0e-4", "lr: 4.0e-4", 1)
    (project / "params.yaml").write_text(edited, encoding="utf-8")
    code, said = use(project, "minimind")
    assert (code, said.count("\n")) == (2, 1) and "--force" in said
    assert (project / "params.yaml").read_text(encoding="utf-8") == edited
    assert use(project, "minimind", "--force") == (0, "")
    assert (project / "params.yaml").read_bytes() == (project / "profiles/minimind.yaml").read_bytes()


def test_use_outside_git_knows_the_profiles_alone(project: Path) -> None:
    (project / ".git").rename(project / "no-git")
    with pytest.raises(ParamsError, match="--force"):
        use_profile("micro", project)


def test_what_is_no_file_is_one_line(project: Path) -> None:
    (project / "params.yaml").unlink()
    (project / "params.yaml").mkdir()
    for force in ([], ["--force"]):
        code, said = use(project, "micro", *force)
        assert (code, said.count("\n")) == (2, 1) and "params.yaml: Is a directory; " in said
    (project / "params.yaml").rmdir()
    (project / "profiles/folder.yaml").mkdir()
    assert use(project, "folder")[1].startswith("profile 'folder': no such file in profiles/; known: micro, minimind")
    (project / "params.yaml").write_text("# mine\n", encoding="utf-8")
    code, said = use(project, "micro")
    assert (code, said.count("\n")) == (2, 1) and "--force" in said


def test_outside_the_root_it_says_so(project: Path) -> None:
    (project / "data").mkdir()
    code, said = use(project / "data", "micro")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"{project / 'data'}: ") and "not the repository root" in said


def test_unknown_and_invalid_profiles(project: Path) -> None:
    assert use(project, "minimind-mow") == (
        2,
        "profile 'minimind-mow': no such file in profiles/; did you mean `minimind-moe`?\n",
    )
    (project / "profiles/mine.yaml").write_text(
        (project / "profiles/micro.yaml").read_text(encoding="utf-8").replace("group_size: 6", "group_size: 1", 1),
        encoding="utf-8",
    )
    code, said = use(project, "mine")
    assert code == 2 and said.startswith("profiles/mine.yaml: grpo.group_size=1: ")
    assert (project / "params.yaml").read_text(encoding="utf-8") == "# mine, committed\n"
