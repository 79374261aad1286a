"""Tables from GGUF files, the format of llama.cpp. Only tensors that are read are converted to float32.

Requires the package gguf, so it is imported only for such files.
"""

from pathlib import Path
from typing import Any

from gguf import dequantize
from numpy.typing import NDArray

from coupled_adam.base.errors import UserError
from coupled_adam.gguf_reader import not_whole, open_reader
from coupled_adam.inspection.stored import Shape, Stored


def open_gguf(path: Path) -> Stored:
    """Open a GGUF file; its vocabulary serves as tokenizer."""
    tensors = {tensor.name: tensor for tensor in open_reader(path).tensors}

    def shape(name: str) -> Shape:
        return tuple(int(size) for size in reversed(tensors[name].shape))  # GGUF stores the fastest dimension first

    def read(name: str) -> NDArray[Any]:
        tensor = tensors[name]
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UserError(f"{path}: tensor {name!r} has type {kind}, which gguf cannot dequantise") from None
        except Exception as error:
            raise not_whole(path, error) from None
        if numbers.shape != shape(name):  # a product of sizes may overflow 64 bits
            raise UserError(
                f"{path}: tensor {name!r} should have shape {shape(name)}, but has {numbers.shape}; copy or download "
                "the file again"
            )
        return numbers

    return Stored(names=list(tensors), shape=shape, read=read, tokenizer=lambda: str(path))
