"""Coupled Adam on the CPU as two compiled loops: six passes over the memory of a table, compared with AdamW's seven.

The first loop reads g; the second reads g, m, e and writes m, e. With beta1 = 0 there is no m, and four passes remain.
numba compiles them at the first step, in about two seconds, and caches them on disk. `blockwise` uses them for large
float32 and bfloat16 tables if numba is installed (the extra `cpu`). In torch, each loop would be several operations
with a barrier each. All sums are float64 and their order depends only on the shape, so a step is bitwise reproducible
with any number of threads.

Legend: V vocabulary rows, H hidden size. A piece is a range of rows that one thread processes at a time.
"""

import numpy as np
import torch
from torch import Tensor

from coupled_adam.optimizer.numba_elements import (
    advance_moment,
    array_of,
    claim_piece,
    compiled_loop,
    count_as_written,
    keys_of_row,
    load,
    moment_array,
    moment_numbers,
    round_like,
    rounding_numbers,
    run_loop,
)
from coupled_adam.optimizer.stochastic_rounding import StepKeys
from coupled_adam.optimizer.table import Table

# Elements of a piece: 50 to 100 microseconds of work, so that no thread waits long for the last one.
PIECE_ELEMENTS = 2**17
SUM_PIECE_ROWS = 512
# Limit for the partial sums: one float64 row per piece.
PARTIAL_SUM_BYTES = 2**20

DTYPES = (torch.float32, torch.bfloat16)


def column_square_sums(grad: Tensor) -> Tensor:
    """Sum g_i^2 over the rows i: (1, H) float64; see `blockwise.column_square_sums`.

    Args:
        grad: g, (V, H), contiguous, with one of DTYPES.
    """
    V, H = grad.shape
    most_pieces = max(PARTIAL_SUM_BYTES // (8 * H), 1)
    rows = max(SUM_PIECE_ROWS, -(-V // most_pieces))
    partial_sums = torch.empty(-(-V // rows), H, dtype=torch.float64).numpy()
    run_loop(_add_squares, array_of(grad), rows, partial_sums)
    # numpy adds up the rows in order. A sum in torch would be another operation with a barrier.
    return torch.from_numpy(partial_sums.sum(axis=0, keepdims=True))


def apply_update(table: Table, coefficient: Tensor, factor: float, keys: StepKeys | None = None) -> None:
    """Update m_t and e_t of a table in place; see `blockwise.apply_update`.

    Args:
        table: the table; param, grad and any exp_avg contiguous, with DTYPES, numbers of `hyper` on the host.
        coefficient: coefficient of the first moment, (1, H) float32.
        factor: factor of the gradient: loss scale, clipping, -1 for maximize.
        keys: keys of this step's stochastic rounding, if any.
    """
    arrays = (array_of(table.param), array_of(table.grad), moment_array(table))
    columns = coefficient.numpy().reshape(-1)
    decay = np.float32(1 - table.hyper.lr * table.hyper.weight_decay)
    rows = max(PIECE_ELEMENTS // table.param.shape[1], 1)
    numbers = (moment_numbers(table, factor), rounding_numbers(table, keys))
    run_loop(_update_rows, *arrays, columns, decay, *numbers, rows)
    count_as_written(table.param, table.exp_avg)


@compiled_loop
def _add_squares(grad, rows, partial_sums, next_piece):
    V, H = grad.shape
    while True:
        piece = claim_piece(next_piece)
        if piece >= partial_sums.shape[0]:
            return
        sums = partial_sums[piece]
        sums[:] = 0.0
        start, stop = piece * rows, min((piece + 1) * rows, V)
        half = (stop - start) // 2
        # Two rows at a time, to load and store `sums` half as often.
        for i in range(start, start + half):
            for h in range(H):
                g1 = np.float64(load(grad[i, h]))
                g2 = np.float64(load(grad[i + half, h]))
                sums[h] += g1 * g1 + g2 * g2
        for i in range(start + 2 * half, stop):
            for h in range(H):
                g1 = np.float64(load(grad[i, h]))
                sums[h] += g1 * g1


@compiled_loop
def _update_rows(param, grad, exp_avg, coefficient, decay, numbers, rounding, rows, next_piece):
    V, H = param.shape
    pieces = (V + rows - 1) // rows
    while True:
        # From the last row to the first: the sums left the end of g in the cache.
        piece = pieces - 1 - claim_piece(next_piece)
        if piece < 0:
            return
        for i in range(piece * rows, min((piece + 1) * rows, V)):
            row_keys = keys_of_row(i, rounding)
            for h in range(H):
                _, m = advance_moment(grad, exp_avg, i, h, numbers, row_keys)
                e = decay * load(param[i, h]) + coefficient[h] * m
                param[i, h] = round_like(e, param[i, h])
