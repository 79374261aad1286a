"""The coupled update as Triton kernels: six passes over a table in memory, compared with AdamW's seven.

One kernel reads g for the column sums of squares; one reads g, m, e and writes m, e. Between the two, a small one
updates the H numbers of the second moment. With beta1 = 0 there is no m, and four passes remain. Clipping needs no
further pass. All sums have a fixed order and use no float atomics, so a step is deterministic. Nothing here waits for
the device: the kernels themselves read the loss scale, the clipping factor and whether to skip the step. Only numbers
per column are float64, never numbers per element, because consumer GPUs are slow at float64. `blockwise` has the same
functions in torch operations.

Legend: V vocabulary rows, H hidden size, t optimizer step. A program works on tiles of BLOCK_V x BLOCK_H.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optimizer.kernel_launch import (
    Launcher,
    alignment_of,
    ceil_div,
    dtype_of,
    on_device_of,
    step_on_device,
    strides_of,
)
from coupled_adam.optimizer.rounding_kernels import advance_moment, load_keys, load_moment, rounding_arguments
from coupled_adam.optimizer.table import Table

# Tile shapes and numbers of programs, found by benchmarks/tune_kernels.py on an H200. SUM_PROGRAMS is eight per
# multiprocessor there: enough to fill the chip, and few enough that their partial sums stay small. The shapes were
# found with a first moment; without one they are valid, but not tuned.
BLOCK_H = 256
SUM_BLOCK_V, SUM_PROGRAMS = 16, 1056
ADVANCE_BLOCK_P, ADVANCE_BLOCK_H = 64, 16
UPDATE_BLOCK_V = 2
# For the update with stochastic rounding: four elements per thread, in 16 and 8 bytes; a copy is no faster on an H200.
ROUNDING_BLOCK_V, ROUNDING_BLOCK_H = 4, 256

# With gradients times 2^-100, squares and their sums over any table fit into float32.
SHRINK = tl.constexpr(2.0**-100)
UNSHRINK_SQUARE = tl.constexpr(2.0**200)


@triton.jit
def _column_square_sums_kernel(
    grad_ptr,
    partial_ptr,
    V,
    H,
    stride_grad_v,
    stride_grad_h,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (i, j) adds up every P-th tile of its columns, so that all programs move through g together.

    The sums are float32. Columns whose sum overflows are read again, shrunk by a power of two.
    """
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_table = columns < H
    column_offsets = columns.to(tl.int64) * stride_grad_h
    sums = tl.zeros((BLOCK_V, BLOCK_H), dtype=tl.float32)
    for first in range(tl.program_id(0) * BLOCK_V, V, tl.num_programs(0) * BLOCK_V):
        rows = first + tl.arange(0, BLOCK_V)
        offsets = rows.to(tl.int64)[:, None] * stride_grad_v + column_offsets[None, :]
        mask = (rows < V)[:, None] & in_table[None, :]
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        sums += g * g
    column_sums = tl.sum(sums, axis=0)
    partial_offsets = partial_ptr + tl.program_id(0) * H + columns
    tl.store(partial_offsets, column_sums.to(tl.float64), mask=in_table)
    # Also true for infinity and NaN in g, which are preserved. The second loop keeps no sums of the first in
    # registers: with more than 64 registers, fewer programs fit on a multiprocessor than SUM_PROGRAMS assumes.
    overflowed = (column_sums < float("inf")) == 0
    if tl.max(overflowed.to(tl.int32), axis=0) > 0:
        sums = tl.zeros((BLOCK_V, BLOCK_H), dtype=tl.float32)
        for first in range(tl.program_id(0) * BLOCK_V, V, tl.num_programs(0) * BLOCK_V):
            rows = first + tl.arange(0, BLOCK_V)
            offsets = rows.to(tl.int64)[:, None] * stride_grad_v + column_offsets[None, :]
            mask = (rows < V)[:, None] & in_table[None, :]
            g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * SHRINK
            sums += g * g
        wide_sums = tl.sum(sums, axis=0).to(tl.float64) * UNSHRINK_SQUARE
        tl.store(partial_offsets, wide_sums, mask=in_table & overflowed)


