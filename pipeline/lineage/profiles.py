"""Profiles: complete parameter files that `python -m pipeline use` copies to `params.yaml`."""

import difflib
import subprocess
from pathlib import Path

from pipeline.errors import ParamsError
from pipeline.params import parse_params
from pipeline.yaml_files import read_yaml


def use_profile(name: str, root: Path, *, force: bool = False) -> None:
    """Writes `root/profiles/<name>.yaml` to `root/params.yaml`.

    Args:
        name: a file's stem in `root/profiles`.
        root: the repository.
        force: also when the present `params.yaml` holds edits that would be lost.

    Raises:
        ParamsError: no such profile, the profile is not valid, or `params.yaml` equals neither HEAD's nor a profile.
    """
    profiles = {path.stem: path for path in sorted((root / "profiles").glob("*.yaml"))}
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "known: " + ", ".join(profiles)
        raise ParamsError(f"profile {name!r}: no such file in profiles/; {hint}")
    parse_params(read_yaml(profiles[name]), f"profiles/{name}.yaml")
    target = root / "params.yaml"
    if (
        not force
        and target.exists()
        and target.read_bytes() not in [_committed(root), *(p.read_bytes() for p in profiles.values())]
    ):
        raise ParamsError(
            "params.yaml: holds edits that are neither committed nor a profile; commit them, or add --force to lose them"
        )
    target.write_bytes(profiles[name].read_bytes())


def _committed(root: Path) -> bytes | None:
    """HEAD's `params.yaml`; None outside git or where HEAD has none."""
    shown = subprocess.run(["git", "show", "HEAD:./params.yaml"], cwd=root, capture_output=True, check=False)
    return shown.stdout if shown.returncode == 0 else None
