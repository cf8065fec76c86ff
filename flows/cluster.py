"""The deployments of prefect.yaml on a work pool elsewhere: `python -m flows.cluster docker`, or kubernetes.

Which stages there are stands in prefect.yaml alone; deploy/pools.yaml says where they run. docs/cluster.md is the page for users.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.errors import ParamsError, PipelineError
from pipeline.terminal import bear_any_locale, say, show

ROOT = Path(__file__).resolve().parents[1]
WORKSPACE = "/workspace"
"""Where the image has the repository."""
STOP_S = 60
"""What Kubernetes gives a pod between asking and killing: a trainer saves within 25 s."""
_PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]
_VARIABLE = re.compile(r"\{\{ \$(\w+) \}\}")
_yaml = YAML(typ="safe", pure=True)


def main(kind: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> None:
    """Makes the work pool, or brings it up to date, and deploys every flow to it.

    Raises:
        ParamsError: deploy/pools.yaml has no such pool, or the environment lacks a variable that it needs.
        PipelineError: Prefect refuses.
    """
    pool = read_pool(kind, root, environment)
    with tempfile.TemporaryDirectory(dir=root / "deploy") as folder:
        template = Path(folder) / "template.json"
        template.write_text(json.dumps(job_template(kind)), encoding="utf-8")
        _prefect(root, "work-pool", "create", pool["name"], "--type", kind, "--overwrite", "--base-job-template", str(template))
        variant = Path(folder) / "prefect.yaml"
        with variant.open("w", encoding="utf-8") as file:
            _yaml.dump(deployments(pool, _yaml.load(root / "prefect.yaml")), file)
        _prefect(root, "deploy", "--all", "--prefect-file", str(variant.relative_to(root)))
    show(f"{pool['name']}: ready; a worker beside the machines: prefect worker start --pool {pool['name']} --type {kind}")


def read_pool(kind: str, root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The pool's entry in deploy/pools.yaml with the variables filled in."""
    pools = _yaml.load(root / "deploy" / "pools.yaml")
    if kind not in pools:
        raise ParamsError(f"{kind!r}: deploy/pools.yaml has no such pool; it has {', '.join(pools)}")
    pool: dict[str, Any] = pools[kind]
    env = pool["job_variables"]["env"]
    pool["job_variables"]["env"] = {key: text for key, text in env.items() if not _unset(text, environment)}
    if missing := sorted(set(_unset(json.dumps(pool), environment))):
        raise ParamsError(
            *(f"{name}: not set, and pool {kind} of deploy/pools.yaml needs it; docs/cluster.md" for name in missing)
        )
    filled: dict[str, Any] = json.loads(_VARIABLE.sub(lambda match: json.dumps(environment[match[1]])[1:-1], json.dumps(pool)))
    return filled


def _unset(text: str, environment: Mapping[str, str]) -> list[str]:
    return [name for name in _VARIABLE.findall(text) if not environment.get(name)]


def deployments(pool: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """prefect.yaml with another work pool for every deployment; the code is in the image."""
    return {
        "name": local["name"],
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": WORKSPACE}}],
        "deployments": [{**each, "work_pool": dict(pool)} for each in local["deployments"]],
    }


def job_template(kind: str) -> dict[str, Any]:
    """Prefect's own for this kind of pool; in Kubernetes' with a claim for `.runs`, GPUs, and time to save.

    Raises:
        PipelineError: this Prefect knows no such kind.
    """
    template: dict[str, Any] = json.loads(_prefect(ROOT, "work-pool", "get-default-base-job-template", "--type", kind))
    if kind != "kubernetes":
        return template
    template["variables"]["properties"] |= {
        "runs_claim": {"type": "string", "title": "Claim", "description": "The PersistentVolumeClaim that holds .runs."},
        "gpus": {"type": "string", "title": "GPUs", "description": "GPUs of each flow run.", "default": "0"},
    }
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = STOP_S
    pod["securityContext"] = {"fsGroup": 1000}  # the image's user owns what it writes
    pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": "{{ runs_claim }}"}}]
    (container,) = pod["containers"]
    container["volumeMounts"] = [{"name": "runs", "mountPath": f"{WORKSPACE}/.runs"}]
    container["resources"]["limits"]["nvidia.com/gpu"] = "{{ gpus }}"
    return template


def _prefect(root: Path, *arguments: str) -> str:
    """What a Prefect command prints.

    Raises:
        PipelineError: it failed.
    """
    done = subprocess.run([*_PREFECT, *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise PipelineError(f"`prefect {' '.join(arguments[:2])}` failed: {said[-500:]}")
    return done.stdout


if __name__ == "__main__":
    bear_any_locale()
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
    except PipelineError as error:
        say(error)
        raise SystemExit(error.exit_code) from None
