"""Tables from PyTorch files, with an unpickler that builds tensors and containers and nothing else.

A pickle is a program. `weights_only=True` refuses every step that is not on torch's list of harmless ones, so a file
from a stranger cannot run code here. Under FakeTensorMode torch reads that program and no weights, and notes where in
the file each storage is.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from coupled_adam.inspection.stored import FLOATING, Stored, map_storage, refuse_type


def open_torch(path: Path) -> Stored:
    """Open a tensor, a state dict, or a checkpoint with state dicts in it; names are joined with dots."""
    tensors = _load(path)
    if list(tensors) == [""]:
        tensors = {path.stem: tensors[""]}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in FLOATING or tensor.layout != torch.strided:
            refuse_type(path, name, dtype if tensor.layout == torch.strided else str(tensor.layout))
        return _real(tensor, path) if isinstance(tensor, FakeTensor) else tensor

    return Stored(names=list(tensors), shape=lambda name: tuple(tensors[name].shape), read=read)


def _load(path: Path) -> dict[str, Tensor]:
    # Before 1.6 torch wrote another format than zip files, which can only be read as a whole.
    without_weights = FakeTensorMode() if zipfile.is_zipfile(path) else nullcontext()
    remedy = "if you trust it, save its state dict as safetensors and give that"
    with refusing_bad_files(path, remedy), warnings.catch_warnings(), without_weights:
        warnings.simplefilter("ignore")  # about pickle protocols that torch may not know: then it raises anyway
        return dict(_tensors_in(torch.load(path, map_location="cpu", weights_only=True), name=""))


@contextmanager
def refusing_bad_files(path: Path, remedy: str) -> Iterator[None]:
    """Around a `torch.load` with `weights_only=True`: a ValueError says what is wrong with the file.

    Args:
        path: the file, for the message.
        remedy: what to do about a file with more in it than tensors and containers.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {wanted[1]}" if wanted else "it holds more than tensors"
        raise ValueError(
            f"{path}: refused, because reading this pickle could run code of whoever wrote it ({reason}); {remedy}"
        ) from None
    except Exception as error:  # whatever torch's readers stumble over in bytes that are no PyTorch file
        reason = str(error).split("\n")[0].split(". ")[0]
        raise ValueError(
            f"{path}: not a whole PyTorch file ({type(error).__name__}: {reason}); copy or download it again"
        ) from None


def _tensors_in(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _tensors_in(below, f"{name}.{key}" if name else str(key))


def _real(fake: FakeTensor, path: Path) -> Tensor:
    storage = fake.untyped_storage()
    offset = storage._checkpoint_offset
    assert offset is not None
    flat = map_storage(path, offset, storage.nbytes(), fake.dtype)
    return flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())
