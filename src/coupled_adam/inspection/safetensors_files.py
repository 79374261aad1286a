"""Tables from safetensors files. Only the bytes of the tables used are read."""

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

METADATA = "__metadata__"  # header key that is not a tensor
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_safetensors(path: Path) -> Stored:
    """Open a safetensors file; the header of a `tables.safetensors` names its tables."""
    try:
        with safe_open(path, "np"):  # checks the header against the file
            pass
    except SafetensorError as error:
        raise UserError(
            f"{path}: not a complete safetensors file ({error}); it may be truncated: copy or download it again"
        ) from None
    begin, entries = read_header(path)
    metadata = entries.pop(METADATA, None) or {}

    def read(name: str) -> Tensor:
        entry = entries[name]
        if entry["dtype"] not in TYPES:
            refuse_type(path, name, entry["dtype"])
        start, end = entry["data_offsets"]
        dtype = FLOATING[TYPES[entry["dtype"]]]
        # A header can have two entries of one name, and safetensors has checked only one.
        if not 0 <= start <= end <= path.stat().st_size - begin or end - start != prod(entry["shape"]) * dtype.itemsize:
            raise UserError(f"{path}: tensor {name!r} has invalid offsets; copy or download the file again")
        return map_storage(path, begin + start, end - start, dtype).reshape(entry["shape"])

    stored = Stored(names=list(entries), shape=lambda name: tuple(entries[name]["shape"]), read=read)
    header = parse_header(metadata, path)
    if header is None:
        return stored
    for name in (header["input"], header["output"]):
        if name not in entries:
            raise UserError(f"{path}: the header names table {name!r}, but the file has {', '.join(entries)}")
        rows = entries[name]["shape"][:1]
        if rows and header["vocabulary_size"] > rows[0]:
            raise UserError(
                f"{path}: vocabulary_size in the header is {header['vocabulary_size']}, but table {name!r} has "
                f"{rows[0]} rows; copy or download it again"
            )
    return replace(stored, **header)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Read the header; return the start of the tensors and the header as JSON.

    Only for files that `open_safetensors` has checked.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = parse_json(file.read(length), f"{path}: its header")
    return 8 + length, header
