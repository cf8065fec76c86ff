"""What `make` sets up: which Python it takes, and that its tools work without activation."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")


def make(folder: Path, *arguments: str) -> tuple[int, str]:
    """`make setup` of a copy that sees no other programs than those of `folder/bin`."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).touch()
    assert MAKE is not None
    environment = {"PATH": str(folder / "bin")}
    done = subprocess.run([MAKE, "setup", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def put(path: Path, code: int) -> None:
    """A `python` that answers what it is asked for its version, and says what it was called with."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "called {path.name} $*"\nexit {code}\n')
    path.chmod(0o755)


@pytest.mark.skipif(MAKE is None, reason="no make")
def test_make_takes_the_first_python_that_fits(tmp_path: Path) -> None:
    put(tmp_path / "bin/python3.11", 127)  # a version manager's stub
    put(tmp_path / "bin/python3.13", 0)
    put(tmp_path / "bin/python3", 0)
    assert "called python3.13 -m venv .venv" in make(tmp_path)[1]
    assert "called python3 -m venv .venv" in make(tmp_path, "PYTHON=python3")[1]


@pytest.mark.skipif(MAKE is None, reason="no make")
def test_make_says_which_pythons_fit_where_none_does(tmp_path: Path) -> None:
    put(tmp_path / "bin/python3", 1)  # another version
    code, said = make(tmp_path)
    assert code == 2 and "Python 3.11, 3.12 or 3.13 is needed, and none is in PATH" in said and "called" not in said


FINE = ("a b", "it's 100%", "a?b#1", "模型 é", "a;b&c", "a*[b]", "(1), 2", " a")
UNFIT = ("a:b", "a$b", "$(shell touch hit)", 'a"b', "a`touch hit`b", "a\\b")


@pytest.mark.skipif(MAKE is None, reason="no make")
@pytest.mark.parametrize("name", FINE)
def test_make_works_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """The environment is real; what is run in it only says so."""
    folder = tmp_path / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    activated = ["/bin/sh", "-c", ". .venv/bin/activate && cd / && command -v python"]
    found = subprocess.run(activated, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert found == f"{folder}/.venv/bin/python\n"
    (folder / ".venv/bin/python").unlink()  # a link
    for program in (".venv/bin/python", ".venv/bin/dvc", "bin/cp", "bin/touch"):
        put(folder / program, 0)
    code, said = make(folder, "repro")
    assert code == 0 and "called python -m pip install" in said and said.endswith("called dvc repro\n")


@pytest.mark.skipif(MAKE is None, reason="no make")
@pytest.mark.parametrize("name", UNFIT)
def test_make_refuses_a_folder_in_which_an_environment_breaks(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    put(folder / "bin/python3.11", 0)
    code, said = make(folder)
    assert code == 2 and f'{folder}: the path has one of : $ " ` \\, which' in said and "rename that folder" in said
    assert sorted(os.listdir(folder)) == ["Makefile", "bin", "pyproject.toml", "requirements.lock"]  # nothing ran


def test_the_pythons_of_make_are_those_of_the_package() -> None:
    wanted = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"])
    assert [minor for minor in range(8, 20) if f"3.{minor}.1" in wanted] == [11, 12, 13]
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="an environment that make did not set up")
def test_dvc_runs_a_stage_without_activation(tmp_path: Path) -> None:
    """Else it deletes the outputs of a stage, and then finds no `python` for its command."""
    (tmp_path / "dvc.yaml").write_text(
        'stages:\n  here:\n    cmd: exec python -c \'import sys; open("out", "w").write(sys.prefix)\'\n    outs: [out]\n'
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("PATH", "VIRTUAL_ENV")}
    for arguments in (["init", "--no-scm", "-q"], ["repro", "-q"]):
        subprocess.run(
            [ROOT / ".venv/bin/dvc", *arguments], cwd=tmp_path, env=environment | {"PATH": "/usr/bin:/bin"}, check=True
        )
    assert (tmp_path / "out").read_text() == sys.prefix
