"""Running elsewhere: deployments on Docker and Kubernetes pools of a real Prefect server, and the image's recipe.

There is no Docker here: the Dockerfile is read, not built.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.prefect_server import prefect_server
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.utilities.templating import apply_values

from flows import cluster
from flows.cluster import WORKSPACE, deployments, read_pool
from pipeline.errors import ParamsError
from pipeline.yaml_files import read_yaml

ROOT = Path(__file__).parents[2]
PORT = 4334
SETTINGS = {"MINIMIND_IMAGE": "registry.example/minimind:1", "MINIMIND_RUNS": "runs", "MLFLOW_TRACKING_URI": "http://mlflow:5000"}
KINDS = {"docker": SETTINGS, "kubernetes": {**SETTINGS, "MINIMIND_NAMESPACE": "training", "MINIMIND_GPUS": "1"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server that this process and its children talk to."""
    with prefect_server(tmp_path_factory.mktemp("prefect") / "home", PORT) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with temporary_settings({PREFECT_API_URL: variables["PREFECT_API_URL"]}):
            yield


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_every_deployment_goes_to_the_pool_and_its_job_is_one_that_the_pool_makes(
    server: None, tmp_path: Path, kind: str
) -> None:
    for name in ("prefect.yaml", "prefect.toml", "deploy", "flows", "pipeline"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    cluster.main(kind, tmp_path, {**os.environ, **KINDS[kind]})
    assert {path.name for path in (tmp_path / "deploy").iterdir()} == {path.name for path in (ROOT / "deploy").iterdir()}
    with get_client(sync_client=True) as client:
        pool = client.read_work_pool(f"minimind-{kind}")
        found = {each.name: each for each in client.read_deployments() if each.work_pool_name == pool.name}
    template = pool.base_job_template
    assert pool.type == kind and is_valid_schema(template["variables"]) is None
    declared = read_yaml(ROOT / "prefect.yaml")["deployments"]
    assert set(found) == {each["name"] for each in declared}
    for each in declared:
        deployment = found[each["name"]]
        variables = deployment.job_variables
        assert deployment.parameters == each.get("parameters", {})
        assert deployment.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": WORKSPACE}}]
        assert set(variables) <= set(template["variables"]["properties"])
        assert validate(variables, template["variables"], raise_on_error=True) == []
        job = json.dumps(apply_values(template["job_configuration"], variables))
        assert SETTINGS["MINIMIND_IMAGE"] in job and "http://mlflow:5000" in job and f"{WORKSPACE}/.runs" in job
        assert "MINIMIND_DVC_REMOTE" not in job  # unset
        if kind == "kubernetes":
            assert '"claimName": "runs"' in job and '"nvidia.com/gpu": "1"' in job


def test_only_the_work_pool_differs_from_prefect_yaml() -> None:
    local = read_yaml(ROOT / "prefect.yaml")
    for kind, settings in KINDS.items():
        pool = read_pool(kind, ROOT, settings)
        elsewhere = deployments(pool, local)["deployments"]
        assert [{**each, "work_pool": None} for each in elsewhere] == [
            {**each, "work_pool": None} for each in local["deployments"]
        ]
        assert all(each["work_pool"] == pool for each in elsewhere)
        assert pool["job_variables"]["env"] == {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}


def test_what_is_not_set_and_what_is_no_pool_is_said() -> None:
    with pytest.raises(ParamsError) as error:
        read_pool("kubernetes", ROOT, {"MINIMIND_IMAGE": "x", "MINIMIND_GPUS": ""})
    assert [line.partition(":")[0] for line in error.value.lines] == ["MINIMIND_GPUS", "MINIMIND_NAMESPACE", "MINIMIND_RUNS"]
    with pytest.raises(ParamsError, match="'slurm': deploy/pools.yaml has no such pool; it has docker, kubernetes"):
        read_pool("slurm", ROOT, {})


# The image


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_the_image_is_made_of_what_is_here_and_runs_as_a_user() -> None:
    steps = instructions()
    known = {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "USER", "ENTRYPOINT", "CMD", "ENV"}
    assert {name for name, _ in steps} == known and steps[0] == ("FROM", "python:3.11-slim")
    assert dict(steps)["WORKDIR"] == WORKSPACE and dict(steps)["USER"] == "minimind"
    assert steps.index(("USER", "minimind")) > max(index for index, (name, _) in enumerate(steps) if name == "RUN")
    for name, words in steps:
        if name == "COPY":
            assert (ROOT / shlex.split(words)[-2]).exists()
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", words], check=True)
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(words))
    pins = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch==")]
    assert len(pins) == 1  # what the step that takes PyTorch from another index installs


def test_no_data_gets_into_the_image() -> None:
    """Docker has no rules of git's: what git ignores is named again, anchored as Docker does it."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for line in (ROOT / ".gitignore").read_text().splitlines():
        if line and not line.startswith("#"):
            kept, pattern = line.startswith("!"), line.lstrip("!").rstrip("/")
            anchored = pattern[1:] if pattern.startswith("/") else f"**/{pattern}"
            assert f"{'!' * kept}{anchored}" in ignored, line
    assert {".dvc/cache", ".dvc/tmp", ".dvc/config.local"} <= set(ignored) and ".git" not in ignored
