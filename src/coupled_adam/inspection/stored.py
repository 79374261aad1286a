"""What every format is opened as: tensors by name, and what the files say of themselves.

The one idea: opening reads names and headers only; the content of a tensor is read when `read` is called, so a 70 GB
checkpoint costs no more than its tables.

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
    """Of the tensor with this name; from the header, or the shard's header."""
    read: Callable[[str], Matrix]
    """The content of the tensor with this name, mapped into memory where the format can be."""
    in_shards: bool = False
    """The shape of a tensor is in a file of its own, which may have to be downloaded first."""
    tied: bool | None = None
    """Whether one table is both input and output; None: the files do not say."""
    input: str | None = None
    """The tensor that the files name as input table."""
    output: str | None = None
    """The tensor that the files name as output table."""
    vocabulary_size: int | None = None
    """Rows beyond it are padding; None: the files do not say."""
    tokenizer: Callable[[], str] | None = None
    """Gives a specification for `embeddings.open_tokenizer`; None: the files have no tokenizer."""


def refuse_type(path: Path, name: str, dtype: str) -> NoReturn:
    """Say that a tensor of this type is no table of numbers."""
    raise UserError(
        f"{path}: tensor {name!r} has type {dtype}, expected one of {', '.join(FLOATING)}; "
        "give the model as it was before it was quantised, or as a GGUF file"
    )


def map_storage(path: Path, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    """The `size` bytes from `offset` on as a flat tensor; they are read when they are looked at.

    torch and safetensors would map the whole file to be written to, which Linux refuses for files larger than memory.
    """
    content = np.memmap(path, np.uint8, mode="c", offset=offset, shape=(size,))
    return torch.from_numpy(content).view(dtype)
