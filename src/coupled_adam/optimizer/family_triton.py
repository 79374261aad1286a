"""The family of second moments as Triton kernels: six passes over a table in memory, seven with clipping.

The functions and the mathematics are those of `family_blockwise`. Functions that write state also take `found_inf`, a
device scalar; if it is not zero, they write nothing. Nothing here waits for the device. All sums have a fixed order, so
a step is deterministic.

| step | passes over the table |
| --- | --- |
| `first_pass`, `advance_column_moment`, `coefficients`, `move_rows` | reads g, m, writes m; reads m, e, writes e |
| clipping: `square_sums`, `advance_row_moment`, `advance_first_moment` instead of `first_pass` | reads g again |
| no `mean_free`: `square_sums`, both moments, `coefficients`, `apply_update` | reads g; reads g, m, e, writes m, e |

With beta1 = 0 there is no m, and `move_rows` reads g instead. The passes are then four in the first line, five in the
second and four in the third: reads g; with clipping and mean_free, reads g again; reads g, e, writes e.

Legend: V vocabulary rows on this rank, H hidden size, t optimizer step, P programs, one partial sum each.
"""

import torch
from torch import Tensor

from coupled_adam.optimizer import family_moment_kernels as moment_kernels
from coupled_adam.optimizer import family_pass_kernels as pass_kernels
from coupled_adam.optimizer.family_blockwise import FirstPass
from coupled_adam.optimizer.family_tiling import MAX_WIDTH, Tiling, next_power_of_2, tile_for
from coupled_adam.optimizer.kernel_launch import (
    Launcher,
    alignment_of,
    ceil_div,
    dtype_of,
    on_device_of,
    step_on_device,
    strides_of,
)
from coupled_adam.optimizer.rounding_kernels import NO_ROUNDING, RoundingArguments, rounding_arguments
from coupled_adam.optimizer.table import Hyperparameters, Table
from coupled_adam.optimizer.triton_kernels import column_square_sums, log_beta

# Found by benchmarks/tune_kernels.py on an H200, with a first moment. Without one they are valid, but not tuned.
FIRST_PASS = Tiling(MAX_WIDTH, 128, 8192, 2, 3)
SQUARE_SUMS = Tiling(MAX_WIDTH, 256, 8192, 2, 1)
FIRST_MOMENT = Tiling(1024, 128, 2048, 2, 3)
UPDATE_BLOCK_V, UPDATE_BLOCK_H, UPDATE_WARPS = 2, 512, 8
ROW_BLOCK_V, WIDE_ROW_BLOCK_H = 256, 2048
REDUCE_BLOCK_P, REDUCE_PROGRAMS, MEAN_BLOCK_H = 256, 256, 1024

_WARPS = (1, 2, 4, 8, 16)
FIRST_PASS_LAUNCHERS = {warps: Launcher(pass_kernels.first_pass_kernel, warps) for warps in _WARPS}
SQUARE_SUMS_LAUNCHERS = {warps: Launcher(pass_kernels.square_sums_kernel, warps) for warps in _WARPS}
FIRST_MOMENT_LAUNCHERS = {warps: Launcher(pass_kernels.advance_first_moment_kernel, warps) for warps in _WARPS}
UPDATE_LAUNCHERS = {warps: Launcher(pass_kernels.update_rows_kernel, warps) for warps in _WARPS}
ROW_SQUARE_SUMS = Launcher(pass_kernels.row_square_sums_kernel, num_warps=4)
ROW_MOMENT = Launcher(moment_kernels.advance_row_moment_kernel, num_warps=4)
COLUMN_MOMENT = Launcher(moment_kernels.advance_column_moment_kernel, num_warps=4)
COEFFICIENTS = Launcher(moment_kernels.coefficients_kernel, num_warps=4)


