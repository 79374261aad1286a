"""Progress bars with the time left, notes, and tables that are wider than the terminal.

Bars and notes go to the error output, so that the standard output holds results alone. A bar is gone when it is done;
where there is no terminal, a line a minute says how far it is.
"""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coupled_adam.base.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

SECONDS_BETWEEN_LINES = 60.0
WIDER_THAN_ANY_TABLE = 10_000


class ProgressBar:
    """One bar on a terminal, which may go through several stages; made by `progress_bar`."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._stages: dict[str, TaskID] = {}
        self._last_line = time.monotonic()

    @property
    def is_on_terminal(self) -> bool:
        """Whether there is a bar; otherwise there are lines."""
        return self._progress.console.is_terminal

    def show(self, stage: str, done: float | None, total: float | None = 1.0, *, note: str = "") -> None:
        """Say how far a stage is; cheap enough to be called often.

        Args:
            stage: what is being done. A new one takes the place of the one before, and its time left starts anew.
            done: out of `total`; None where that cannot be known.
            total: when the stage is complete; None where that cannot be known.
            note: what is behind the bar, such as what exactly is being worked on.
        """
        if stage not in self._stages:
            for earlier in self._stages.values():
                self._progress.update(earlier, visible=False)
            self._stages[stage] = self._progress.add_task(printable(stage), total=None, note="")
        total = None if done is None else total
        self._progress.update(self._stages[stage], completed=done or 0.0, total=total, note=printable(note))
        if not self.is_on_terminal and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            part = "" if done is None or not total else f"{done / total:.0%}"
            self.say(", ".join(filter(None, (stage, part, note))))

    def say(self, sentence: str) -> None:
        """Print a line, above the bar where there is one."""
        self._progress.console.print(printable(sentence), markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """A bar with the time left on the error output, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    # The stream of this moment: libraries that print too much are kept from it by taking sys.stderr away for a while.
    console = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print each UserWarning once, as a note, when all is done; other warnings are shown as Python shows them."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:  # an error may end the work
        notes = [warning for warning in caught if issubclass(warning.category, UserWarning)]
        for note in dict.fromkeys(str(warning.message) for warning in notes):
            print(f"Note: {printable(note)}", file=sys.stderr)
        for warning in caught:
            if warning not in notes:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


def wide_enough(console: "Console", table: "Table") -> "Console":
    """A console on which a table is not cut off. Where that is wider than the terminal, lines go on in the next one,
    and no digit is lost."""
    from rich.console import Console
    from rich.measure import Measurement

    whole = Console(width=WIDER_THAN_ANY_TABLE)
    width = max(console.width, Measurement.get(whole, whole.options, table).maximum)
    # Quiet where the console is: it may have lost its reader.
    return Console(file=console.file, quiet=console.quiet, highlight=False, width=width)
