"""`coupled-adam eval`: a command with an argument of its own, MODEL, and sub-commands as well."""

import difflib
from typing import Any

from coupled_adam.commands.tidy_help import TidyGroup

HAS_SUB_COMMAND = "coupled_adam.eval.has_sub_command"


class EvalGroup(TidyGroup):
    """Looks at the first word: the name of a sub-command calls that, anything else belongs to the command itself.

    A folder that is called like a sub-command is given as ./NAME. The callback is called in both cases;
    `ctx.invoked_subcommand` says which it is.
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
        if not ctx.meta[HAS_SUB_COMMAND]:  # words are left behind MODEL
            close = difflib.get_close_matches(str(ctx.params.get("model")), self.commands, 1)
            remedy = f"did you mean `{ctx.command_path} {close[0]}`?" if close else "give one MODEL"
            ctx.fail(f"Unexpected after MODEL: {' '.join(args)}; {remedy}")
        return super().resolve_command(ctx, args)
