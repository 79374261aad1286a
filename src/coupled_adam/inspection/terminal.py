"""Print the measures in the terminal: one table, its notes, and a sentence for each column."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coupled_adam.inspection.inspection_table import RECENTRED, Overview


def print_overview(console: Console, overview: Overview) -> None:
    """Print the table; text from files is printed literally, without markup."""
    table = Table("measure")
    for column in overview.columns:
        table.add_column(Text(f"{column.model}\n{column.role}: {column.tensor}"), justify="right", overflow="fold")
    for row in overview.rows:
        table.add_row(Text(f"{row.label} {row.better}"), *row.cells)
    console.print(table)
    quantised = () if not overview.is_quantised else (f"quantisation error of tables and logits: {RECENTRED}",)
    for note in ("↑ higher is better, ↓ lower is better", *quantised, *overview.notes):
        console.print(Text(note, style="dim"), soft_wrap=True)
    console.print()
    for column in overview.columns:
        console.print(Text(f"{column.heading}: {column.sentence}."), soft_wrap=True)
