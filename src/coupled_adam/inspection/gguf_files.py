"""Tables from GGUF files, the format of llama.cpp. Only the tensors that are read are turned into float32.

Needs the package gguf, so it is imported only when such a file is given.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import DTypeLike, NDArray

from coupled_adam.inspection.stored import Shape, Stored


class StrictReader(GGUFReader):
    """Raises where the file ends; the original reads on, one empty array after the other, as long as a count says."""

    def _get(
        self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> NDArray[Any]:
        order = override_order or self.byte_order
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))


def open_gguf(path: Path) -> Stored:
    """Open a GGUF file; its vocabulary serves as tokenizer."""
    try:
        tensors = {tensor.name: tensor for tensor in StrictReader(path).tensors}
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}: not a whole GGUF file ({error}); copy or download it again") from None

    def shape(name: str) -> Shape:
        return tuple(int(size) for size in reversed(tensors[name].shape))  # GGUF writes the fastest dimension first

    def read(name: str) -> NDArray[Any]:
        tensor = tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{path}: tensor {name!r} has type {kind}, which gguf cannot turn into numbers") from None

    return Stored(names=list(tensors), shape=shape, read=read, tokenizer=lambda: str(path))
