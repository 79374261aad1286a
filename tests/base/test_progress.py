"""Bars on terminals, lines in files, and warnings as notes."""

import io
import re
import sys
import warnings

import pytest
from rich.console import Console

from coupled_adam.base import progress
from coupled_adam.base.progress import progress_bar, warnings_as_notes


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The output to a terminal of 100 columns."""
    file = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=file, force_terminal=True, width=100))
    return file


def shown(terminal: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def test_a_terminal_shows_stage_percentage_note_and_the_time_left(terminal: io.StringIO) -> None:
    with progress_bar() as bar:
        assert bar.is_on_terminal
        for done in (2, 3):  # the time left follows from two reports
            bar.show("reading [red]", done, 4, note="file[/red]\x1b[2J")
    assert re.search(r"reading \[red\] ━+.* 75% file\[/red\]\\x1b\[2J \d.* s left", shown(terminal)), shown(terminal)


def test_a_new_stage_replaces_the_previous_one(terminal: io.StringIO) -> None:
    with progress_bar() as bar:
        bar.show("first", 0.5)
        bar.show("second", None)
        terminal.truncate(0)
    assert "second" in shown(terminal)
    assert "first" not in shown(terminal)


def test_a_file_gets_a_line_a_minute_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress_bar() as bar:
        for second in range(0, 150, 10):
            now = float(second)
            bar.show("counting", second, 200, note=f"{second} of 200")
        now = 300.0
        bar.show("waiting", None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["counting, 35%, 70 of 200", "counting, 70%, 140 of 200", "waiting"]


@warnings_as_notes()
def warn_of_tables_and_an_overflow() -> None:
    for _ in range(2):
        warnings.warn("two tables\x1b[2J", UserWarning, stacklevel=1)
    warnings.warn("an overflow", RuntimeWarning, stacklevel=1)
    print("measured", file=sys.stderr)


def test_user_warnings_are_notes_once_each_and_others_stay_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RuntimeWarning, match="an overflow") as left:
        warn_of_tables_and_an_overflow()
    assert len(left) == 1
    assert capsys.readouterr().err.splitlines() == ["measured", "Note: two tables\\x1b[2J"]


@warnings_as_notes()
def fail_after_a_warning() -> None:
    warnings.warn("half of it", UserWarning, stacklevel=1)
    raise KeyError


def test_notes_are_printed_even_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError):
        fail_after_a_warning()
    assert capsys.readouterr().err == "Note: half of it\n"
