"""Print the measures in the terminal: one table, its notes, and a sentence for each column."""

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coupled_adam.base.progress import wide_enough
from coupled_adam.inspection.inspection_table import RECENTRED, Overview

BORDERS = 3  # columns of the terminal per column of a table: a line and two spaces


def print_overview(console: Console, overview: Overview) -> None:
    """Print the table; text from files is printed literally, without markup."""
    table = Table("measure")
    for column in overview.columns:
        table.add_column(Text(f"{column.model}\n{column.role}: {column.tensor}"), justify="right", overflow="fold")
    for row in overview.rows:
        table.add_row(Text(f"{row.label} {row.better}"), *row.cells)
    if wide_enough(console, table).width > console.width:
        _narrow(table, overview, console.width)
    wide_enough(console, table).print(table)
    quantised = () if not overview.is_quantised else (f"quantisation error of tables and logits: {RECENTRED}",)
    for note in ("↑ higher is better, ↓ lower is better", *quantised, *overview.notes):
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print()
    for column in overview.columns:
        console.print(Text(f"{column.heading}: {column.sentence}."), soft_wrap=True)


def _narrow(table: Table, overview: Overview, width: int) -> None:
    """Fit the table into a width: fold the names of models and measures, but no number."""
    words = [word for row in overview.rows for word in f"{row.label} {row.better}".split()]
    table.columns[0].width = max(map(cell_len, words))
    room = width - 1 - BORDERS - table.columns[0].width
    for place, column in enumerate(table.columns[1:]):
        numbers = max(cell_len(row.cells[place]) for row in overview.rows)
        column.width = max(numbers, room // len(overview.columns) - BORDERS)
