"""User errors end every command with one line on stderr and exit code 2. Internal errors keep their traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from coupled_adam.base.errors import as_user_error
from coupled_adam.base.text import printable_lines


def refuse(message: str) -> NoReturn:
    """Print an error message and exit with code 2."""
    typer.echo(f"Error: {printable_lines(message)}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn exceptions that the user can fix into a message and exit code 2."""
    try:
        yield
    except Exception as error:
        mendable = as_user_error(error)
        if mendable is None:
            raise
        refuse(str(mendable))
