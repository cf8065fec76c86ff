"""The command line: `python -m pipeline COMMAND`."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.profiles import use_profile
from pipeline.params import load_params
from pipeline.terminal import bear_any_locale, escaped
from pipeline.tracking.home import home
from pipeline.tracking.leftovers import KEEP_DAYS

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def echo(line: object) -> None:
    """Prints a line."""
    typer.echo(escaped(line))


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
    echo(f"params.yaml now holds profile {profile}; `dvc repro` runs what that changes")


@app.command()
def check() -> None:
    """Validate params.yaml, whatever DVC would run."""
    from pipeline.tracking.outlook import missing_sources, never_warm

    params = load_params()
    echo("params.yaml is valid")
    for line in (*missing_sources(params, Path.cwd()), *never_warm(params, Path.cwd())):
        echo(f"warning: {line}")


@app.command()
def plan(
    targets: Annotated[list[str] | None, typer.Argument(help="stages to bring up to date; all when left out")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE in place of what params.yaml has; repeatable")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say which stages `dvc repro` would run, why, and how long that may take."""
    from pipeline.lineage.overrides import check_overrides, parse_overrides
    from pipeline.lineage.plan import read_plan  # imports DVC
    from pipeline.reading.forecast import as_json as json_of
    from pipeline.reading.forecast import as_text, forecast

    overrides = parse_overrides(set_ or [])
    check_overrides(Path.cwd(), overrides)
    forecasts = forecast(read_plan(Path.cwd(), targets or (), overrides=overrides), Path.cwd(), home(Path.cwd()))
    for line in [json_of(forecasts)] if as_json else as_text(forecasts):
        echo(line)


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Show the lineage as a tree: state, age, key metric and run of every stage."""
    from pipeline.lineage.plan import read_plan  # imports DVC
    from pipeline.reading.status import as_json as json_of
    from pipeline.reading.status import print_status
    from pipeline.reading.status import status as states_of

    states = states_of(read_plan(Path.cwd()), Path.cwd(), home(Path.cwd()))
    if as_json:
        echo(json_of(states))
    else:
        print_status(states)


@app.command()
def cost(
    target: Annotated[str | None, typer.Argument(help="a stage; all stages when left out")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Add up what a model's lineage cost: time, tokens, energy; and what the last rebuild did not have to run again."""
    from pipeline.reading import cost as command

    costs = command.bill(Path.cwd(), home(Path.cwd()), target)
    for line in [command.as_json(costs)] if as_json else command.as_text(costs):
        echo(line)


