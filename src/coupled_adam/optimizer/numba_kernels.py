"""The two passes over a table on the CPU as compiled loops: six passes over its memory, against AdamW's seven.

Numba compiles them at the first step, in about two seconds, and keeps them on disk. `blockwise` uses them for large
float32 and bfloat16 tables where numba is installed (the extra `cpu`); the same in torch operations
is several operations with a barrier each. All sums are float64 and in an order that depends on the shape alone: a step
gives the same bits for any number of threads.

Legend: V vocabulary rows, H hidden size. A piece is a range of rows that one thread works on at a time.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from coupled_adam.optimizer.row_threads import run_on_threads
from coupled_adam.optimizer.table import Table

# Elements of a table in one piece: 50 to 100 microseconds of work, so that no thread waits long for the last one.
PIECE_ELEMENTS = 2**17
SUM_PIECE_ROWS = 512
# Of the partial sums, one row of float64 for each piece.
PARTIAL_SUM_BYTES = 2**20

DTYPES = (torch.float32, torch.bfloat16)


def column_square_sums(grad: Tensor) -> Tensor:
    """Sum of g_i^2 over the rows i, (1, H) float64; see `blockwise.column_square_sums`.

    Args:
        grad: g, (V, H), contiguous, of one of DTYPES.
    """
    V, H = grad.shape
    most_pieces = max(PARTIAL_SUM_BYTES // (8 * H), 1)
    rows = max(SUM_PIECE_ROWS, -(-V // most_pieces))
    partial_sums = torch.empty(-(-V // rows), H, dtype=torch.float64).numpy()
    _run(_add_squares, _array(grad), rows, partial_sums)
    # numpy adds one row after the other. A sum in torch would be one more operation with a barrier.
    return torch.from_numpy(partial_sums.sum(axis=0, keepdims=True))


def apply_update(table: Table, coefficient: Tensor, factor: float) -> None:
    """Update m_t and e_t of one table in place; see `blockwise.apply_update`.

    Args:
        table: the table; param, grad and exp_avg contiguous and of the same of DTYPES, numbers of `hyper` on the host.
        coefficient: what a row's first moment is multiplied with, (1, H) float32.
        factor: what the gradient is multiplied with: loss scale, clipping, -1 for maximize.
    """
    hyper = table.hyper
    arrays = [_array(tensor) for tensor in (table.param, table.grad, table.exp_avg)]
    columns = coefficient.numpy().reshape(-1)
    numbers = [np.float32(x) for x in (hyper.beta1, 1 - hyper.beta1, factor, 1 - hyper.lr * hyper.weight_decay)]
    rows = max(PIECE_ELEMENTS // table.param.shape[1], 1)
    _run(_update_rows, *arrays, columns, *numbers, rows)
    # So that autograd still notices when a graph that was built before the step is used after it.
    written = [tensor for tensor in (table.param, table.exp_avg) if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


def _run(loop: Any, *arguments: Any) -> None:
    """Run a loop in as many threads as torch uses; its last argument counts the pieces that are taken."""
    next_piece = np.zeros(1, np.int64)

    def work() -> None:
        try:
            loop(*arguments, next_piece)
        except OSError:  # it is compiled, but the disk to keep it on is full, say; now it runs
            loop(*arguments, next_piece)

    run_on_threads(work, torch.get_num_threads())


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor; numpy has no bfloat16, so its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def _claim(typing_context, counter):
    """The number of the next piece, for one thread only."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def _load(typing_context, stored):
    """An element as float32; uint16 are the bits of a bfloat16, the upper half of a float32's."""

    def codegen(context, builder, signature, arguments):
        (value,) = arguments
        if signature.args[0] == types.uint16:
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            value = builder.bitcast(bits, ir.FloatType())
        return value

    return types.float32(stored), codegen


@intrinsic
def _round_like(typing_context, value, stored):
    """A float32 as an element of an array like `stored` is; a bfloat16 is rounded to nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        value = arguments[0]
        if signature.args[1] == types.uint16:
            bits = builder.bitcast(value, ir.IntType(32))
            number = ir.Constant(ir.IntType(32), 0x7FFF)
            upper = ir.Constant(ir.IntType(32), 16)
            odd = builder.and_(builder.lshr(bits, upper), ir.Constant(ir.IntType(32), 1))
            rounded = builder.lshr(builder.add(builder.add(bits, number), odd), upper)
            is_nan = builder.fcmp_unordered("uno", value, value)
            rounded = builder.select(is_nan, ir.Constant(ir.IntType(32), 0x7FC0), rounded)
            value = builder.trunc(rounded, ir.IntType(16))
        return value

    return stored(types.float32, stored), codegen


def _compiled(function):
    """Compile when first called, for the types of the arguments, and keep the result on disk where that is possible.

    Without fastmath: the order of the operations is that of the source.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder it may write to
        return numba.njit(**options)(function)


@_compiled
def _add_squares(grad, rows, partial_sums, next_piece):
    V, H = grad.shape
    while True:
        piece = _claim(next_piece)
        if piece >= partial_sums.shape[0]:
            return
        sums = partial_sums[piece]
        sums[:] = 0.0
        start, stop = piece * rows, min((piece + 1) * rows, V)
        half = (stop - start) // 2
        # Two rows at a time: `sums` is loaded and stored half as often.
        for i in range(start, start + half):
            for h in range(H):
                g1 = np.float64(_load(grad[i, h]))
                g2 = np.float64(_load(grad[i + half, h]))
                sums[h] += g1 * g1 + g2 * g2
        for i in range(start + 2 * half, stop):
            for h in range(H):
                g1 = np.float64(_load(grad[i, h]))
                sums[h] += g1 * g1


@_compiled
def _update_rows(param, grad, exp_avg, coefficient, beta1, one_minus_beta1, factor, decay, rows, next_piece):
    V, H = param.shape
    pieces = (V + rows - 1) // rows
    while True:
        # From the last row to the first: the end of g is what the sums left in the cache.
        piece = pieces - 1 - _claim(next_piece)
        if piece < 0:
            return
        for i in range(piece * rows, min((piece + 1) * rows, V)):
            for h in range(H):
                g = factor * _load(grad[i, h])
                m = _load(exp_avg[i, h])
                # torch.lerp: beta1 and 1 - beta1 add up to one whatever their rounding, and beta1 = 0 gives g.
                m = m + one_minus_beta1 * (g - m) if one_minus_beta1 < 0.5 else g - beta1 * (g - m)
                e = decay * _load(param[i, h]) + coefficient[h] * m
                exp_avg[i, h] = _round_like(m, exp_avg[i, h])
                param[i, h] = _round_like(e, param[i, h])
