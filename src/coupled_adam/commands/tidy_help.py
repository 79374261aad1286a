"""What typer itself says, in the style of the commands: `--help` without Python's types, mistakes in one line.

typer 0.29 and newer print `<bool>` behind every flag and `<list[Path]>` behind an argument. A flag takes no value, so
none is shown, and an argument is told by its name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from coupled_adam.commands.refusal import refuse

# Of typer's own copy of click, or of click, whichever this version uses.
UsageError: Any = typer.BadParameter.__base__


class TidyGroup(TyperGroup):
    """A command with sub-commands, whose help and theirs is tidy."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            _tidy(param)
        return params

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and ctx is not None:
            for param in command.get_params(ctx):  # with its --help, which it keeps from now on
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
        param.display_type_rich = lambda ctx: None  # older versions of typer do not look at it
        if " " in (param.metavar or ""):  # such as "[RUN] SCORES", which says itself how many there are
            param.get_usage_pieces = lambda ctx: [param.metavar]
    elif param.is_flag and param.metavar is None:
        param.metavar = ""


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """Refuse options and arguments that there are not, as the commands refuse everything else."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a command alone: its help is shown
            raise
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        where = "" if error.ctx is None else f" (see: {error.ctx.command_path} --help)"
        refuse(f"{message.rstrip('.')}{where}")
