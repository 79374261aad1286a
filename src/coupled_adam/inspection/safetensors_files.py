"""Tables from safetensors files. Only the bytes of a table that is looked at are read."""

import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_json
from coupled_adam.inspection.stored import FLOATING, Stored, map_storage, refuse_type
from coupled_adam.tables_file import parse_header

METADATA = "__metadata__"  # the key of a header that is no tensor
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_safetensors(path: Path) -> Stored:
    """Open a safetensors file; the header of our `tables.safetensors` tells its tables."""
    try:
        with safe_open(path, "np"):  # checks the header against the file
            pass
    except SafetensorError as error:
        raise UserError(
            f"{path}: not a whole safetensors file ({error}); it may be cut off: copy or download it again"
        ) from None
    begin, entries = read_header(path)
    metadata = entries.pop(METADATA, None) or {}

    def read(name: str) -> Tensor:
        entry = entries[name]
        if entry["dtype"] not in TYPES:
            refuse_type(path, name, entry["dtype"])
        start, end = entry["data_offsets"]
        dtype = FLOATING[TYPES[entry["dtype"]]]
        # safetensors has checked one entry of this name; a header can have two.
        if not 0 <= start <= end <= path.stat().st_size - begin or end - start != prod(entry["shape"]) * dtype.itemsize:
            raise UserError(f"{path}: tensor {name!r} does not fit its place in the file; copy or download it again")
        return map_storage(path, begin + start, end - start, dtype).reshape(entry["shape"])

    stored = Stored(names=list(entries), shape=lambda name: tuple(entries[name]["shape"]), read=read)
    header = parse_header(metadata, path)
    if header is None:
        return stored
    for name in (header["input"], header["output"]):
        if name not in entries:
            raise UserError(f"{path}: the header names table {name!r}, but the file holds {', '.join(entries)}")
        rows = entries[name]["shape"][:1]
        if rows and header["vocabulary_size"] > rows[0]:
            raise UserError(
                f"{path}: vocabulary_size in the header is {header['vocabulary_size']}, but table {name!r} has "
                f"{rows[0]} rows; copy or download it again"
            )
    return replace(stored, **header)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header: 8 bytes give its length, then it is JSON.

    Only of a file that `open_safetensors` has checked.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = parse_json(file.read(length), f"{path}: its header")
    return 8 + length, header
