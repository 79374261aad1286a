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
    except Exception as error:  # whatever the reader stumbles over in bytes that are no model; RecursionError too
        raise _not_whole(path, error) from None

    def shape(name: str) -> Shape:
        return tuple(int(size) for size in reversed(tensors[name].shape))  # GGUF writes the fastest dimension first

    def read(name: str) -> NDArray[Any]:
        tensor = tensors[name]
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{path}: tensor {name!r} has type {kind}, which gguf cannot turn into numbers") from None
        except Exception as error:
            raise _not_whole(path, error) from None
        if numbers.shape != shape(name):  # a product of sizes that is too large for 64 bits is taken for a small one
            raise ValueError(
                f"{path}: tensor {name!r} should have shape {shape(name)}, but has {numbers.shape}; copy or download "
                "the file again"
            )
        return numbers

    return Stored(names=list(tensors), shape=shape, read=read, tokenizer=lambda: str(path))


def _not_whole(path: Path, error: Exception) -> ValueError:
    reason = str(error).split("\n")[0] or type(error).__name__
    return ValueError(f"{path}: not a whole GGUF file ({reason}); copy or download it again")
