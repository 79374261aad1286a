"""The family of second moments on the CPU: passes over a large table as loops that numba compiles.

With mean_free and without clipping, a step is two loops and six passes over the table's memory: `first_pass` reads g
and m and writes m, `move_rows` reads m and e and writes e. `first_pass` reads a row of g a second time, from the cache,
after computing the row's second moment. With beta1 = 0 there is no m: `move_rows` reads g instead, and four passes
remain. The passes of other steps are those in `family_triton`. The order of all sums depends only on the shape, and
within a row also on the CPU. A step is therefore bitwise reproducible with any number of threads.

Legend: V vocabulary rows, H hidden size, P pieces, t optimizer step; rho and a as in `family_blockwise`. A piece is a
range of rows that one thread processes at a time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coupled_adam.optimizer import numba_kernels
from coupled_adam.optimizer.blockwise import bias_correction
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
    part_of_a_loop,
    round_like,
    rounding_numbers,
    run_loop,
)
from coupled_adam.optimizer.stochastic_rounding import StepKeys
from coupled_adam.optimizer.table import Table

# Rows whose rho_i m_ih are added up in float32, which is twice as fast, before going into a float64 sum.
FLOAT32_ROWS = 16


def square_sums(grad: Tensor, real_rows: int) -> tuple[Tensor, Tensor]:
    """Sum squares over the first `real_rows` rows, (1, H), and over the columns, (V, 1); both float64.

    Args:
        grad: g, (V, H), contiguous, with one of `numba_kernels.DTYPES`.
        real_rows: number of rows that are not padding.
    """
    starts, real_pieces = _pieces_of_sums(grad, real_rows)
    column_sums = _partial_sums(starts, grad)
    row_sums = torch.empty(grad.shape[0], 1, dtype=torch.float64)
    run_loop(_add_squares, array_of(grad), starts, column_sums, _column(row_sums))
    return _total(column_sums, real_pieces), row_sums


def first_pass(table: Table, factor: float, keys: StepKeys | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Update r_t and m_t of a table in place; see `family_blockwise.first_pass`.

    Args:
        table: the table; grad and any exp_avg contiguous, with `numba_kernels.DTYPES`, numbers of `hyper` on the host.
        factor: factor of the gradient: loss scale, -1 for maximize.
        keys: keys of this step's stochastic rounding, if any.

    Returns:
        Sums of g^2 and of rho_i m_ih over the real rows, (1, H) float64, and rho, (V, 1), or None for ones.
    """
    hyper, V = table.hyper, table.grad.shape[0]
    # Without row moments, use temporary ones, and the exponent that makes every rho 1.
    has_rows = table.row_avg_sq is not None
    row_avg_sq = table.row_avg_sq if table.row_avg_sq is not None else torch.zeros(V, 1, dtype=torch.float32)
    row_exponent = float(hyper.row_exponent) if has_rows else 0.0
    row_factor = torch.empty(V, 1, dtype=torch.float32)
    starts, real_pieces = _pieces_of_sums(table.grad, table.real_rows)
    column_sums, weighted_sums = _partial_sums(starts, table.grad), _partial_sums(starts, table.grad)
    run_loop(
        _take_first_pass,
        array_of(table.grad),
        moment_array(table),
        _column(row_avg_sq),
        _column(row_factor),
        starts,
        column_sums,
        weighted_sums,
        _row_numbers(table, row_exponent, factor),
        moment_numbers(table, factor),
        rounding_numbers(table, keys),
        FLOAT32_ROWS,
    )
    count_as_written(table.exp_avg, row_avg_sq)
    return _total(column_sums, real_pieces), _total(weighted_sums, real_pieces), row_factor if has_rows else None


