"""The command line: `python -m pipeline COMMAND`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import PipelineError
from pipeline.lineage.profiles import use_profile

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _commands() -> None:
    """Train a small chat model from raw text to tool-using agent."""


@app.command()
def use(
    profile: Annotated[str, typer.Argument(help="the name of a file in profiles/, without .yaml")],
    force: Annotated[bool, typer.Option("--force", help="overwrite edits that are neither committed nor a profile")] = False,
) -> None:
    """Copy a profile to params.yaml."""
    use_profile(profile, Path.cwd(), force=force)
    typer.echo(f"params.yaml now holds profile {profile}; `dvc repro` runs what that changes")


def main() -> None:
    """Runs one command; a `PipelineError` ends as its lines on stderr and its exit code."""
    try:
        app()
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
