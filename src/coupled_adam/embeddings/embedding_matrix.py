"""An embedding matrix from any source, read in blocks of rows.

Numpy arrays, memory-mapped files and torch tensors of any float type on any device are read as blocks of float32 or
float64 on the device that measures. The whole matrix is never copied.

Legend: V vocabulary rows, H hidden size, n rows of one block.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import setting

Array = npt.NDArray[Any]
Report = Callable[[float], None]

# Size of a block in float64. On the CPU the allocator reuses memory up to this size.
BLOCK_BYTES = {"cpu": 2**24, "cuda": 2**28}
# Every block is added to an H x H matrix; with fewer rows the addition would cost more than the products.
FEWEST_ROWS = 1024
# Squares of entries within these bounds, and their sums over a whole matrix, are normal float64 numbers.
SMALLEST_UNSCALED, LARGEST_UNSCALED, LARGEST = 1e-100, 1e100, 1e300


@dataclass(frozen=True)
class EmbeddingMatrix:
    """An embedding matrix E (V, H) for the measures."""

    source: Array | Tensor
    device: torch.device
    block_rows: int
    scale: float = 1.0
    """Power of two that the rows are divided by, so that squares of extreme float64 entries stay finite."""

    @property
    def V(self) -> int:
        return int(self.source.shape[0])

    @property
    def H(self) -> int:
        return int(self.source.shape[1])

    def spans(self, report: Report | None = None) -> Iterator[slice]:
        """The blocks of rows in order; the finished fraction is reported after each."""
        for start in range(0, self.V, self.block_rows):
            stop = min(start + self.block_rows, self.V)
            yield slice(start, stop)
            if report is not None:
                report(stop / self.V)

    def rows(self, span: slice | Array) -> Tensor:
        """E[span] / scale, (n, H), in float64, or in float32 if that is exact. May share the caller's memory."""
        block = torch_rows(self.source, span).to(self.device)
        if block.dtype not in (torch.float32, torch.float64):
            block = block.float()
        return block if self.scale == 1.0 else block.double() / self.scale


def part(report: Report | None, begin: float, end: float) -> Report | None:
    """Map the progress of a part to the progress of the whole, from `begin` to `end`."""
    return None if report is None else lambda fraction: report(begin + (end - begin) * fraction)


def torch_rows(source: Array | Tensor, span: slice | Array) -> Tensor:
    """Some rows as a torch tensor, without a copy if possible."""
    if isinstance(source, Tensor):
        index = span if isinstance(span, slice) else torch.from_numpy(span).to(source.device)
        return source[index]
    block = np.ascontiguousarray(source[span])
    if block.dtype not in (np.float16, np.float32, np.float64):
        block = block.astype(np.float64)
    # torch warns about read-only memory, such as a file mapped for reading.
    return torch.from_numpy(block if block.flags.writeable else block.copy())


def open_table(E: Array | Tensor, device: str | torch.device | None, block_rows: int | None) -> EmbeddingMatrix:
    """Validate the matrix, and choose the device and the block size."""
    check_matrix(E)
    source = E.detach() if isinstance(E, Tensor) else E
    table = EmbeddingMatrix(source, place(source, device), 1)
    if block_rows is None:
        bytes_at_once = BLOCK_BYTES.get(table.device.type, BLOCK_BYTES["cuda"])
        block_rows = max(FEWEST_ROWS, bytes_at_once // (8 * table.H))
    if block_rows < 1:
        raise UserError(f"Invalid block_rows value: {block_rows}. Use a positive number of rows, or None")
    return replace(table, block_rows=min(block_rows, table.V))


def check_matrix(E: Array | Tensor) -> None:
    """Raise unless E is a non-empty matrix of floating-point numbers."""
    if not isinstance(E, (np.ndarray, Tensor)):
        raise UserError(f"E is a {type(E).__name__}; pass a numpy array or a torch tensor of shape (V, H)")
    shape = tuple(E.shape)
    if len(shape) != 2:
        raise UserError(f"E has shape {shape}, expected (V, H); pass the matrix with one row per token")
    if 0 in shape:
        raise UserError(f"E has shape {shape}: it is empty, so there is nothing to measure")
    if isinstance(E, Tensor):
        if E.layout != torch.strided:
            raise UserError(f"E has layout {E.layout}, expected a dense matrix; convert it first with E.to_dense()")
        if E.device.type == "meta":
            raise UserError("E is on the meta device, where tensors have no entries; load its weights first")
        is_float, remedy = E.dtype.is_floating_point, "E.float()"
    else:
        # bfloat16 arrays come from ml_dtypes; numpy does not count them as floating point.
        is_float = np.issubdtype(E.dtype, np.floating) or E.dtype.name == "bfloat16"
        remedy = "E.astype('float32')"
    if not is_float:
        raise UserError(
            f"E has dtype {E.dtype}, expected a matrix of floating-point numbers; "
            f"dequantise or convert it first, for example with {remedy}"
        )


def place(source: Array | Tensor, device: str | torch.device | None) -> torch.device:
    """The device to measure on: the requested one, otherwise that of the matrix."""
    if device is None:
        where = source.device if isinstance(source, Tensor) else torch.device("cpu")
        return torch.device("cpu") if where.type == "mps" else where  # Apple's GPUs have no float64
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"Invalid device value: {device!r}. Use 'cpu' or 'cuda'") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"Invalid device value: {device!r}. torch sees no CUDA device here; use 'cpu'")
    if where.type == "mps":
        raise UserError(f"Invalid device value: {device!r}. It has no float64; use 'cpu'")
    if where.type == "meta":
        raise UserError(f"Invalid device value: {device!r}. Nothing is computed there; use 'cpu' or 'cuda'")
    return where


def scaled(table: EmbeddingMatrix, report: Report | None) -> EmbeddingMatrix:
    """Set a scale at which no square overflows or underflows; raise for non-finite entries."""
    largest = 0.0
    for span in table.spans(report):
        block = table.rows(span)
        low, high = torch.aminmax(block)
        largest = max(largest, -float(low), float(high))
        if not math.isfinite(float(low) + float(high)):
            refuse_non_finite(block, span.start)
    if largest > LARGEST:
        raise UserError(
            f"E has an entry of size {setting(largest)}, whose square overflows float64. Scale the matrix first"
        )
    if largest == 0.0 or SMALLEST_UNSCALED <= largest <= LARGEST_UNSCALED:
        return table
    return replace(table, scale=math.ldexp(1.0, math.frexp(largest)[1]))


def refuse_non_finite(block: Tensor, start: int) -> None:
    bad = (~torch.isfinite(block)).nonzero()
    if len(bad):
        row, column = (int(index) for index in bad[0])
        raise UserError(
            f"E: row {start + row} has the non-finite entry {float(block[row, column])} in column {column}. "
            "Nothing can be measured; use an earlier checkpoint, or remove such rows"
        )
