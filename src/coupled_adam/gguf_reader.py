"""A reader of GGUF files that ends where the file does. Needs the package gguf, so it is imported where it is used."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFReader
from numpy.typing import DTypeLike, NDArray

from coupled_adam.base.errors import UserError


class StrictReader(GGUFReader):
    """Raises where the file ends; the original reads on, one empty array after the other, as long as a count says."""

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> NDArray[Any]:
        order = override_order or self.byte_order
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))


def open_reader(path: Path) -> StrictReader:
    """Open a file; a ValueError names one that is damaged."""
    try:
        return StrictReader(path)
    except Exception as error:  # whatever the reader stumbles over in bytes that are no model; RecursionError too
        raise not_whole(path, error) from None


def not_whole(path: Path, error: Exception) -> UserError:
    """The error of a file that is damaged."""
    reason = str(error).split("\n")[0] or type(error).__name__
    return UserError(f"{path}: not a whole GGUF file ({reason}); copy or download it again")
