"""`coupled-adam eval`, called in this process."""

import sys

import pytest
from click.testing import Result
from typer.testing import CliRunner

from coupled_adam.cli import app

TASKS = "arc_easy,winogrande"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("lm_eval", "datasets", "tokenizers")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lm_eval", "datasets", "tokenizers", "tiktoken", "transformers", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
