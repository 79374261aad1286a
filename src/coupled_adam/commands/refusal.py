"""How every command says no: one line on stderr, exit code 2."""

from typing import NoReturn

import typer


def refuse(message: str) -> NoReturn:
    """Print what was wrong and what to do about it, and end the command."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)