@triton.jit
def _advance_second_moment_kernel(
    partial_ptr,
    exp_avg_sq_ptr,
    coefficient_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    step_ptr,
    lr_ptr,
    lr,
    log_beta1,
    log_beta2,
    bias_correction1,
    bias_correction2,
    beta2,
    one_minus_beta2,
    rows,
    second_moment_scale,
    eps,
    P,
    H,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if found_inf_ptr is not None:  # noqa: SIM102  (the outer condition is known at compile time, the inner one is not)
        if tl.load(found_inf_ptr) != 0.0:
            return
    # Everything but the stored state is float64: gradients that are fine for AdamW have squares beyond float32.
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    sums = tl.zeros((BLOCK_P, BLOCK_H), dtype=tl.float64)
    for first in range(0, P, BLOCK_P):
        partials = first + tl.arange(0, BLOCK_P)
        offsets = partials[:, None] * H + columns[None, :]
        sums += tl.load(partial_ptr + offsets, mask=(partials < P)[:, None] & mask[None, :], other=0.0)
    mean_square = tl.sum(sums, axis=0) / rows
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr).to(tl.float64)
        mean_square *= grad_factor * grad_factor
    if step_ptr is not None:
        # In float64, because 1 - beta^t in float32 loses four digits at t = 1.
        t = tl.load(step_ptr).to(tl.float64) + 1.0
        bias_correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
        bias_correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + columns, mask=mask, other=0.0).to(tl.float64)
    v = (beta2 * v + one_minus_beta2 * mean_square).to(tl.float32)
    tl.store(exp_avg_sq_ptr + columns, v, mask=mask)
    denominator = tl.sqrt(v.to(tl.float64) * (second_moment_scale / bias_correction2)) + eps
    tl.store(coefficient_ptr + columns, ((-lr / bias_correction1) / denominator).to(tl.float32), mask=mask)


