"""Profiles: complete parameter files that `python -m pipeline use` copies to `params.yaml`."""

import difflib
from pathlib import Path

from pipeline.errors import ParamsError
from pipeline.lineage.git import bytes_at
from pipeline.params import parse_params
from pipeline.yaml_files import read_yaml


def use_profile(name: str, root: Path, *, force: bool = False) -> None:
    """Writes `root/profiles/<name>.yaml` to `root/params.yaml`.

    Args:
        name: a file's stem in `root/profiles`.
        root: the repository.
        force: also when the present `params.yaml` holds edits that would be lost.

    Raises:
        ParamsError: no such profile or no profiles at all, the profile is not valid, `params.yaml` equals neither HEAD's nor a
            profile, or cannot be written.
    """
    profiles = {path.stem: path for path in sorted((root / "profiles").glob("*.yaml")) if path.is_file()}
    if not profiles:
        raise ParamsError(f"{root}: has no profiles/*.yaml, so it is not the repository root; run the command there")
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "known: " + ", ".join(profiles)
        raise ParamsError(f"profile {name!r}: no such file in profiles/; {hint}")
    parse_params(read_yaml(profiles[name]), f"profiles/{name}.yaml")
    target = root / "params.yaml"
    try:
        if not force and target.exists() and not _is_kept_elsewhere(target, list(profiles.values())):
            raise ParamsError(
                "params.yaml: holds edits that are neither committed nor a profile; commit them, or add --force to lose them"
            )
        target.write_bytes(profiles[name].read_bytes())
    except OSError as error:
        raise ParamsError(
            f"{error.filename or target}: {error.strerror}; params.yaml must be a file that can be replaced"
        ) from None


def _is_kept_elsewhere(target: Path, profiles: list[Path]) -> bool:
    held = target.read_bytes()
    return held in [path.read_bytes() for path in profiles] or held == bytes_at(target.parent, "HEAD", target.name)
