"""Find the vocabulary tables in files of any kind and measure them: `coupled-adam inspect`.

The reader of its format opens a PATH as `Stored` (stored.py), `model_tables.py` finds the tables, `model_inspection.py`
measures them with `coupled_adam.embeddings`, `inspection_table.py` arranges the measures side by side, and
`terminal.py` and `inspection_page.py` show them.
"""

from coupled_adam.tables_file import write_tables

__all__ = ["write_tables"]