@triton.jit
def _update_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    coefficient_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    step_ptr,
    lr_ptr,
    lr,
    weight_decay,
    grad_weight,
    beta1,
    V,
    H,
    stride_param_v,
    stride_param_h,
    stride_grad_v,
    stride_grad_h,
    stride_exp_avg_v,
    stride_exp_avg_h,
    keys_ptr,
    first_element,
    width,
    IS_LARGE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if found_inf_ptr is not None:  # noqa: SIM102  (the outer condition is known at compile time, the inner one is not)
        if tl.load(found_inf_ptr) != 0.0:
            return
    if step_ptr is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(step_ptr, tl.load(step_ptr) + 1.0)
    if grad_factor_ptr is not None:
        grad_weight *= tl.load(grad_factor_ptr)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    # From the last row to the first: the sums kernel left the end of g in the cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    column_blocks = tl.maximum(tl.cdiv(H, BLOCK_H), 1)  # a rank may have no columns
    rows = (tile // column_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = (tile % column_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (rows < V)[:, None] & (columns < H)[None, :]
    row = rows.to(tl.int64)[:, None]
    column = columns.to(tl.int64)[None, :]
    param_offsets = param_ptr + row * stride_param_v + column * stride_param_h
    exp_avg_offsets = row * stride_exp_avg_v + column * stride_exp_avg_h
    g = tl.load(grad_ptr + row * stride_grad_v + column * stride_grad_h, mask=mask).to(tl.float32)
    m = load_moment(exp_avg_ptr, exp_avg_offsets, mask, "")
    e = tl.load(param_offsets, mask=mask).to(tl.float32)
    coefficient = tl.load(coefficient_ptr + columns, mask=columns < H)[None, :]
    index_key, middle_key = load_keys(keys_ptr)
    _, m = advance_moment(
        g, m, beta1, grad_weight, exp_avg_ptr, exp_avg_offsets, mask, rows, columns, keys_ptr, index_key, middle_key,
        first_element, width, IS_LARGE,
    )  # fmt: skip
    e = e * (1.0 - lr * weight_decay) + coefficient * m
    tl.store(param_offsets, e.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clip_factor_kernel(total_square_ptr, grad_scale_ptr, norm_ptr, grad_factor_ptr, max_norm):
    inverse_scale = 1.0
    if grad_scale_ptr is not None:
        inverse_scale = 1.0 / tl.load(grad_scale_ptr)
    norm = tl.sqrt(tl.load(total_square_ptr).to(tl.float64)) * inverse_scale
    factor = max_norm / (norm + 1e-6)
    # tl.where, so that a NaN norm gives a NaN factor, as with torch.clamp.
    factor = tl.where(factor > 1.0, 1.0, factor)
    tl.store(norm_ptr, norm.to(tl.float32))
    tl.store(grad_factor_ptr, (factor * inverse_scale).to(tl.float32))


SUM = Launcher(_column_square_sums_kernel, num_warps=4)
ADVANCE = Launcher(_advance_second_moment_kernel, num_warps=4)
UPDATE = Launcher(_update_kernel, num_warps=8)
ROUNDING_UPDATE = Launcher(_update_kernel, num_warps=8)
CLIP = Launcher(_clip_factor_kernel, num_warps=1)


def column_square_sums(grad: Tensor) -> Tensor:
    """Sum g_i^2 over the rows i: (P, H) float64 partial sums; see `blockwise.column_square_sums`."""
    V, H = grad.shape
    column_blocks = max(ceil_div(H, BLOCK_H), 1)
    programs = max(min(ceil_div(V, SUM_BLOCK_V), SUM_PROGRAMS // column_blocks), 1)
    partial = torch.empty(programs, H, dtype=torch.float64, device=grad.device)
    stride_v, stride_h = grad.stride()
    kind = (grad.device, grad.dtype, grad.data_ptr() % 16, V, H, stride_v, stride_h, SUM_BLOCK_V, BLOCK_H)
    with on_device_of(grad):
        SUM.launch((programs, column_blocks, 1), kind, grad, partial, V, H, stride_v, stride_h, SUM_BLOCK_V, BLOCK_H)
    return partial


def advance_second_moment(
    table: Table, square_sums: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> Tensor:
    """Update v_t in place and return the coefficient of m_t, (H,); see `blockwise.advance_second_moment`.

    If `found_inf` (a device scalar) is not zero, v_t does not change. All programs of this kernel read a step count on
    the device, so `apply_update` counts it.
    """
    hyper, exp_avg_sq = table.hyper, table.exp_avg_sq
    step, t = (table.step, 1.0) if step_on_device(table) else (None, table.step.add_(1).item())
    lr, lr_value = (hyper.lr, 0.0) if isinstance(hyper.lr, Tensor) else (None, hyper.lr)
    P, H = square_sums.shape
    coefficient = torch.empty(H, dtype=torch.float32, device=exp_avg_sq.device)
    alignment = (square_sums.data_ptr() % 16, exp_avg_sq.data_ptr() % 16)
    missing = (grad_factor is None, found_inf is None, step is None)
    kind = (exp_avg_sq.device, square_sums.dtype, alignment, P, H, table.rows, missing)
    with on_device_of(exp_avg_sq):
        ADVANCE.launch(
            (max(ceil_div(H, ADVANCE_BLOCK_H), 1), 1, 1),
            (*kind, dtype_of(lr)),
            square_sums,
            exp_avg_sq,
            coefficient,
            grad_factor,
            found_inf,
            step,
            lr,
            lr_value,
            log_beta(hyper.beta1),
            log_beta(hyper.beta2),
            1 - hyper.beta1**t,
            1 - hyper.beta2**t,
            hyper.beta2,
            1 - hyper.beta2,
            table.rows,
            hyper.second_moment_scale,
            hyper.eps,
            P,
            H,
            ADVANCE_BLOCK_P,
            ADVANCE_BLOCK_H,
        )
    return coefficient


def apply_update(
    table: Table, coefficient: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> None:
    """Update m_t, e_t and a step count on the device in place; see `blockwise.apply_update`."""
    hyper = table.hyper
    param, grad, exp_avg = table.param, table.grad, table.exp_avg
    V, H = param.shape
    step = table.step if step_on_device(table) else None
    lr, lr_value = (hyper.lr, 0.0) if isinstance(hyper.lr, Tensor) else (None, hyper.lr)
    strides = (*param.stride(), *grad.stride(), *strides_of(exp_avg))
    alignment = (param.data_ptr() % 16, grad.data_ptr() % 16, alignment_of(exp_avg))
    dtypes = (param.dtype, grad.dtype, dtype_of(exp_avg), dtype_of(lr))
    missing = (grad_factor is None, found_inf is None, step is None)
    # A step count on the host is already counted.
    rounding = rounding_arguments(table, step, t=0 if step is not None else table.step.item())
    update, tile = UPDATE, (UPDATE_BLOCK_V, BLOCK_H)
    if table.rounding is not None:
        update, tile = ROUNDING_UPDATE, (ROUNDING_BLOCK_V, ROUNDING_BLOCK_H)
    with on_device_of(param):
        update.launch(
            (max(ceil_div(H, tile[1]) * ceil_div(V, tile[0]), 1), 1, 1),
            (param.device, V, H, strides, alignment, dtypes, missing, rounding.kind, tile),
            param,
            grad,
            exp_avg,
            coefficient,
            grad_factor,
            found_inf,
            step,
            lr,
            lr_value,
            hyper.weight_decay,
            (hyper.beta1 - 1) if hyper.maximize else (1 - hyper.beta1),
            hyper.beta1,
            V,
            H,
            *strides,
            *rounding,
            *tile,
        )


def clip_factor(total_square: Tensor, grad_scale: Tensor | None, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the norm of the unscaled gradients and the factor of the scaled ones; see `clipping.clip_factor`."""
    norm = torch.empty((), dtype=torch.float32, device=total_square.device)
    grad_factor = torch.empty_like(norm)
    kind = (total_square.device, total_square.dtype, grad_scale is None)
    with on_device_of(total_square):
        CLIP.launch((1, 1, 1), kind, total_square, grad_scale, norm, grad_factor, max_norm)
    return norm, grad_factor


def log_beta(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
