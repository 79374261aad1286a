"""Open the safetensors weights of a Hugging Face folder, one file or shards, and write them with changes.

Only files with a changed tensor are rewritten, and in them only that tensor. A new tensor of a sharded model gets its
own file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import some_of
from coupled_adam.inspection.file_formats import open_file
from coupled_adam.inspection.folders import read_json_object
from coupled_adam.inspection.recentring.copied_files import copy_files, require_inside
from coupled_adam.inspection.recentring.safetensors_rewriting import rewrite, write_new
from coupled_adam.inspection.safetensors_files import METADATA, TYPES, read_header
from coupled_adam.tables_file import parse_header

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NEW_SHARD = "model-lm_head.safetensors"
# Types of tensors that are not weights, such as masks and counters in older files.
NO_NUMBERS = ("BOOL", "I64", "I32", "I16", "U8")


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a model."""

    folder: Path
    index: dict[str, Any] | None
    """Content of the index; None for a single file."""
    file_of: Mapping[str, str]
    """File by tensor name."""
    entries: Mapping[str, Mapping[str, Any]]
    """Header by tensor name."""
    vocabulary_size: int | None
    """Later rows are padding; None if unknown."""

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return sorted(set(self.file_of.values()))

    def dtype(self, name: str) -> torch.dtype:
        """Stored type of a tensor."""
        return getattr(torch, TYPES[self.entries[name]["dtype"]])  # type: ignore[no-any-return]

    def is_floating(self, name: str) -> bool:
        """Whether a tensor exists and has a floating-point type."""
        return name in self.entries and self.entries[name]["dtype"] in TYPES

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        with safe_open(self.folder / self.file_of[name], "pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]

    def read_all(self) -> dict[str, Tensor]:
        """Read all tensors, memory-mapped."""
        tensors: dict[str, Tensor] = {}
        for file in self.names:
            with safe_open(self.folder / file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return tensors


def open_weights(folder: Path) -> WeightFiles:
    """Open the safetensors files of a model, reading only their headers."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.exists() and index.exists():
        raise UserError(f"{folder}: has {WEIGHTS} and {INDEX}, and programs disagree on which to load; remove one")
    if not whole.exists() and not index.exists():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {some_of(pickles, 2)}" if pickles else "none"
        raise UserError(
            f"{folder}: expected safetensors weights, found {found}; write them with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    content = read_object(index, folder) if index.exists() else None
    weight_map = None if content is None else content.get("weight_map")
    if content is not None and not (isinstance(weight_map, dict) and weight_map):
        raise UserError(f"{index}: weight_map is missing, so it is not the index of a sharded model")
    file_of: dict[str, str] = {}
    entries: dict[str, Mapping[str, Any]] = {}
    size = None
    for name in [WEIGHTS] if weight_map is None else sorted(set(map(str, weight_map.values()))):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{index}: the shard {name!r} is missing; download the model again")
        require_inside(path, folder)
        open_file(path)  # checks header and size
        _, header = read_header(path)
        known = parse_header(header.pop(METADATA, None) or {}, path)
        size = known["vocabulary_size"] if known else size
        file_of |= dict.fromkeys(header, name)
        entries |= header
    for name, file in (weight_map or {}).items():
        if file_of.get(name) != file:
            raise UserError(f"{index}: {name!r} should be in {file!r}, but is missing there")
    weights = WeightFiles(folder, content, file_of, entries, size)
    _refuse_types(weights)
    return weights


def write_weights(
    files: WeightFiles,
    target: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    head_dtype: torch.dtype,
    untied_head: str | None,
) -> None:
    """Write the weight files: rewrite those with a changed tensor, copy the others.

    Args:
        files: the original weights.
        target: the folder to write to.
        tensors: changed tensors by stored name; new names are added.
        dtype: of changed tensors; None to keep their type.
        head_dtype: of an added tensor.
        untied_head: the new head of a model that was tied; None if tying does not change.
    """
    by_file: dict[str, dict[str, Tensor]] = {name: {} for name in files.names}
    new = {name: tensor for name, tensor in tensors.items() if name not in files.file_of}
    for name, tensor in tensors.items():
        if name not in new:
            by_file[files.file_of[name]][name] = tensor
    if files.index is None and new:
        by_file[WEIGHTS] |= new
        new = {}
    for file, changed in by_file.items():
        if changed:
            is_added = any(name not in files.file_of for name in changed)
            type_wanted = head_dtype if is_added else dtype
            rewrite(files.folder / file, target / file, changed, type_wanted, _header_changes(files, untied_head))
            (target / file).chmod((files.folder / file).stat().st_mode & 0o777)
        else:
            copy_files(files.folder, target, [Path(file)])
    for name, tensor in new.items():
        write_new(target / NEW_SHARD, name, tensor, head_dtype)
        (target / NEW_SHARD).chmod((files.folder / files.names[0]).stat().st_mode & 0o777)
    if files.index is not None:
        write_json(target / INDEX, _changed_index(files, tensors, dtype, head_dtype))


def read_object(path: Path, folder: Path) -> dict[str, Any]:
    """Read the JSON object in a file, which must be inside the model folder."""
    try:
        require_inside(path, folder)
    except ValueError as error:
        raise UserError(f"{error}; copy or download it again") from None
    return read_json_object(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, keeping the order of keys."""
    path.unlink(missing_ok=True)  # a copy may be read-only
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _refuse_types(files: WeightFiles) -> None:
    for name, entry in files.entries.items():
        if entry["dtype"] in TYPES or (entry["dtype"] in NO_NUMBERS and len(entry["shape"]) != 2):
            continue
        raise UserError(
            f"{files.folder}: tensor {name!r} has type {entry['dtype']}: the weights are quantised; recentre the "
            "original model, then quantise it again"
        )


def _changed_index(
    files: WeightFiles, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, head_dtype: torch.dtype
) -> dict[str, Any]:
    assert files.index is not None
    metadata = dict(files.index.get("metadata") or {})
    more_bytes = more_numbers = 0
    weight_map = dict(files.index["weight_map"])
    for name, tensor in tensors.items():
        is_new = name not in files.file_of
        before = 0 if is_new else tensor.numel() * files.dtype(name).itemsize
        stored = head_dtype if is_new else dtype or files.dtype(name)
        more_bytes += tensor.numel() * stored.itemsize - before
        more_numbers += tensor.numel() if is_new else 0
        if is_new:
            weight_map[name] = NEW_SHARD
    for key, more in (("total_size", more_bytes), ("total_parameters", more_numbers)):
        if isinstance(metadata.get(key), (int, float)):
            metadata[key] += more
    return {**files.index, "metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _header_changes(files: WeightFiles, untied_head: str | None) -> dict[str, str] | None:
    """Header changes after untying, if the header names the tables, as in our exports."""
    if untied_head is None or files.vocabulary_size is None:
        return None
    return {"output": untied_head, "tied": "false"}