@app.command()
def replay(
    runs: Annotated[list[str] | None, typer.Argument(help="run folders, stages (their newest run), ids of MLflow runs")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every ended run that MLflow has not wholly")] = False,
) -> None:
    """Send MLflow what it lacks of runs: while it was away, or into another store (MLFLOW_TRACKING_URI)."""
    from pipeline.tracking.records import find_runs
    from pipeline.tracking.replay import incomplete_runs, send_missing  # imports MLflow
    from pipeline.tracking.store import limit_waiting

    if bool(runs) == everything:
        raise ParamsError("replay: name runs, or give --all")
    limit_waiting()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    folders = incomplete_runs(Path.cwd(), uri) if everything else find_runs(Path.cwd(), runs or [])
    if not folders:
        echo("replay: MLflow has all runs")
    for line in send_missing(folders, uri):
        echo(line)


@app.command()
def relocate() -> None:
    """Make MLflow's store this folder's own after the folder was copied or moved."""
    from pipeline.tracking.relocation import relocate as command

    for line in command(Path.cwd()):
        echo(line)


@app.command("replay-step")
def replay_step(
    run: Annotated[str, typer.Argument(help="a run folder, a stage (its newest run) or the id of an MLflow run")],
    step: Annotated[int, typer.Argument(help="a logged step, from 1", min=1)],
    rows: Annotated[bool, typer.Option("--rows", help="every completion with its reward, terms and advantage, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Compute a step of ppo, grpo or agent again from what it sampled, and compare it with the record."""
    from pipeline.reading import agreement
    from pipeline.reading import replayed as command
    from pipeline.tracking.records import find_runs
    from stages import agent, grpo, ppo

    scripts = {"ppo": ppo.open_task, "grpo": grpo.open_task, "agent": agent.open_task}
    (folder,) = find_runs(home(Path.cwd()), [run])
    replayed = command.replay_step(Path.cwd(), home(Path.cwd()), folder, step, scripts)
    if as_json:
        echo(agreement.as_json(replayed, rows=rows))
    else:
        agreement.print_replayed(replayed, rows=rows)
    if replayed.apart:
        raise PipelineError(agreement.summary(replayed))
    if not as_json:
        echo(agreement.summary(replayed))


@app.command()
def gc(
    keep: Annotated[int, typer.Option(help="finished runs of each stage that keep samples, rollouts and logs", min=1)] = 5,
    days: Annotated[
        float, typer.Option(help="unfinished runs and caches stay this long after their last use", min=0)
    ] = KEEP_DAYS,
    records: Annotated[bool, typer.Option("--records", help="finished runs beyond `keep` go with their records")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="remove it; without this nothing is removed")] = False,
) -> None:
    """Bound .runs, DVC's cache and MLflow's artifacts. Nothing goes that a rerun or a resume needs."""
    from pipeline.lineage.housekeeping import collect
    from pipeline.tracking.leftovers import DAY_S, Limits
    from pipeline.tracking.store import limit_waiting

    limit_waiting()
    for line in collect(Path.cwd(), Limits(keep, days * DAY_S, keep_records=not records), remove=yes):
        echo(line)


Html = Annotated[Path | None, typer.Option("--html", metavar="PAGE", help="write it as one self-contained page, with curves")]


@app.command()
def whence(
    file: Annotated[Path, typer.Argument(help="a checkpoint, or anything else that a stage wrote or read, under any name")],
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    html: Html = None,
) -> None:
    """Say where a file came from: stage, commit, parameters, parents up to the corpus, run, evaluation."""
    from pipeline.lineage import whence as command

    root, runs = Path.cwd(), home(Path.cwd()) / ".runs"
    if html is not None:
        from pipeline.pages.page import write_page
        from pipeline.pages.whence_page import whence_page

        echo(write_page(html, whence_page(command.whence(file, root, runs), root)))
        return
    found = command.trace(file, root, runs)
    for line in [command.as_json(found)] if as_json else command.as_text(found):
        echo(line)


@app.command()
def doctor(
    run: Annotated[str | None, typer.Argument(help="a stage (its newest run), a run folder or the id of an MLflow run")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Say what is wrong with a run, or with machine, repository and the newest runs, and how to mend it; 1 if it is a problem."""
    from pipeline.reading import doctor as command

    root, runs = Path.cwd(), home(Path.cwd())
    lines = [] if run else list(command.checkup(root, runs))
    diagnoses = command.diagnose(root, runs, run)
    for line in [command.as_json(lines, diagnoses)] if as_json else [*lines, *(x for d in diagnoses for x in d.lines())]:
        echo(line)
    raise typer.Exit(int(command.has_problem(lines, diagnoses)))


@app.command()
def compare(
    things: Annotated[list[str], typer.Argument(help="run folders, stages, ids of MLflow runs, DVC experiments, files")],
    stage: Annotated[str | None, typer.Option(help="whose run is meant of experiments")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
    html: Html = None,
) -> None:
    """Say how runs differ: configuration, metrics, samples, and whether other seeds differ as much."""
    from pipeline.reading import compare as command

    comparison = command.compare(Path.cwd(), home(Path.cwd()), things, stage)
    if html is not None:
        from pipeline.pages.compare_page import compare_page
        from pipeline.pages.page import write_page

        echo(write_page(html, compare_page(comparison)))
    elif as_json:
        echo(command.as_json(comparison))
    else:
        from pipeline.reading.compare_text import print_comparison

        print_comparison(comparison)


Model = Annotated[str, typer.Argument(help="pretrain, full_sft, lora, dpo, ppo, grpo or agent")]


@app.command()
def chat(
    model: Model = "grpo",
    thinking: Annotated[bool, typer.Option("--thinking", help="ask the model to think first")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="offer every tool: the simulated ones and those of tools.extra")] = False,
    tool: Annotated[list[str] | None, typer.Option(help="offer this tool alone, or with others named so")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="always the most probable token")] = False,
    temperature: Annotated[float, typer.Option(help="of the sampling", min=0.01)] = 0.8,
    top_k: Annotated[int, typer.Option(help="sample from the k most probable tokens; 0 for all")] = 0,
    top_p: Annotated[float, typer.Option(help="sample from the most probable tokens that reach this probability")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="above 1: tokens that were there before are less likely")] = 1.0,
) -> None:
    """Talk to a trained model; questions are lines of the standard input."""
    from pipeline.commands.chat import Conversation, chosen_tools, converse
    from pipeline.commands.models import open_model, open_tokenizer
    from pipeline.rollout.truncation import Truncation
    from pipeline.tools.toolbox import open_toolbox
    from pipeline.training.device import open_device

    truncation = Truncation(top_k, top_p, repetition_penalty)
    tokenizer = open_tokenizer()
    params = load_params()
    toolbox = open_toolbox(params.tools)
    offered = chosen_tools(toolbox, tool or [], every=tools)
    device = open_device(params.runtime)
    opened = device.prepare(open_model(model, tokenizer))
    restricted = truncation if truncation != Truncation() else None
    conversation = Conversation(opened, tokenizer, device, temperature, thinking, offered, toolbox, greedy, restricted)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is named, not raised
    if sys.stdin.isatty():
        echo(f"{model}: write a line, end with Ctrl-D")
    for line in converse(conversation, sys.stdin):
        echo(line)


@app.command()
def export(model: Model, folder: Annotated[Path, typer.Argument(help="a new folder")]) -> None:
    """Write a model as a folder for transformers (config, safetensors, tokenizer)."""
    from pipeline.commands.export import export as write
    from pipeline.commands.models import open_model, open_tokenizer

    write(open_model(model, open_tokenizer()), folder)
    echo(f"{folder}: AutoModelForCausalLM.from_pretrained opens it")


def main() -> None:
    """Runs one command; a `PipelineError` ends as its lines on stderr and its exit code."""
    bear_any_locale()
    try:
        app()
    except PipelineError as error:
        print(escaped(error), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
