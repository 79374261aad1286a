"""How every command says no: one line on stderr, exit code 2. What is not the user's to mend keeps its traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from coupled_adam.base.errors import as_user_error
from coupled_adam.base.text import printable_lines


def refuse(message: str) -> NoReturn:
    """Print what was wrong and what to do about it, and end the command."""
    typer.echo(f"Error: {printable_lines(message)}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors() -> Iterator[None]:
    """Refuse where what is inside raises something that the user can mend."""
    try:
        yield
    except Exception as error:
        mendable = as_user_error(error)
        if mendable is None:
            raise
        refuse(str(mendable))
