"""The command `coupled-adam`: its options, and the list of its commands (each in a file of commands/)."""

import os
import sys
from typing import Annotated

import typer

from coupled_adam import __version__
from coupled_adam.base.cpu import limit_instructions
from coupled_adam.commands import data, study
from coupled_adam.commands.convert import convert
from coupled_adam.commands.demo import demo
from coupled_adam.commands.eval import app as eval_app
from coupled_adam.commands.export import export
from coupled_adam.commands.inspect import inspect
from coupled_adam.commands.recentre import recentre
from coupled_adam.commands.theory import theory
from coupled_adam.commands.tidy_help import TidyGroup
from coupled_adam.commands.train import train

app = typer.Typer(
    cls=TidyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of `coupled-adam`."""
    # Two OpenMP threads that spin while waiting can be 20 times slower beside one other busy process. OpenMP reads
    # this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    # Where a command does work, and not where it only explains itself: finding out can take seconds, once a machine.
    if not {"-h", "--help", "--version"}.intersection(sys.argv):
        note = limit_instructions()
        if note and os.environ.get("LOCAL_RANK", "0") == "0":
            typer.echo(f"Note: {note}", err=True)
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coupled-adam {__version__}")
        raise typer.Exit


@app.callback()
def coupled_adam(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Better embeddings with Coupled Adam.

    Adam pushes the embeddings of a language model away from the origin, all in one common direction. CoupledAdamW
    is AdamW with one second moment for the whole vocabulary: the embeddings stay centred, and their optimizer
    state is half as large.

    Start with `coupled-adam demo`, or train a model of your own: `coupled-adam train tiny`. In your own training loop:
    `from coupled_adam import CoupledAdamW`.
    """


app.command()(demo)
app.command()(inspect)
app.command()(recentre)
app.command()(train)
app.command()(convert)
app.command()(export)
app.add_typer(eval_app, name="eval")
app.command()(theory)
app.add_typer(data.app, name="data")
app.add_typer(study.app, name="study")
