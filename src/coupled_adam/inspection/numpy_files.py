"""Tables from .npy and .npz files, without unpickling."""

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
    # Like version 2, but in UTF-8, which only matters for column names of structured arrays.
    (3, 0): np.lib.format.read_array_header_2_0,
}


def open_npy(path: Path) -> Stored:
    """Open one array, memory-mapped; its name is the file's without .npy."""
    with _one_line_errors(path):
        array = np.lib.format.open_memmap(path, mode="r")
    return Stored(names=[path.stem], shape=lambda _: array.shape, read=lambda name: _as_numbers(path, name, array))


def open_npz(path: Path) -> Stored:
    """Open an archive; reading a tensor reads only that member."""

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
        with np.errstate(over="raise"):  # the product of sizes may overflow
            yield
    except Exception as error:  # numpy and zipfile raise many kinds of errors on damaged files
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"{path}: not a readable {path.suffix} file ({reason}); save it again with numpy") from None


def _as_numbers(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.name not in FLOATING:
        refuse_type(path, name, array.dtype.name)
    # torch does not support arrays of the other byte order.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
