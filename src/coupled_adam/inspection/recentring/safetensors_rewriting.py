"""Rewrite a safetensors file with some tensors replaced or added, and copy every other byte.

A file starts with 8 bytes for the length of the header, then the JSON header, then the tensors without gaps. If the
replaced tensors keep their type, the header and all offsets stay. Otherwise the tensors get new offsets, widest types
first, because torch cannot memory-map unaligned numbers.
"""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.safetensors_files import METADATA, TYPES, read_header

COPIED_BYTES = 2**24
BLOCK_ROWS = 4096
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}  # "float32" -> "F32"


def rewrite(
    source: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    metadata_changes: Mapping[str, str] | None = None,
) -> None:
    """Write `source` to `target` with some tensors replaced or added.

    Args:
        source: a safetensors file that `open_safetensors` has checked.
        target: the new file.
        tensors: changed tensors, in any precision; new names are added.
        dtype: of the stored changed tensors; None to keep their type in `source`.
        metadata_changes: changed strings of the header.
    """
    begin, entries = read_header(source)
    metadata = {**(entries.pop(METADATA, None) or {}), **(metadata_changes or {})}
    kept = {name: tuple(entry["data_offsets"]) for name, entry in entries.items() if name not in tensors}
    _check_places(source, kept, source.stat().st_size - begin)
    is_new_layout = dtype is not None or bool(metadata_changes) or not tensors.keys() <= entries.keys()
    order = sorted(entries, key=lambda name: tuple(entries[name]["data_offsets"]))
    order += [name for name in tensors if name not in entries]

    described: dict[str, dict[str, Any]] = {}
    for name in order:
        entry = entries.get(name)
        if name in tensors:
            stored = TYPE_NAMES[str(dtype).removeprefix("torch.")] if dtype else entries[name]["dtype"]
            entry = {"dtype": stored, "shape": list(tensors[name].shape)}
        assert entry is not None
        described[name] = entry
    sizes = {
        name: kept[name][1] - kept[name][0] if name in kept else tensors[name].numel() * _itemsize(entry["dtype"])
        for name, entry in described.items()
    }
    if is_new_layout:
        order.sort(key=lambda name: -_bytes_a_number(sizes[name], described[name]["shape"]))
        place = 0
        for name in order:
            described[name] = {**described[name], "data_offsets": [place, place + sizes[name]]}
            place += sizes[name]
        header = _header({METADATA: metadata} if metadata else {}, {name: described[name] for name in order})
    else:
        with source.open("rb") as file:
            header = file.read(begin)
    with source.open("rb") as old, target.open("xb") as new:
        new.write(header)
        for name in order:
            if name in kept:
                start, end = kept[name]
                old.seek(begin + start)
                _copy(old, new, end - start, source)
            else:
                _write_tensor(new, tensors[name], _torch_type(described[name]["dtype"]))


def write_new(target: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Write a file with one tensor."""
    stored = TYPE_NAMES[str(dtype).removeprefix("torch.")]
    size = tensor.numel() * dtype.itemsize
    entry = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [0, size]}
    with target.open("xb") as new:
        new.write(_header({METADATA: {"format": "pt"}}, {name: entry}))
        _write_tensor(new, tensor, dtype)


def _header(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    content = json.dumps({**metadata, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    return struct.pack("<Q", len(content)) + content


def _check_places(source: Path, places: Mapping[str, tuple[int, int]], size: int) -> None:
    for name, (start, end) in places.items():
        if not 0 <= start <= end <= size:
            raise UserError(f"{source}: tensor {name!r} has invalid offsets; copy or download the file again")


def _copy(old: IO[bytes], new: IO[bytes], count: int, source: Path) -> None:
    while count:
        block = old.read(min(count, COPIED_BYTES))
        if not block:
            raise UserError(f"{source}: truncated before its last tensor; copy or download it again")
        new.write(block)
        count -= len(block)


def _write_tensor(new: IO[bytes], tensor: Tensor, dtype: torch.dtype) -> None:
    for rows in tensor.detach().split(BLOCK_ROWS):
        new.write(rows.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


def _torch_type(stored: str) -> torch.dtype:
    return getattr(torch, TYPES[stored])  # type: ignore[no-any-return]


def _itemsize(stored: str) -> int:
    return _torch_type(stored).itemsize


def _bytes_a_number(size: int, shape: list[int]) -> int:
    return size // max(1, prod(shape))
