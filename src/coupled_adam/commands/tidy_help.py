"""typer's own output in the style of the commands: `--help` without Python types, usage errors in one line.

typer 0.29 and newer print `<bool>` after every flag and `<list[Path]>` after an argument. Both are removed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from coupled_adam.commands.refusal import refuse

# From typer's own copy of click or from click, whichever this version of typer uses.
UsageError: Any = typer.BadParameter.__base__


class TidyGroup(TyperGroup):
    """A command group with tidy help for itself and its sub-commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            _tidy(param)
        return params

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and ctx is not None:
            for param in command.get_params(ctx):  # includes --help, which typer caches
                _tidy(param)
        return command

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _mistakes_in_one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _mistakes_in_one_line():
            return super().invoke(ctx)


def _tidy(param: Any) -> None:
    if param.param_type_name == "argument":
        param.display_type_rich = lambda ctx: None  # ignored by older versions of typer
        if " " in (param.metavar or ""):  # such as "[RUN] SCORES": typer would add "..."
            param.get_usage_pieces = lambda ctx: [param.metavar]
    elif param.is_flag and param.metavar is None:
        param.metavar = ""


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """Report usage errors, such as unknown options, as the commands report other user errors."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no arguments: show the help
            raise
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        where = "" if error.ctx is None else f" (see: {error.ctx.command_path} --help)"
        refuse(f"{message.rstrip('.')}{where}")