def square_sums(table: Table) -> tuple[Tensor, Tensor | None]:
    """Sum the squares of the gradient over the real rows and, if there are row moments, over the columns.

    Returns (P, H) and (V, 1) or None, in float64; see `family_blockwise.square_sums`.
    """
    grad, real_rows = table.grad, table.real_rows
    V, H = grad.shape
    if table.row_avg_sq is None:
        return column_square_sums(grad[:real_rows]), None
    row_sums = torch.empty(V, 1, dtype=torch.float64, device=grad.device)
    strides = grad.stride()
    kind = (grad.device, grad.dtype, grad.data_ptr() % 16, V, H, strides)
    if H > MAX_WIDTH:
        with on_device_of(grad):
            ROW_SQUARE_SUMS.launch((max(V, 1), 1, 1), kind, grad, row_sums, V, H, *strides, WIDE_ROW_BLOCK_H)
        return column_square_sums(grad[:real_rows]), row_sums
    warps, programs, tile = tile_for(SQUARE_SUMS, grad)
    column_sums = torch.empty(programs, H, dtype=torch.float64, device=grad.device)
    with on_device_of(grad):
        SQUARE_SUMS_LAUNCHERS[warps].launch(
            (programs, 1, 1),
            (kind, real_rows, tile),
            grad,
            column_sums,
            row_sums,
            real_rows,
            V,
            H,
            *strides,
            *tile,
        )
    return column_sums, row_sums


def first_pass(table: Table, grad_factor: Tensor | None, found_inf: Tensor | None = None) -> FirstPass:
    """Update r_t and m_t in place and compute all sums, in one pass; see `family_blockwise.first_pass`."""
    grad, exp_avg, row_avg_sq, hyper = table.grad, table.exp_avg, table.row_avg_sq, table.hyper
    V, H = grad.shape
    if H > MAX_WIDTH:
        return _first_pass_over_wide_rows(table, grad_factor, found_inf)
    warps, programs, tile = tile_for(FIRST_PASS, *_read(grad, exp_avg))
    sums = torch.empty(2, programs, H, dtype=torch.float64, device=grad.device)
    row_factor = None if row_avg_sq is None else torch.empty(V, 1, dtype=torch.float32, device=grad.device)
    step, _, correction2 = _step(table)
    exponent, exponent_value = _number(hyper.row_exponent)
    strides = (*grad.stride(), *strides_of(exp_avg))
    alignment = (*map(alignment_of, (grad, exp_avg, row_avg_sq)), programs * H % 2)
    dtypes = (grad.dtype, dtype_of(exp_avg), dtype_of(exponent))
    missing = (row_avg_sq is None, grad_factor is None, found_inf is None, step is None)
    rounding = _rounding(table)
    with on_device_of(grad):
        FIRST_PASS_LAUNCHERS[warps].launch(
            (programs, 1, 1),
            (grad.device, V, H, table.real_rows, strides, alignment, dtypes, missing, rounding.kind, tile),
            grad,
            exp_avg,
            row_avg_sq,
            row_factor,
            sums[0],
            sums[1],
            grad_factor,
            found_inf,
            step,
            exponent,
            exponent_value,
            log_beta(hyper.beta2),
            correction2,
            hyper.beta1,
            _gradient_weight(hyper),
            hyper.beta2,
            1 - hyper.beta2,
            hyper.eps,
            1 / table.width if table.width else 0.0,
            table.real_rows,
            V,
            H,
            *strides,
            *rounding,
            *tile,
        )
    return FirstPass(sums[0], sums[1], row_factor)


