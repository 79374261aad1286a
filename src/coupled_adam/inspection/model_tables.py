"""Find the vocabulary tables of a model, and whether one table is both input and output.

A table is found by its name in common model families, with any prefix. Names inside a numbered layer are never used. If
input and output are both stored, their content decides whether they are tied.

Legend: V vocabulary rows, H hidden size.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import some_of
from coupled_adam.inspection.file_formats import SUFFIXES, open_file
from coupled_adam.inspection.folders import open_folder, open_hub_model
from coupled_adam.inspection.hub import HUB_NAME
from coupled_adam.inspection.stored import Matrix, Stored

Role = Literal["input", "output", "tied"]

INPUT_NAMES = (
    "wte",  # GPT-2, GPT-J
    "embed_tokens",  # Llama, Mistral, Gemma, Qwen, OPT
    "shared",  # T5, BART
    "word_embeddings",  # BERT, BLOOM, Falcon, Megatron
    "tok_embeddings",  # Llama in Meta's format, ModernBERT, torchtitan
    "embed_in",  # GPT-NeoX, Pythia
    "token_embd",  # GGUF
    "tokens_embed",  # GPT
    "word_embedding",  # XLNet
    "token_embedding",
    "token_embeddings",
    "token_embedding_table",
    "tok_emb",
    "embeddings",  # Mamba
    "embedding",
    "embed",
    "emb",  # RWKV
)
OUTPUT_NAMES = (
    "lm_head",  # most Hugging Face models
    "embed_out",  # GPT-NeoX, Pythia
    "output",  # GGUF, Llama in Meta's format, torchtitan
    "output_layer",  # Megatron, ChatGLM
    "lm_head.decoder",  # RoBERTa
    "predictions.decoder",  # BERT
    "unembed",
    "unembedding",
    "proj_out",  # Whisper
    "head",  # RWKV
)
LISTED = 8  # candidates shown in a message


@dataclass(frozen=True)
class ModelTable:
    """One vocabulary table."""

    name: str
    role: Role
    matrix: Matrix  # (V, H), without padding rows if their number is known


@dataclass(frozen=True)
class Model:
    """The tables of one PATH."""

    path: str
    tied: bool
    tables: Sequence[ModelTable]
    tokenizer: Callable[[], str] | None


def read_model(path: str, tensor: str | None = None) -> Model:
    """Open a PATH and read its tables.

    Args:
        path: a file, a folder or a hub name.
        tensor: the name of the only table to read, or its end; None for the input and output tables.
    """
    place = Path(path)
    if place.is_dir():
        stored = open_folder(place)
    elif place.exists():
        stored = open_file(place)
    elif _is_hub_name(path):
        stored = open_hub_model(path)
    else:
        raise UserError(f"{path}: no such file or folder")
    tables = find_tables(stored, path) if tensor is None else [_chosen_table(stored, path, tensor)]
    return Model(path, tied=tables[0].role == "tied", tables=tables, tokenizer=stored.tokenizer)


def _is_hub_name(path: str) -> bool:
    """Whether a path that does not exist may be a hub name and not a misspelt file."""
    place = Path(path)
    is_in_folder = len(place.parts) > 1 and place.parent.is_dir()
    return HUB_NAME.fullmatch(path) is not None and place.suffix not in SUFFIXES and not is_in_folder


def find_tables(stored: Stored, path: str) -> list[ModelTable]:
    """Find the input and output tables, or the one that is both."""
    input_name, output_name = stored.input, stored.output
    if input_name is None and output_name is None:
        input_name = _only_candidate(stored, path, INPUT_NAMES)
        output_name = _only_candidate(stored, path, OUTPUT_NAMES)
    if input_name is None and output_name is None:
        input_name = _only_matrix(stored, path)

    if input_name is None or output_name is None:
        name = input_name or output_name
        assert name is not None
        # Without a head the input table is the head, unless the config says that the model is untied.
        alone: Role = "output" if input_name is None else "input" if stored.tied is False else "tied"
        return [ModelTable(name, alone, _read_matrix(stored, path, name))]
    embedding = _read_matrix(stored, path, input_name)
    if input_name == output_name:
        return [ModelTable(input_name, "tied", embedding)]
    head = _read_matrix(stored, path, output_name)
    if _identical(embedding, head):
        return [ModelTable(input_name, "tied", embedding)]
    return [ModelTable(input_name, "input", embedding), ModelTable(output_name, "output", head)]


def _chosen_table(stored: Stored, path: str, wanted: str) -> ModelTable:
    name = _resolve_name(stored, path, wanted)
    return ModelTable(name, _role_of(name, stored, path), _read_matrix(stored, path, name))


def _role_of(name: str, stored: Stored, path: str) -> Role:
    is_output = name == stored.output or _has_usual_name(name, OUTPUT_NAMES)
    is_table = is_output or name == stored.input or _has_usual_name(name, INPUT_NAMES)
    tied = stored.tied
    if tied is None:
        try:
            found = find_tables(stored, path)
        except ValueError:  # problems of the other tables do not matter here
            found = []
        tied = bool(found) and found[0].role == "tied"
        is_table |= name in [table.name for table in found]
    if tied and is_table:
        return "tied"
    return "output" if is_output else "input"


def _resolve_name(stored: Stored, path: str, wanted: str) -> str:
    if wanted in stored.names:
        return wanted
    ends = [name for name in stored.names if f".{name}".endswith((f".{wanted}", f".{wanted}.weight"))]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise UserError(f"{path}: several tensors end in {wanted!r}: {some_of(ends, LISTED)}; pass a longer name")
    holding = [name for name in stored.names if wanted in name]
    near = difflib.get_close_matches(wanted, stored.names, n=3, cutoff=0.5)
    if not (near or holding):
        near = list(stored.names)
    raise UserError(f"{path}: no tensor {wanted!r}; similar names: {some_of(dict.fromkeys(near + holding), LISTED)}")


def _only_candidate(stored: Stored, path: str, usual: Sequence[str]) -> str | None:
    names = [name for name in stored.names if _has_usual_name(name, usual) and len(stored.shape(name)) == 2]
    # A state dict may hold one table under several names, such as T5's encoder, decoder and `shared`.
    for other in names[1:]:
        same_shape = stored.shape(other) == stored.shape(names[0])
        if not (same_shape and _identical(stored.read(names[0]), stored.read(other))):
            raise UserError(f"{path}: several tables; choose one with --tensor: {_with_shapes(stored, names)}")
    return names[0] if names else None


def _only_matrix(stored: Stored, path: str) -> str:
    unusual = f"{path}: no tensor has a known table name; choose one with --tensor: "
    if stored.in_shards:
        raise UserError(unusual + some_of(stored.names, LISTED))
    matrices = [name for name in stored.names if len(stored.shape(name)) == 2]
    if not matrices:
        shown = f"it has {_with_shapes(stored, stored.names)}" if stored.names else "it has no tensor"
        raise UserError(f"{path}: no 2-D table found; {shown}")
    if len(matrices) > 1:
        largest_first = sorted(matrices, key=lambda name: -stored.shape(name)[0])
        raise UserError(unusual + _with_shapes(stored, largest_first))
    return matrices[0]


def _has_usual_name(name: str, usual: Sequence[str]) -> bool:
    stem = name.removesuffix(".weight")
    in_numbered_layer = any(part.isdecimal() for part in stem.split("."))
    return not in_numbered_layer and any(f".{stem}".endswith(f".{end}") for end in usual)


def _read_matrix(stored: Stored, path: str, name: str) -> Matrix:
    shape = stored.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"{path}: tensor {name!r} has shape {shape}, expected (V, H)")
    return stored.read(name)[: stored.vocabulary_size]


def _identical(first: Matrix, second: Matrix, block_rows: int = 4096) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    for start in range(0, first.shape[0], block_rows):
        ours, theirs = first[start : start + block_rows], second[start : start + block_rows]
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            same = torch.equal(ours, theirs)
        else:
            same = np.array_equal(ours, theirs)
        if not same:
            return False
    return True


def _with_shapes(stored: Stored, names: Sequence[str]) -> str:
    return some_of([f"{name} {stored.shape(name)}" for name in names], LISTED)
