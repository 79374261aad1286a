"""Triton kernels of the family of second moments that process a whole table; see `family_triton`.

As in `triton_kernels`, sums have a fixed order and use no float atomics, and no number per element is float64. The
kernels alternate in direction, so that each reuses what the previous one left in the cache: squares are added up from
the last row to the first, first moments updated from the first to the last, embeddings updated from the last to the
first. If `found_inf_ptr` is not zero, a kernel returns before it writes anything. With beta1 = 0, `exp_avg_ptr` is
None, and the gradient takes the place of the first moment.

Legend: V vocabulary rows on this rank, H hidden size, t optimizer step, y row exponent. A program works on tiles of
BLOCK_V x BLOCK_H.
"""

import triton
import triton.language as tl

from coupled_adam.optimizer.family_moment_kernels import bias_correction_at, is_skipped, number, row_factor_of
from coupled_adam.optimizer.rounding_kernels import advance_moment, load_keys, load_moment
from coupled_adam.optimizer.triton_kernels import SHRINK, UNSHRINK_SQUARE


@triton.jit
def _square_sums_again(
    grad_ptr, partial_offsets, overflowed, in_table, column_offsets, first_tile, real_rows, stride_grad_v,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Recompute the column sums of squares of this program's rows, shrunk by a power of two, if float32 overflowed."""
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(first_tile * BLOCK_V, real_rows, tl.num_programs(0) * BLOCK_V):
        rows = first + tl.arange(0, BLOCK_V)
        offsets = rows.to(tl.int64)[:, None] * stride_grad_v + column_offsets[None, :]
        mask = (rows < real_rows)[:, None] & in_table[None, :]
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * SHRINK
        sums += tl.sum(g * g, axis=0)
    tl.store(partial_offsets, sums.to(tl.float64) * UNSHRINK_SQUARE, mask=in_table & overflowed)


@triton.jit
def _load_gradient(offsets, mask, exp_avg_ptr):
    """Load the gradient of a tile. With a first moment, `update_rows_kernel` does not read the gradient again."""
    if exp_avg_ptr is None:
        g = tl.load(offsets, mask=mask, other=0.0)
    else:
        g = tl.load(offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    return g.to(tl.float32)


@triton.jit
def first_pass_kernel(
    grad_ptr,
    exp_avg_ptr,
    row_avg_sq_ptr,
    row_factor_ptr,
    column_sums_ptr,
    weighted_sums_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    step_ptr,
    row_exponent_ptr,
    row_exponent,
    log_beta2,
    bias_correction2,
    beta1,
    grad_weight,
    beta2,
    one_minus_beta2,
    eps,
    inverse_width,
    real_rows,
    V,
    H,
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
    STAGES: tl.constexpr,
):
    """Program i processes every P-th tile of whole rows, so that all programs move through the table together.

    A row is still in registers when its sum of squares is known, so the same pass adds up rho_i m_ih.
    """
    if is_skipped(found_inf_ptr):
        return
    grad_factor = 1.0
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr)
        grad_weight *= grad_factor
    columns = tl.arange(0, BLOCK_H)
    in_table = columns < H
    grad_columns = columns.to(tl.int64) * stride_grad_h
    exp_avg_columns = columns.to(tl.int64) * stride_exp_avg_h
    column_sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    weighted_sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    index_key, middle_key = load_keys(keys_ptr)
    if row_avg_sq_ptr is not None:
        correction = bias_correction_at(step_ptr, log_beta2, bias_correction2)
        inverse_root_correction = (1.0 / tl.sqrt(correction)).to(tl.float32)
        y = number(row_exponent_ptr, row_exponent).to(tl.float32)
    for first in tl.range(tl.program_id(0) * BLOCK_V, V, tl.num_programs(0) * BLOCK_V, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_V)
        in_rows = rows < V
        mask = in_rows[:, None] & in_table[None, :]
        row = rows.to(tl.int64)[:, None]
        exp_avg_offsets = row * stride_exp_avg_v + exp_avg_columns[None, :]
        g = _load_gradient(grad_ptr + row * stride_grad_v + grad_columns[None, :], mask, exp_avg_ptr)
        m = load_moment(exp_avg_ptr, exp_avg_offsets, mask, "evict_first")
        weighted, m = advance_moment(
            g, m, beta1, grad_weight, exp_avg_ptr, exp_avg_offsets, mask, rows, columns, keys_ptr, index_key,
            middle_key, first_element, width, IS_LARGE,
        )  # fmt: skip
        is_real = (rows < real_rows)[:, None]
        squares = g * g
        column_sums += tl.sum(tl.where(is_real, squares, 0.0), axis=0)
        if row_avg_sq_ptr is not None:
            row_sums = tl.sum(squares, axis=1)
            r_before = tl.load(row_avg_sq_ptr + rows, mask=in_rows, other=0.0)
            # Multiply twice: the square of the factor can underflow.
            r = beta2 * r_before + one_minus_beta2 * (row_sums * inverse_width * grad_factor * grad_factor)
            overflowed = (row_sums < float("inf")) == 0  # also true for infinity and NaN, which are preserved
            if tl.max(overflowed.to(tl.int32), axis=0) > 0:
                small = g * SHRINK
                wide_sums = tl.sum(small * small, axis=1).to(tl.float64) * UNSHRINK_SQUARE
                mean_square = wide_sums * inverse_width * grad_factor * grad_factor
                wide_r = beta2 * r_before.to(tl.float64) + one_minus_beta2 * mean_square
                r = tl.where(overflowed, wide_r.to(tl.float32), r)
            tl.store(row_avg_sq_ptr + rows, r, mask=in_rows)
            rho = row_factor_of(r, inverse_root_correction, eps, y)
            tl.store(row_factor_ptr + rows, rho, mask=in_rows)
            weighted *= rho[:, None]
        weighted_sums += tl.sum(tl.where(is_real, weighted, 0.0), axis=0)
    partial = tl.program_id(0) * H + columns
    tl.store(weighted_sums_ptr + partial, weighted_sums.to(tl.float64), mask=in_table)
    tl.store(column_sums_ptr + partial, column_sums.to(tl.float64), mask=in_table)
    overflowed_columns = (column_sums < float("inf")) == 0
    if tl.max(overflowed_columns.to(tl.int32), axis=0) > 0:
        first_tile = tl.program_id(0)
        _square_sums_again(
            grad_ptr, column_sums_ptr + partial, overflowed_columns, in_table, grad_columns, first_tile, real_rows,
            stride_grad_v, BLOCK_V, BLOCK_H,
        )  # fmt: skip


@triton.jit
def square_sums_kernel(
    grad_ptr,
    column_sums_ptr,
    row_sums_ptr,
    real_rows,
    V,
    H,
    stride_grad_v,
    stride_grad_h,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum squares over columns and rows in one pass over whole rows. Column sums cover the real rows only."""
    columns = tl.arange(0, BLOCK_H)
    in_table = columns < H
    column_offsets = columns.to(tl.int64) * stride_grad_h
    column_sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    last_tile = tl.cdiv(V, BLOCK_V) - 1
    for tile in tl.range(tl.program_id(0), last_tile + 1, tl.num_programs(0), num_stages=STAGES):
        rows = (last_tile - tile) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_rows = rows < V
        offsets = rows.to(tl.int64)[:, None] * stride_grad_v + column_offsets[None, :]
        g = tl.load(grad_ptr + offsets, mask=in_rows[:, None] & in_table[None, :], other=0.0).to(tl.float32)
        squares = g * g
        column_sums += tl.sum(tl.where((rows < real_rows)[:, None], squares, 0.0), axis=0)
        row_sums = tl.sum(squares, axis=1)
        wide_sums = row_sums.to(tl.float64)
        overflowed = (row_sums < float("inf")) == 0
        if tl.max(overflowed.to(tl.int32), axis=0) > 0:
            small = g * SHRINK
            wide_sums = tl.where(overflowed, tl.sum(small * small, axis=1).to(tl.float64) * UNSHRINK_SQUARE, wide_sums)
        tl.store(row_sums_ptr + rows, wide_sums, mask=in_rows)
    partial_offsets = column_sums_ptr + tl.program_id(0) * H + columns
    tl.store(partial_offsets, column_sums.to(tl.float64), mask=in_table)
    overflowed_columns = (column_sums < float("inf")) == 0
    if tl.max(overflowed_columns.to(tl.int32), axis=0) > 0:
        # The same tiles, now from the first to the last.
        first_tile = (last_tile - tl.program_id(0)) % tl.num_programs(0)
        _square_sums_again(
            grad_ptr, partial_offsets, overflowed_columns, in_table, column_offsets, first_tile, real_rows,
            stride_grad_v, BLOCK_V, BLOCK_H,
        )  # fmt: skip


@triton.jit
def row_square_sums_kernel(
    grad_ptr,
    row_sums_ptr,
    V,
    H,
    stride_grad_v,
    stride_grad_h,
    BLOCK_H: tl.constexpr,
):
    """Sum the squares of one row per program, for rows that are too wide for registers."""
    if tl.program_id(0) >= V:  # a rank may have no rows
        return
    row = grad_ptr + tl.program_id(0).to(tl.int64) * stride_grad_v
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    small_sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        g = tl.load(row + columns.to(tl.int64) * stride_grad_h, mask=columns < H, other=0.0).to(tl.float32)
        sums += g * g
        small_sums += (g * SHRINK) * (g * SHRINK)
    row_sum = tl.sum(sums, axis=0)
    wide_sum = tl.sum(small_sums, axis=0).to(tl.float64) * UNSHRINK_SQUARE
    wide_sum = tl.where(row_sum < float("inf"), row_sum.to(tl.float64), wide_sum)
    tl.store(row_sums_ptr + tl.program_id(0), wide_sum)


@triton.jit
def advance_first_moment_kernel(
    grad_ptr,
    exp_avg_ptr,
    row_factor_ptr,
    weighted_sums_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    beta1,
    grad_weight,
    real_rows,
    V,
    H,
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
    STAGES: tl.constexpr,
):
    """Program (i, j) processes every P-th tile of its columns, so that all programs move through the table together."""
    if is_skipped(found_inf_ptr):
        return
    if grad_factor_ptr is not None:
        grad_weight *= tl.load(grad_factor_ptr)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_table = columns < H
    grad_columns = columns.to(tl.int64) * stride_grad_h
    exp_avg_columns = columns.to(tl.int64) * stride_exp_avg_h
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    index_key, middle_key = load_keys(keys_ptr)
    for first in tl.range(tl.program_id(0) * BLOCK_V, V, tl.num_programs(0) * BLOCK_V, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_V)
        mask = (rows < V)[:, None] & in_table[None, :]
        row = rows.to(tl.int64)[:, None]
        exp_avg_offsets = row * stride_exp_avg_v + exp_avg_columns[None, :]
        g = _load_gradient(grad_ptr + row * stride_grad_v + grad_columns[None, :], mask, exp_avg_ptr)
        m = load_moment(exp_avg_ptr, exp_avg_offsets, mask, "evict_first")
        weighted, m = advance_moment(
            g, m, beta1, grad_weight, exp_avg_ptr, exp_avg_offsets, mask, rows, columns, keys_ptr, index_key,
            middle_key, first_element, width, IS_LARGE,
        )  # fmt: skip
        if row_factor_ptr is not None:
            weighted *= tl.load(row_factor_ptr + rows, mask=rows < V, other=0.0)[:, None]
        sums += tl.sum(tl.where((rows < real_rows)[:, None], weighted, 0.0), axis=0)
    tl.store(weighted_sums_ptr + tl.program_id(0) * H + columns, sums.to(tl.float64), mask=in_table)


@triton.jit
def update_rows_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    coefficient_ptr,
    row_factor_ptr,
    offset_ptr,
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
    """Update e_t of one tile per program. With a gradient, update m_t too; without one, m_t is already updated.

    With an offset, the previous pass went from the first row to the last.
    """
    if is_skipped(found_inf_ptr):
        return
    if step_ptr is not None:  # noqa: SIM102  (the outer condition is known at compile time, the inner one is not)
        if tl.program_id(0) == 0:
            tl.store(step_ptr, tl.load(step_ptr) + 1.0)
    lr = number(lr_ptr, lr).to(tl.float32)
    tile = tl.program_id(0)
    if offset_ptr is not None:
        tile = tl.num_programs(0) - 1 - tile
    column_blocks = tl.maximum(tl.cdiv(H, BLOCK_H), 1)  # a rank may have no columns
    rows = (tile // column_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = (tile % column_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (rows < V)[:, None] & (columns < H)[None, :]
    row = rows.to(tl.int64)[:, None]
    column = columns.to(tl.int64)[None, :]
    param_offsets = param_ptr + row * stride_param_v + column * stride_param_h
    exp_avg_offsets = row * stride_exp_avg_v + column * stride_exp_avg_h
    m = load_moment(exp_avg_ptr, exp_avg_offsets, mask, "evict_first")
    e = tl.load(param_offsets, mask=mask, eviction_policy="evict_first").to(tl.float32)
    coefficient = tl.load(coefficient_ptr + columns, mask=columns < H)[None, :]
    if grad_ptr is not None:
        if grad_factor_ptr is not None:
            grad_weight *= tl.load(grad_factor_ptr)
        g = tl.load(grad_ptr + row * stride_grad_v + column * stride_grad_h, mask=mask).to(tl.float32)
        index_key, middle_key = load_keys(keys_ptr)
        stored, m = advance_moment(
            g, m, beta1, grad_weight, exp_avg_ptr, exp_avg_offsets, mask, rows, columns, keys_ptr, index_key,
            middle_key, first_element, width, IS_LARGE,
        )  # fmt: skip
        if keys_ptr is None:
            m = stored
    if row_factor_ptr is not None:
        m *= tl.load(row_factor_ptr + rows, mask=rows < V)[:, None]
    update = coefficient * m
    if offset_ptr is not None:
        update -= tl.load(offset_ptr + columns, mask=columns < H)[None, :]
    e = e * (1.0 - lr * weight_decay) + update
    tl.store(param_offsets, e.to(param_ptr.dtype.element_ty), mask=mask)
