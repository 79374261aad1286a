"""Tables from PyTorch files, with an unpickler that builds only tensors and containers.

A pickle is a program. `weights_only=True` allows only harmless steps, so an untrusted file cannot run code. Under
FakeTensorMode torch reads this program but no weights, and records the offset of each storage. The offsets are checked
against the records in the file before they are used.

Where this does not work, the whole file is read: the format before torch 1.6, the other byte order, and sparse tensors
with torch 2.15, which checks their indices.
"""

import logging
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.stored import FLOATING, Stored, map_storage, refuse_type


def open_torch(path: Path) -> Stored:
    """Open a tensor, a state dict, or a checkpoint with state dicts in it; names are joined with dots."""
    is_zip = _starts_as_zip(path)
    tensors = _load(path, without_weights=is_zip and _has_own_byte_order(path))
    records = _records(path) if is_zip else {}
    if list(tensors) == [""]:
        tensors = {path.stem: tensors[""]}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in FLOATING or tensor.layout != torch.strided:
            refuse_type(path, name, dtype if tensor.layout == torch.strided else str(tensor.layout))
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}, but the file has fewer numbers (its rows "
                "share memory); save a copy with .contiguous()"
            )
        return _real(tensor, name, path, records) if isinstance(tensor, FakeTensor) else tensor

    return Stored(names=list(tensors), shape=lambda name: tuple(tensors[name].shape), read=read)


def _starts_as_zip(path: Path) -> bool:
    """Whether torch treats the file as a zip file. zipfile.is_zipfile looks only at the end of the file."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _has_own_byte_order(path: Path) -> bool:
    """Whether a zip file has the byte order of this machine. Otherwise torch would swap the bytes of storages that
    FakeTensorMode has not filled, and crash."""
    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))  # the reader of torch.load, so that both see the same
        return not reader.has_record("byteorder") or reader.get_record("byteorder") == sys.byteorder.encode()
    except RuntimeError:  # not a PyTorch file: torch.load has the better message
        return True


def _records(path: Path) -> dict[int, zipfile.ZipInfo]:
    """The records of a zip file by the offset of their content."""
    found = {}
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                file.seek(record.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                found[record.header_offset + 30 + name_length + extra_length] = record
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise _not_whole(path, error) from None
    return found


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging tracebacks of errors that are raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load(path: Path, *, without_weights: bool) -> dict[str, Tensor]:
    remedy = "if you trust it, save its state dict as safetensors and pass that file"
    with refusing_bad_files(path, remedy), warnings.catch_warnings(), _without_log():
        warnings.simplefilter("ignore")  # about unknown pickle protocols, which raise anyway
        try:
            with FakeTensorMode() if without_weights else nullcontext():
                return dict(_tensors_in(torch.load(path, map_location="cpu", weights_only=True), name=""))
        except RuntimeError as error:
            # torch 2.15 checks the indices of sparse tensors, which FakeTensorMode has not filled.
            if not without_weights or "data is not allocated" not in str(error):
                raise
            return dict(_tensors_in(torch.load(path, map_location="cpu", weights_only=True), name=""))


@contextmanager
def refusing_bad_files(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors of `torch.load` with `weights_only=True` into a ValueError about the file.

    Args:
        path: the file, for the message.
        remedy: for a file with more than tensors and containers.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {wanted[1]}" if wanted else "it has more than tensors"
        raise UserError(
            f"{path}: refused, because reading this pickle could run untrusted code ({reason}); {remedy}"
        ) from None
    except Exception as error:  # torch's readers raise many kinds of errors on damaged files
        raise _not_whole(path, error) from None


def _not_whole(path: Path, error: Exception) -> UserError:
    reason = str(error).split("\n")[0].split(". ")[0]
    return UserError(
        f"{path}: not a complete PyTorch file ({type(error).__name__}: {reason}); copy or download it again"
    )


def _tensors_in(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _tensors_in(below, f"{name}.{key}" if name else str(key))


def _real(fake: FakeTensor, name: str, path: Path, records: Mapping[int, zipfile.ZipInfo]) -> Tensor:
    """Read the content of a tensor that was loaded without it."""
    storage = fake.untyped_storage()
    offset, size = storage._checkpoint_offset, storage.nbytes()
    record = records.get(-1 if offset is None else offset)
    if record is None or record.file_size != size:
        raise UserError(
            f"{path}: tensor {name!r} should have {size} bytes, but its record has "
            f"{'none' if record is None else record.file_size}; copy or download the file again"
        )
    try:
        if record.compress_type == zipfile.ZIP_STORED:
            assert offset is not None
            flat = map_storage(path, offset, size, fake.dtype)
        else:  # recompressed by another program
            with zipfile.ZipFile(path) as archive, archive.open(record) as file:
                flat = torch.frombuffer(bytearray(file.read(size)), dtype=fake.dtype)
        real = flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())
    except Exception as error:  # zipfile and torch raise many kinds of errors on damaged files
        raise _not_whole(path, error) from None
    return real.neg() if fake.is_neg() else real
