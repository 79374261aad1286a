"""Finding the vocabulary tables in files of any kind, and showing their measures: `coupled-adam inspect`.

A PATH is opened as `Stored` (stored.py) by the reader of its format, `model_tables.py` finds the tables in it,
`model_inspection.py` measures them with `coupled_adam.embeddings`, and `terminal.py` and `inspection_page.py` show what
`inspection_table.py` sets side by side.
"""

from coupled_adam.tables_file import write_tables

__all__ = ["write_tables"]