def advance_row_moment(
    table: Table, row_sums: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> Tensor:
    """Update r_t in place and return rho, (V, 1) float32; see `family_blockwise.advance_row_moment`."""
    hyper, row_avg_sq = table.hyper, table.row_avg_sq
    assert row_avg_sq is not None
    V = row_avg_sq.shape[0]
    row_factor = torch.empty_like(row_avg_sq)
    step, _, correction2 = _step(table)
    exponent, exponent_value = _number(hyper.row_exponent)
    alignment = (row_sums.data_ptr() % 16, row_avg_sq.data_ptr() % 16)
    missing = (grad_factor is None, found_inf is None, step is None)
    with on_device_of(row_avg_sq):
        ROW_MOMENT.launch(
            (max(ceil_div(V, ROW_BLOCK_V), 1), 1, 1),
            (row_avg_sq.device, row_sums.dtype, dtype_of(exponent), alignment, missing, table.width, V, ROW_BLOCK_V),
            row_sums,
            row_avg_sq,
            row_factor,
            grad_factor,
            found_inf,
            step,
            exponent,
            exponent_value,
            log_beta(hyper.beta2),
            correction2,
            hyper.beta2,
            1 - hyper.beta2,
            hyper.eps,
            table.width,
            V,
            ROW_BLOCK_V,
        )
    return row_factor


def advance_column_moment(
    table: Table, square_sums: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> None:
    """Update c_t in place; see `family_blockwise.advance_column_moment`."""
    hyper, exp_avg_sq = table.hyper, table.exp_avg_sq
    P, H = square_sums.shape
    alignment = (square_sums.data_ptr() % 16, exp_avg_sq.data_ptr() % 16)
    kind = (exp_avg_sq.device, square_sums.dtype, alignment, grad_factor is None, found_inf is None, P, H, table.rows)
    block = (REDUCE_BLOCK_P, _reduced_columns(H))
    with on_device_of(exp_avg_sq):
        COLUMN_MOMENT.launch(
            (max(ceil_div(H, block[1]), 1), 1, 1),
            (kind, block),
            square_sums,
            exp_avg_sq,
            grad_factor,
            found_inf,
            hyper.beta2,
            1 - hyper.beta2,
            table.rows,
            P,
            H,
            *block,
        )


def advance_first_moment(
    table: Table, row_factor: Tensor | None, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> Tensor:
    """Update m_t in place and return sums of rho_i m_ih, (P, H); see `family_blockwise.advance_first_moment`."""
    grad, exp_avg, hyper = table.grad, table.exp_avg, table.hyper
    V, H = grad.shape
    warps, programs, tile = tile_for(FIRST_MOMENT, *_read(grad, exp_avg))
    weighted_sums = torch.empty(programs, H, dtype=torch.float64, device=grad.device)
    strides = (*grad.stride(), *strides_of(exp_avg))
    alignment = tuple(map(alignment_of, (grad, exp_avg, row_factor)))
    missing = (row_factor is None, grad_factor is None, found_inf is None)
    rounding = _rounding(table)
    dtypes = (grad.dtype, dtype_of(exp_avg))
    with on_device_of(grad):
        FIRST_MOMENT_LAUNCHERS[warps].launch(
            (programs, max(ceil_div(H, tile[1]), 1), 1),
            (grad.device, dtypes, V, H, table.real_rows, strides, alignment, missing, rounding.kind, tile),
            grad,
            exp_avg,
            row_factor,
            weighted_sums,
            grad_factor,
            found_inf,
            hyper.beta1,
            _gradient_weight(hyper),
            table.real_rows,
            V,
            H,
            *strides,
            *rounding,
            *tile,
        )
    return weighted_sums


def coefficients(
    table: Table, weighted_sums: Tensor | None, mean_second_moment: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the coefficient of rho_i m_ih and the mean update; see `family_blockwise.coefficients`."""
    hyper, exp_avg_sq = table.hyper, table.exp_avg_sq
    H = exp_avg_sq.shape[1]
    P = 0 if weighted_sums is None else weighted_sums.shape[0]
    results = torch.empty(2, 1, H, dtype=torch.float32, device=exp_avg_sq.device)
    coefficient, offset = results[0], None if weighted_sums is None else results[1]
    step, correction1, correction2 = _step(table)
    lr, lr_value = _number(hyper.lr)
    row_exponent, row_value = _number(hyper.row_exponent)
    column_exponent, column_value = _number(hyper.column_exponent)
    dtypes = tuple(map(dtype_of, (weighted_sums, mean_second_moment, lr, row_exponent, column_exponent)))
    alignment = (exp_avg_sq.data_ptr() % 16, alignment_of(weighted_sums), H % 4)
    kind = (exp_avg_sq.device, dtypes, alignment, step is None, table.row_avg_sq is None, table.rows, P, H)
    block = (REDUCE_BLOCK_P, _reduced_columns(H), MEAN_BLOCK_H)
    with on_device_of(exp_avg_sq):
        COEFFICIENTS.launch(
            (max(ceil_div(H, block[1]), 1), 1, 1),
            (kind, block),
            exp_avg_sq,
            weighted_sums,
            mean_second_moment,
            coefficient,
            offset,
            step,
            lr,
            row_exponent,
            column_exponent,
            lr_value,
            row_value,
            column_value,
            log_beta(hyper.beta1),
            log_beta(hyper.beta2),
            correction1,
            correction2,
            hyper.second_moment_scale,
            hyper.eps,
            table.rows,
            P,
            H,
            table.row_avg_sq is not None,
            *block,
        )
    return coefficient, offset


def apply_update(
    table: Table,
    coefficient: Tensor,
    row_factor: Tensor | None,
    grad_factor: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    """Update m_t and e_t in place, and count the step; see `family_blockwise.apply_update`."""
    _update_rows(table, table.grad, coefficient, row_factor, None, grad_factor, found_inf)


def move_rows(
    table: Table,
    coefficient: Tensor,
    row_factor: Tensor | None,
    offset: Tensor | None,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update e_t in place, and count the step; see `family_blockwise.move_rows`."""
    grad, grad_factor = (table.grad, grad_factor) if table.exp_avg is None else (None, None)
    _update_rows(table, grad, coefficient, row_factor, offset, grad_factor, found_inf)


def _update_rows(
    table: Table,
    grad: Tensor | None,
    coefficient: Tensor,
    row_factor: Tensor | None,
    offset: Tensor | None,
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    hyper, param, exp_avg = table.hyper, table.param, table.exp_avg
    V, H = param.shape
    step = table.step if step_on_device(table) else None
    lr, lr_value = _number(hyper.lr)
    strides = (*param.stride(), *strides_of(grad), *strides_of(exp_avg))
    alignment = tuple(map(alignment_of, (param, grad, exp_avg, coefficient, row_factor, offset)))
    dtypes = tuple(map(dtype_of, (param, exp_avg, grad, lr)))
    missing = (grad_factor is None, found_inf is None, step is None)
    rounding = NO_ROUNDING if grad is None else _rounding(table)
    tile = (UPDATE_BLOCK_V, UPDATE_BLOCK_H)
    with on_device_of(param):
        UPDATE_LAUNCHERS[UPDATE_WARPS].launch(
            (max(ceil_div(H, UPDATE_BLOCK_H) * ceil_div(V, UPDATE_BLOCK_V), 1), 1, 1),
            (param.device, V, H, strides, alignment, dtypes, missing, rounding.kind, tile),
            param,
            grad,
            exp_avg,
            coefficient,
            row_factor,
            offset,
            grad_factor,
            found_inf,
            step,
            lr,
            lr_value,
            hyper.weight_decay,
            _gradient_weight(hyper),
            hyper.beta1,
            V,
            H,
            *strides,
            *rounding,
            *tile,
        )
    if step is None:
        table.step.add_(1)


def _first_pass_over_wide_rows(table: Table, grad_factor: Tensor | None, found_inf: Tensor | None) -> FirstPass:
    """`first_pass` with another pass over the gradient, because wide rows do not stay in registers."""
    column_sums, row_sums = square_sums(table)
    row_factor = None if row_sums is None else advance_row_moment(table, row_sums, grad_factor, found_inf)
    return FirstPass(column_sums, advance_first_moment(table, row_factor, grad_factor, found_inf), row_factor)


def _reduced_columns(H: int) -> int:
    """Columns per program that adds up partial sums: few, so that many programs read at the same time."""
    return max(min(next_power_of_2(max(H, 1)) // REDUCE_PROGRAMS, 16), 4)


def _step(table: Table) -> tuple[Tensor | None, float, float]:
    """Return the step count if it is on the device, else 1 - beta1^t and 1 - beta2^t; t is not counted yet."""
    if step_on_device(table):
        return table.step, 1.0, 1.0
    t = table.step.item() + 1
    return None, 1 - table.hyper.beta1**t, 1 - table.hyper.beta2**t


def _rounding(table: Table) -> RoundingArguments:
    step = table.step if step_on_device(table) else None
    return rounding_arguments(table, step, t=0 if step is not None else table.step.item() + 1)


def _number(value: float | Tensor) -> tuple[Tensor | None, float]:
    """Return a number as kernel arguments: its tensor on the device, or its value."""
    return (value, 0.0) if isinstance(value, Tensor) else (None, value)


def _gradient_weight(hyper: Hyperparameters) -> float:
    return (hyper.beta1 - 1) if hyper.maximize else (1 - hyper.beta1)


def _read(grad: Tensor, exp_avg: Tensor | None) -> list[Tensor]:
    """Tensors that a pass over the gradient reads."""
    return [grad] if exp_avg is None else [grad, exp_avg]