def advance_row_moment(table: Table, row_sums: Tensor, factor: float) -> Tensor:
    """Update r_t of a table in place and return rho, (V, 1); see `family_blockwise.advance_row_moment`.

    In torch this takes a dozen operations, each with a barrier.

    Args:
        table: the table, with `row_avg_sq`; numbers of `hyper` on the host.
        row_sums: row sums of squares of the unmodified gradient, over all ranks, (V, 1) float64.
        factor: factor of the gradient: loss scale, clipping, -1 for maximize.
    """
    assert table.row_avg_sq is not None
    row_factor = torch.empty(table.row_avg_sq.shape, dtype=torch.float32)
    vectors = (_column(row_sums.to(torch.float64)), _column(table.row_avg_sq), _column(row_factor))
    numbers = _row_numbers(table, float(table.hyper.row_exponent), factor)
    run_loop(_advance_row_moments, *vectors, numbers, numba_kernels.SUM_PIECE_ROWS)
    count_as_written(table.row_avg_sq)
    return row_factor


def advance_first_moment(
    table: Table, row_factor: Tensor | None, factor: float, keys: StepKeys | None = None
) -> Tensor:
    """Update m_t of a table in place; see `family_blockwise.advance_first_moment`.

    Args:
        table: as for `first_pass`.
        row_factor: rho, (V, 1) float32; None means ones.
        factor: factor of the gradient: loss scale, clipping, -1 for maximize.
        keys: keys of this step's stochastic rounding, if any.

    Returns:
        Sums of rho_i m_ih over the real rows, (1, H) float64.
    """
    starts, real_pieces = _pieces_of_sums(table.grad, table.real_rows)
    weighted_sums = _partial_sums(starts, table.grad)
    arrays = (array_of(table.grad), moment_array(table), _row_factors(table, row_factor))
    numbers = (moment_numbers(table, factor), rounding_numbers(table, keys))
    run_loop(_advance_rows, *arrays, starts, weighted_sums, *numbers, FLOAT32_ROWS)
    count_as_written(table.exp_avg)
    return _total(weighted_sums, real_pieces)


def apply_update(
    table: Table, coefficient: Tensor, row_factor: Tensor | None, factor: float, keys: StepKeys | None = None
) -> None:
    """Update m_t and e_t of a table in place; see `family_blockwise.apply_update`.

    Args:
        table: as for `first_pass`; param must meet the same conditions as grad.
        coefficient: a, (1, H) float32.
        row_factor: rho, (V, 1) float32; None means ones.
        factor: factor of the gradient: loss scale, clipping, -1 for maximize.
        keys: keys of this step's stochastic rounding, if any.
    """
    arrays = (array_of(table.param), array_of(table.grad), moment_array(table))
    vectors = (_row_factors(table, row_factor), coefficient.numpy().reshape(-1))
    numbers = (moment_numbers(table, factor), rounding_numbers(table, keys))
    run_loop(_update_rows, *arrays, *vectors, _decay(table), *numbers, _rows_of_piece(table))
    count_as_written(table.param, table.exp_avg)


def move_rows(
    table: Table, coefficient: Tensor, row_factor: Tensor | None, offset: Tensor | None, factor: float = 1.0
) -> None:
    """Update e_t of a table in place from its updated m_t; see `family_blockwise.move_rows`.

    Args:
        table: the table; param and exp_avg, or else grad, contiguous, with `numba_kernels.DTYPES`.
        coefficient: a, (1, H) float32.
        row_factor: rho, (V, 1) float32; None means ones.
        offset: the mean update, (1, H) float32; None means zeros.
        factor: factor of the gradient, which is read only without a first moment.
    """
    offset = torch.zeros_like(coefficient) if offset is None else offset
    columns = (coefficient.numpy().reshape(-1), offset.numpy().reshape(-1))
    # A moment is final: it gets no factor.
    moment, weight = (table.grad, factor) if table.exp_avg is None else (table.exp_avg, 1.0)
    arrays = (array_of(table.param), array_of(moment), _row_factors(table, row_factor))
    run_loop(_move_rows, *arrays, *columns, np.float32(weight), _decay(table), _rows_of_piece(table))
    count_as_written(table.param)


