"""The last lines of `study run`: the number of failed and unfinished runs, one or several."""

import io
import re

import pytest
import typer
from rich.console import Console

from coupled_adam.commands.study_output import print_outcome
from coupled_adam.study.runner import StudyOutcome


def printed(outcome: StudyOutcome) -> tuple[str, int]:
    file = io.StringIO()
    with pytest.raises(typer.Exit) as ended:
        print_outcome(Console(file=file), outcome, "coupled-adam study run small")
    return file.getvalue(), ended.value.exit_code


@pytest.mark.parametrize(("count", "words"), [(1, "1 run failed"), (3, "3 runs failed")])
def test_failed_runs_are_counted(count: int, words: str) -> None:
    text, exit_code = printed(StudyOutcome(failed={f"run-{number}": "loss is nan" for number in range(count)}))
    assert re.search(rf"^{words}\b.*: coupled-adam study run small$", text, re.MULTILINE), text
    assert exit_code == 1


@pytest.mark.parametrize(("count", "words"), [(1, "1 run is"), (2, "2 runs are")])
def test_unfinished_runs_are_counted(count: int, words: str) -> None:
    text, exit_code = printed(StudyOutcome(left=count, signal="SIGINT"))
    assert re.search(rf"\b{words} not finished\b", text), text
    assert exit_code == 130
