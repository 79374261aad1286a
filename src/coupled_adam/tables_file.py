"""`tables.safetensors`: the vocabulary tables of one of our checkpoints, readable without the rest of it.

A safetensors file with the full tables, each stored once, and these strings in its header:

    input            name of the tensor that embeds the tokens that come in
    output           name of the tensor that scores the tokens that may come next; equal to `input` when tied
    tied             "true" or "false"
    vocabulary_size  "50257": rows from this one on are padding

Legend: V vocabulary rows, H hidden size.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from safetensors.torch import save_file
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import replacing

TABLES_FILE = "tables.safetensors"
HEADER_KEYS = ("input", "output", "tied", "vocabulary_size")


class Header(TypedDict):
    """The header of `tables.safetensors`, parsed."""

    input: str
    output: str
    tied: bool
    vocabulary_size: int


def write_tables(path: Path, tables: Mapping[str, Tensor], *, input: str, output: str, vocabulary_size: int) -> None:
    """Write the tables of a model, as a whole or not at all.

    Args:
        path: where to; the folder must exist.
        tables: the input and output tables (V, H) by name; one entry when they are tied.
        input: name of the input table.
        output: name of the output table; the same name says that they are tied.
        vocabulary_size: rows from this one on are padding.

    Example:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp()) / "tables.safetensors"
        >>> write_tables(path, {"wte.weight": torch.ones(64, 8)}, input="wte.weight", output="wte.weight",
        ...              vocabulary_size=61)
    """
    if set(tables) != {input, output}:
        raise UserError(f"tables {sorted(tables)}: expected the input {input!r} and the output {output!r} only")
    for name, table in tables.items():
        if table.ndim != 2 or not 0 < vocabulary_size <= table.shape[0]:
            raise UserError(
                f"table {name!r} has shape {tuple(table.shape)}, expected (V, H) with V >= vocabulary_size "
                f"= {vocabulary_size} > 0"
            )
    header = {
        "input": input,
        "output": output,
        "tied": "true" if input == output else "false",
        "vocabulary_size": str(vocabulary_size),
    }
    contiguous = {name: table.detach().cpu().contiguous() for name, table in tables.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata=header)


def parse_header(header: Mapping[str, str], path: Path) -> Header | None:
    """The header of our tables, or None when it is the header of another safetensors file."""
    if not all(key in header for key in HEADER_KEYS):
        return None
    size, tied = header["vocabulary_size"], header["tied"]
    if not re.fullmatch(r"[0-9]{1,18}", size) or int(size) == 0:
        raise UserError(f"{path}: vocabulary_size in the header is {size!r}, expected a positive number")
    if tied != ("true" if header["input"] == header["output"] else "false"):
        raise UserError(
            f"{path}: the header says tied is {tied!r}, with input {header['input']!r} and output "
            f"{header['output']!r}; write it with coupled_adam.inspection.write_tables"
        )
    return Header(input=header["input"], output=header["output"], tied=tied == "true", vocabulary_size=int(size))
