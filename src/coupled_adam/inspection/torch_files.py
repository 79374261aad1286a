"""Tables from PyTorch files, with an unpickler that builds tensors and containers and nothing else.

A pickle is a program. `weights_only=True` refuses every step that is not on torch's list of harmless ones, so a file
from a stranger cannot run code here. Under FakeTensorMode torch reads that program and no weights, and notes where in
the file each storage is. What it notes is checked against the list of records in the file before it is believed.

A file is read as a whole where this does not work: the format before torch 1.6, and numbers of the other byte order.
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
                f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}, but the file has fewer numbers of it (its "
                "rows share memory); save a copy of it with .contiguous()"
            )
        return _real(tensor, name, path, records) if isinstance(tensor, FakeTensor) else tensor

    return Stored(names=list(tensors), shape=lambda name: tuple(tensors[name].shape), read=read)


def _starts_as_zip(path: Path) -> bool:
    """Whether torch takes it for a zip file. zipfile.is_zipfile looks at the end, before which anything can stand."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _has_own_byte_order(path: Path) -> bool:
    """Whether the numbers in a zip file have the byte order of this machine. As torch swaps the bytes of others in
    storages that FakeTensorMode has not filled, the process would crash."""
    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))  # as torch.load reads it, so that both see the same
        return not reader.has_record("byteorder") or reader.get_record("byteorder") == sys.byteorder.encode()
    except RuntimeError:  # not a file of torch, which torch.load says better
        return True


def _records(path: Path) -> dict[int, zipfile.ZipInfo]:
    """The records of a zip file by the place where their bytes begin."""
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
    """Keep torch from logging a traceback of what is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load(path: Path, *, without_weights: bool) -> dict[str, Tensor]:
    remedy = "if you trust it, save its state dict as safetensors and give that"
    fake = FakeTensorMode() if without_weights else nullcontext()
    with refusing_bad_files(path, remedy), warnings.catch_warnings(), _without_log(), fake:
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
        raise UserError(
            f"{path}: refused, because reading this pickle could run code of whoever wrote it ({reason}); {remedy}"
        ) from None
    except Exception as error:  # whatever torch's readers stumble over in bytes that are no PyTorch file
        raise _not_whole(path, error) from None


def _not_whole(path: Path, error: Exception) -> UserError:
    reason = str(error).split("\n")[0].split(". ")[0]
    return UserError(f"{path}: not a whole PyTorch file ({type(error).__name__}: {reason}); copy or download it again")


def _tensors_in(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _tensors_in(below, f"{name}.{key}" if name else str(key))


def _real(fake: FakeTensor, name: str, path: Path, records: Mapping[int, zipfile.ZipInfo]) -> Tensor:
    """The numbers of a tensor that was loaded without them."""
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
        else:  # packed anew by another program
            with zipfile.ZipFile(path) as archive, archive.open(record) as file:
                flat = torch.frombuffer(bytearray(file.read(size)), dtype=fake.dtype)
        real = flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())
    except Exception as error:  # whatever zipfile and torch stumble over in bytes that are no tensor
        raise _not_whole(path, error) from None
    return real.neg() if fake.is_neg() else real
