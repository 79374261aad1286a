"""The command `study` in this process, for tests; and stand-ins for its workers."""

from typer.testing import CliRunner, Result

from coupled_adam.commands import study as study_command


def study(*arguments: str, width: int = 200) -> Result:
    """Run a command on a terminal of some width; an unexpected exception fails the test."""
    cli = CliRunner(env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)})
    result = cli.invoke(study_command.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result
