"""Tables from .npy and .npz files, never unpickling."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.stored import FLOATING, Shape, Stored, refuse_type

HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    # As version 2, but in UTF-8: that matters for the names of columns, which a table of numbers has not.
    (3, 0): np.lib.format.read_array_header_2_0,
}


def open_npy(path: Path) -> Stored:
    """Open one array, mapped into memory; its name is the file's without .npy."""
    with _one_line_errors(path):
        array = np.lib.format.open_memmap(path, mode="r")
    return Stored(names=[path.stem], shape=lambda _: array.shape, read=lambda name: _as_numbers(path, name, array))


def open_npz(path: Path) -> Stored:
    """Open an archive; reading a tensor reads that member only."""

    def shape(name: str) -> Shape:
        with _one_line_errors(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
            read_header = HEADER_READERS[np.lib.format.read_magic(member)]
            return read_header(member)[0]

    def read(name: str) -> NDArray[Any]:
        with _one_line_errors(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
        return _as_numbers(path, name, array)

    with _one_line_errors(path), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    return Stored(names=names, shape=shape, read=read)


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        with np.errstate(over="raise"):  # of sizes, when they are multiplied
            yield
    except Exception as error:  # whatever numpy and zipfile stumble over in bytes that are no array
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"{path}: not a readable {path.suffix} file ({reason}); save it again with numpy") from None


def _as_numbers(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.name not in FLOATING:
        refuse_type(path, name, array.dtype.name)
    # torch refuses arrays of the other byte order.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
