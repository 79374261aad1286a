"""Finding the vocabulary tables in files of any kind, and showing their measures: `coupled-adam inspect`.

A PATH is opened as `Stored` (stored.py) by the reader of its format, `tables.py` finds the tables in it, `measuring.py`
measures them with `coupled_adam.embeddings`, and `terminal.py` and `page.py` show what `overview.py` sets side by side.
"""

from coupled_adam.tables_file import write_tables

__all__ = ["write_tables"]
