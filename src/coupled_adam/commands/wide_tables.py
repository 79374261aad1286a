"""Tables in a terminal that is narrower than they are."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDER_THAN_ANY_TABLE = 10_000


def wide_enough(console: Console, table: Table) -> Console:
    """A console on which a table is not cut off. Where that is wider than the terminal, lines go on in the next one,
    and no digit is lost."""
    whole = Console(width=WIDER_THAN_ANY_TABLE)
    width = max(console.width, Measurement.get(whole, whole.options, table).maximum)
    # Quiet where the console is: it may have lost its reader.
    return Console(file=console.file, quiet=console.quiet, highlight=False, width=width)
