"""`coupled-adam eval`: a command that takes both an argument, MODEL, and sub-commands."""

import difflib
from typing import Any

from coupled_adam.commands.tidy_help import TidyGroup

HAS_SUB_COMMAND = "coupled_adam.eval.has_sub_command"


class EvalGroup(TidyGroup):
    """Calls a sub-command if the first word names one, and otherwise takes the first word as MODEL.

    A folder with the name of a sub-command is passed as ./NAME. The callback runs in both cases;
    `ctx.invoked_subcommand` tells them apart.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        has_sub_command = bool(args) and args[0] in self.commands
        ctx.meta[HAS_SUB_COMMAND] = has_sub_command
        ctx.allow_interspersed_args = not has_sub_command  # options may follow MODEL
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        # Without this, MODEL would take the name of the sub-command.
        return [] if ctx.meta.get(HAS_SUB_COMMAND) else super().get_params(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.meta[HAS_SUB_COMMAND]:  # there are words after MODEL
            close = difflib.get_close_matches(str(ctx.params.get("model")), self.commands, 1)
            remedy = f"did you mean `{ctx.command_path} {close[0]}`?" if close else "pass one MODEL"
            ctx.fail(f"Unexpected after MODEL: {' '.join(args)}; {remedy}")
        return super().resolve_command(ctx, args)