def _pieces_of_sums(grad: Tensor, real_rows: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the first row of each piece, then V, (P + 1,), and the number of pieces with real rows.

    No piece has both real rows and padding.
    """
    V, H = grad.shape
    most_pieces = max(numba_kernels.PARTIAL_SUM_BYTES // (8 * H), 1)
    rows = max(numba_kernels.SUM_PIECE_ROWS, -(-V // most_pieces))
    real, padding = range(0, real_rows, rows), range(real_rows, V, rows)
    return np.array([*real, *padding, V], np.int64), len(real)


def _partial_sums(starts: npt.NDArray[np.int64], grad: Tensor) -> npt.NDArray[np.float64]:
    sums: npt.NDArray[np.float64] = torch.empty(len(starts) - 1, grad.shape[1], dtype=torch.float64).numpy()
    return sums


def _total(partial_sums: npt.NDArray[np.float64], real_pieces: int) -> Tensor:
    # numpy adds up the rows in order. A sum in torch would be another operation with a barrier.
    return torch.from_numpy(partial_sums[:real_pieces].sum(axis=0, keepdims=True))


def _column(tensor: Tensor) -> npt.NDArray[Any]:
    """View the memory of a (V, 1) tensor as (V,)."""
    array: npt.NDArray[Any] = tensor.detach().numpy()[:, 0]
    return array


def _row_factors(table: Table, row_factor: Tensor | None) -> npt.NDArray[np.float32]:
    return np.ones(table.param.shape[0], np.float32) if row_factor is None else _column(row_factor)


def _row_numbers(table: Table, row_exponent: float, factor: float) -> tuple[float, ...]:
    hyper = table.hyper
    bias_correction2 = float(bias_correction(hyper.beta2, table.step.item() + 1))
    return factor * factor, float(table.width), hyper.beta2, bias_correction2, hyper.eps, row_exponent


def _decay(table: Table) -> np.float32:
    return np.float32(1 - table.hyper.lr * table.hyper.weight_decay)


def _rows_of_piece(table: Table) -> int:
    return max(numba_kernels.PIECE_ELEMENTS // table.param.shape[1], 1)


# `reassoc` only allows vectorizing the sum over a row. NaN and infinity keep their meaning.
@part_of_a_loop(fastmath={"reassoc"})
def _add_row_squares(grad, column_sums):
    """Add the squares of one row to the column sums, and return their sum."""
    row_sum = 0.0
    for h in range(column_sums.shape[0]):
        g = np.float64(load(grad[h]))
        column_sums[h] += g * g
        row_sum += g * g
    return row_sum


@part_of_a_loop()
def _row_factor(row_avg_sq, i, row_sum, numbers):
    """Update r_t of row i and return its rho."""
    square_factor, width, beta2, bias_correction2, eps, row_exponent = numbers
    mean_square = row_sum / width * square_factor
    row_avg_sq[i] = beta2 * np.float64(row_avg_sq[i]) + (1 - beta2) * mean_square
    factor = (np.sqrt(np.float64(row_avg_sq[i]) / bias_correction2) + eps) ** -row_exponent
    return np.float32(0.0 if np.isinf(factor) else factor)


@part_of_a_loop()
def _advance_row(grad, exp_avg, i, rho, numbers, row_keys, sums):
    """Update m_t of one row and add rho_i m_ih to the sums, in float32."""
    for h in range(sums.shape[0]):
        stored, _ = advance_moment(grad, exp_avg, i, h, numbers, row_keys)
        sums[h] += rho * stored


@part_of_a_loop()
def _moving(stored, moment, row_keys):
    """Return the m_t that moves a row: as stored, but before stochastic rounding."""
    if row_keys is None:
        return stored
    return moment


@part_of_a_loop()
def _flush(sums, wide_sums):
    """Add the float32 sums to the float64 sums, and reset them."""
    for h in range(sums.shape[0]):
        wide_sums[h] += sums[h]
        sums[h] = 0


@compiled_loop
def _add_squares(grad, starts, column_sums, row_sums, next_piece):
    while True:
        piece = claim_piece(next_piece)
        if piece >= column_sums.shape[0]:
            return
        column_sums[piece] = 0.0
        for i in range(starts[piece], starts[piece + 1]):
            row_sums[i] = _add_row_squares(grad[i], column_sums[piece])


@compiled_loop
def _advance_row_moments(row_sums, row_avg_sq, row_factor, row_numbers, rows, next_piece):
    V = row_sums.shape[0]
    while True:
        start = rows * claim_piece(next_piece)
        if start >= V:
            return
        for i in range(start, min(start + rows, V)):
            row_factor[i] = _row_factor(row_avg_sq, i, row_sums[i], row_numbers)


@compiled_loop
def _take_first_pass(
    grad,
    exp_avg,
    row_avg_sq,
    row_factor,
    starts,
    column_sums,
    weighted_sums,
    row_numbers,
    numbers,
    rounding,
    float32_rows,
    next_piece,
):
    sums = np.zeros(grad.shape[1], np.float32)
    while True:
        piece = claim_piece(next_piece)
        if piece >= column_sums.shape[0]:
            return
        column_sums[piece] = 0.0
        weighted_sums[piece] = 0.0
        for first in range(starts[piece], starts[piece + 1], float32_rows):
            for i in range(first, min(first + float32_rows, starts[piece + 1])):
                row_sum = _add_row_squares(grad[i], column_sums[piece])
                row_factor[i] = _row_factor(row_avg_sq, i, row_sum, row_numbers)
                row_keys = keys_of_row(i, rounding)
                _advance_row(grad, exp_avg, i, row_factor[i], numbers, row_keys, sums)
            _flush(sums, weighted_sums[piece])


@compiled_loop
def _advance_rows(grad, exp_avg, row_factor, starts, weighted_sums, numbers, rounding, float32_rows, next_piece):
    sums = np.zeros(grad.shape[1], np.float32)
    while True:
        # From the last row to the first, here and below: the previous pass left the end of the table in the cache.
        piece = weighted_sums.shape[0] - 1 - claim_piece(next_piece)
        if piece < 0:
            return
        weighted_sums[piece] = 0.0
        for first in range(starts[piece], starts[piece + 1], float32_rows):
            for i in range(first, min(first + float32_rows, starts[piece + 1])):
                row_keys = keys_of_row(i, rounding)
                _advance_row(grad, exp_avg, i, row_factor[i], numbers, row_keys, sums)
            _flush(sums, weighted_sums[piece])


@compiled_loop
def _update_rows(param, grad, exp_avg, row_factor, coefficient, decay, numbers, rounding, rows, next_piece):
    V, H = param.shape
    pieces = (V + rows - 1) // rows
    while True:
        piece = pieces - 1 - claim_piece(next_piece)
        if piece < 0:
            return
        for i in range(piece * rows, min((piece + 1) * rows, V)):
            row_keys = keys_of_row(i, rounding)
            for h in range(H):
                stored, moment = advance_moment(grad, exp_avg, i, h, numbers, row_keys)
                m = _moving(stored, moment, row_keys)
                e = decay * load(param[i, h]) + coefficient[h] * (row_factor[i] * m)
                param[i, h] = round_like(e, param[i, h])


@compiled_loop
def _move_rows(param, moment, row_factor, coefficient, offset, weight, decay, rows, next_piece):
    V, H = param.shape
    pieces = (V + rows - 1) // rows
    while True:
        piece = pieces - 1 - claim_piece(next_piece)
        if piece < 0:
            return
        for i in range(piece * rows, min((piece + 1) * rows, V)):
            for h in range(H):
                m = row_factor[i] * (weight * load(moment[i, h]))
                e = decay * load(param[i, h]) + coefficient[h] * m - offset[h]
                param[i, h] = round_like(e, param[i, h])
