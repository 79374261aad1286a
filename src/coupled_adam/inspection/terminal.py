"""The measures in the terminal: one table, its notes, and a sentence for each column; and a bar while they are made."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from coupled_adam.base.text import printable
from coupled_adam.inspection.inspection_table import Overview


def print_overview(console: Console, overview: Overview) -> None:
    """Print the table; everything that comes from files is printed as it is, without markup."""
    table = Table("measure")
    for column in overview.columns:
        table.add_column(Text(f"{column.model}\n{column.role}: {column.tensor}"), justify="right", overflow="fold")
    for row in overview.rows:
        table.add_row(Text(f"{row.label} {row.better}"), *row.cells)
    console.print(table)
    for note in ("↑ more is better, ↓ less is better", *overview.notes):
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print()
    for column in overview.columns:
        console.print(Text(f"{column.heading}: {column.sentence}."), soft_wrap=True)


@contextmanager
def measuring_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on the error output, gone when done; none where that is not a terminal. Warnings become notes there."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("measuring {task.description}"), BarColumn(), TaskProgressColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    with warnings.catch_warnings(record=True) as notes:
        try:
            with progress:
                bar = progress.add_task("", total=1.0, visible=False)

                def on_progress(what: str, done: float) -> None:
                    progress.update(bar, description=escape(printable(what)), completed=done, visible=True)

                yield on_progress
        finally:
            for note in notes:
                console.print(Text(f"Note: {printable(str(note.message))}"), soft_wrap=True)
