"""`--help` of every command and sub-command shows no Python types, and mistakes give one line."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coupled_adam.cli import app

ROOT: Any = typer.main.get_command(app)


def words(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(value)


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*path, name))


@pytest.mark.parametrize("path", list(paths(ROOT)), ids=words)
def test_help_shows_no_python_types(path: tuple[str, ...]) -> None:
    result = CliRunner(env={"COLUMNS": "150", "TERMINAL_WIDTH": "150"}).invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    assert re.findall(r"<(?:bool|str|int|float|path|list)\b[^>]*>", result.output) == []
    assert "comes along" not in result.output
    for line in result.output.splitlines():
        if line.startswith("│ --") or re.match(r"│ \*? +[A-Z]", line):
            assert re.search(r"\s{2,}\S.*[a-z]", line), f"no help: {line}"


def test_a_flag_is_still_a_flag() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("coupled-adam ")
    assert CliRunner().invoke(app, ["study", "list", "-h"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["inspekt"], "inspekt"),
        (["--verbose"], "--verbose"),
        (["inspect"], "PATH"),
        (["export", "run", "out", "--dtype", "int8"], "bfloat16"),
        (["export", "run"], "DIR"),
        (["recentre", "model"], "OUT"),
        (["recentre", "model", "out", "--dtype", "int8"], "--dtype"),
        (["eval", "run", "--limit", "0"], "--limit"),
        (["eval", "run", "another"], "another"),
        (["eval", "answer", "run"], "REQUESTS"),
        (["eval", "requests", "gpt2", "out", "--fresh"], "--fresh"),
        (["eval", "score"], "SCORES"),
        (["data", "prepare", "--tokeniser", "gpt2"], "--tokenizer"),
        (["data", "tokenize"], "tokenize"),
        (["study", "run", "demo", "--jobs", "many"], "--jobs"),
        (["study", "run"], "STUDY"),
        (["theory", "run", "--batches", "1.5"], "--batches"),
    ],
    ids=words,
)
def test_a_wrong_option_or_argument_is_one_line_and_exit_code_2(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["data"], ["study"]],
    ids=words,
)
def test_a_command_alone_shows_its_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert "Usage:" in result.output
    assert "Error" not in result.output
