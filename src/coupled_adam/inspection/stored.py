"""Common interface of all file formats: tensors by name, and metadata.

The one idea: opening reads only names and headers, and `read` reads the content of a tensor, so a 70 GB checkpoint
costs no more than its tables.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.base.errors import UserError

FLOATING = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Matrix = Tensor | NDArray[np.floating[Any]]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """The tensors of one PATH."""

    names: Sequence[str]
    shape: Callable[[str], Shape]
    """Shape of a tensor, from the header of its file."""
    read: Callable[[str], Matrix]
    """Content of a tensor, memory-mapped if the format allows it."""
    in_shards: bool = False
    """Whether shapes are in shards, which may have to be downloaded first."""
    tied: bool | None = None
    """Whether one table is both input and output; None if unknown."""
    input: str | None = None
    """Input table according to the files."""
    output: str | None = None
    """Output table according to the files."""
    vocabulary_size: int | None = None
    """Later rows are padding; None if unknown."""
    tokenizer: Callable[[], str] | None = None
    """Returns a specification for `embeddings.open_tokenizer`; None without a tokenizer."""


def refuse_type(path: Path, name: str, dtype: str) -> NoReturn:
    """Raise for a tensor of an unsupported type."""
    raise UserError(
        f"{path}: tensor {name!r} has type {dtype}, expected one of {', '.join(FLOATING)}; "
        "pass the model before quantisation, or as a GGUF file"
    )


def map_storage(path: Path, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    """Map `size` bytes from `offset` as a flat tensor, read on access.

    torch and safetensors would map the whole file as writable, which Linux refuses for files larger than memory.
    """
    content = np.memmap(path, np.uint8, mode="c", offset=offset, shape=(size,))
    return torch.from_numpy(content).view(dtype)
