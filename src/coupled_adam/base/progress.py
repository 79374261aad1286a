"""Progress bars with the remaining time, notes, and tables with long names on a narrow terminal.

Bars and notes go to stderr, so stdout holds only results. A finished bar disappears. Without a terminal, a line per
minute reports progress instead.
"""

import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coupled_adam.base.text import duration, percent, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.progress import Progress, TaskID
    from rich.table import Table
    from rich.text import Text

SECONDS_BETWEEN_LINES = 60.0
WIDER_THAN_ANY_TABLE = 10_000


class ProgressBar:
    """A progress bar with one or more stages; created by `progress_bar`."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._stages: dict[str, TaskID] = {}
        self._last_line = time.monotonic()

    @property
    def is_on_terminal(self) -> bool:
        """Whether a bar is shown; otherwise progress is printed as lines."""
        return self._progress.console.is_terminal

    def show(self, stage: str, done: float | None, total: float | None = 1.0, *, note: str = "") -> None:
        """Update the progress of a stage; cheap enough to call often.

        Args:
            stage: its name. A new stage replaces the previous one and restarts the remaining time.
            done: the amount done out of `total`; None if unknown.
            total: the amount at which the stage is complete; None if unknown.
            note: text after the bar, such as the current item.
        """
        if stage not in self._stages:
            for earlier in self._stages.values():
                self._progress.update(earlier, visible=False)
            self._stages[stage] = self._progress.add_task(printable(stage), total=None, note="")
        total = None if done is None else total
        self._progress.update(self._stages[stage], completed=done or 0.0, total=total, note=printable(note))
        if not self.is_on_terminal and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            part = "" if done is None or not total else percent(done / total)
            self.say(", ".join(filter(None, (stage, part, note))))

    def say(self, sentence: str) -> None:
        """Print a line, above the bar if one is shown."""
        self._progress.console.print(printable(sentence), markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """Show a progress bar with the remaining time on stderr; it disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """As `TimeRemainingColumn`, with the time written as everywhere else."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            seconds = task.time_remaining
            return Text("" if seconds is None else f"{duration(seconds)} left", style="progress.remaining")

    # Bind the current stream: sys.stderr is replaced for a while to silence libraries that print too much.
    console = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print each UserWarning once, as a note at the end; Python shows other warnings as usual."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        notes = [warning for warning in caught if issubclass(warning.category, UserWarning)]
        for note in dict.fromkeys(str(warning.message) for warning in notes):
            print(f"Note: {printable(note)}", file=sys.stderr)
        for warning in caught:
            if warning not in notes:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


class LongName:
    """The name of a run or cell, which a narrow column breaks after a hyphen or slash. Rich breaks only at spaces."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lines(self, width: int) -> list[str]:
        """The name in lines of at most this width, except for parts that are longer.

        Example:
            >>> LongName("30M-82M-partial-y0.25/seed-0").lines(16)
            ['30M-82M-partial-', 'y0.25/seed-0']
        """
        lines = [""]
        for part in self._parts():
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        return lines

    def _parts(self) -> list[str]:
        """The parts that stay together; a number at the end, as in seed-0, belongs to its word."""
        return re.findall(r".+?(?:/|-(?!\d+$)|$)", self.name)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        from rich.text import Text

        yield Text("\n".join(self.lines(options.max_width)), overflow="fold")

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.measure import Measurement

        return Measurement(max(map(len, self._parts()), default=0), len(self.name))


def wide_enough(console: "Console", table: "Table") -> "Console":
    """A console wide enough for the whole table; the terminal wraps longer lines, so no digit is lost."""
    from rich.console import Console
    from rich.measure import Measurement

    whole = Console(width=WIDER_THAN_ANY_TABLE)
    width = max(console.width, Measurement.get(whole, whole.options, table).maximum)
    # Keep `quiet`: the reader of stdout may be gone.
    return Console(file=console.file, quiet=console.quiet, highlight=False, width=width)


def print_fitted(console: "Console", table: "Table") -> None:
    """Print a table of numbers, which must not wrap. On a narrow terminal names are wrapped, then lines between columns
    are left out. A file, a pipe, or a terminal that is still too narrow, gets the whole table."""
    from rich.console import Console
    from rich.measure import Measurement

    whole = Console(width=WIDER_THAN_ANY_TABLE)
    if console.is_terminal:
        for style in (table.box, None):
            table.box = style
            if Measurement.get(whole, whole.options, table).minimum <= console.width:
                console.print(table)
                return
    wide_enough(console, table).print(table)


def with_whole_names(console: "Console", table: "Table") -> "Console":
    """A console that does not fold names in a file or pipe, where `grep` looks for them; a terminal folds them."""
    return console if console.is_terminal else wide_enough(console, table)
