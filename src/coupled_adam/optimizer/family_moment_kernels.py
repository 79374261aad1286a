"""Triton kernels of the family of second moments that work on one number per row or column; see `family_triton`.

As in `triton_kernels`, sums have a fixed order and use no float atomics. If `found_inf_ptr` is not zero, a kernel
returns before it writes anything.

Legend: V vocabulary rows on this rank, H hidden size, t optimizer step, y row exponent, x column exponent; c, r, s
moving averages of the mean squares of columns, rows and the table, divided by 1 - beta2^t.
"""

import triton
import triton.language as tl


@triton.jit
def is_skipped(found_inf_ptr):
    skipped = False
    if found_inf_ptr is not None:
        skipped = tl.load(found_inf_ptr) != 0.0
    return skipped


@triton.jit
def bias_correction_at(step_ptr, log_beta, bias_correction):
    """Return 1 - beta^t in float64: float32 loses four digits at t = 1."""
    if step_ptr is not None:
        t = tl.load(step_ptr).to(tl.float64) + 1.0
        bias_correction = 1.0 - tl.exp(t * log_beta)
    return tl.zeros((), dtype=tl.float64) + bias_correction


@triton.jit
def number(pointer, value):
    """Return a float64 number, read from the device or passed with the launch."""
    if pointer is not None:
        value = tl.load(pointer)
    return tl.zeros((), dtype=tl.float64) + value


@triton.jit
def _power(base, exponent):
    """Return base^exponent in float64 for numbers >= 0, with 0^0 = 1."""
    return tl.where(exponent == 0.0, 1.0, tl.exp(exponent * tl.log(base)))


@triton.jit
def row_factor_of(r, inverse_root_correction, eps, y):
    """Return rho = (sqrt(r / (1 - beta2^t)) + eps)^-y in float32: 0 if it is infinite, and exactly 1 for y = 0."""
    # The root comes first, because r / (1 - beta2^t) can overflow.
    factor = tl.exp2(-y * tl.log2(tl.sqrt_rn(r) * inverse_root_correction + eps))
    factor = tl.where(factor == float("inf"), 0.0, factor)
    return tl.where(y == 0.0, 1.0, factor)


@triton.jit
def advance_row_moment_kernel(
    row_sums_ptr,
    row_avg_sq_ptr,
    row_factor_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    step_ptr,
    row_exponent_ptr,
    row_exponent,
    log_beta2,
    bias_correction2,
    beta2,
    one_minus_beta2,
    eps,
    width,
    V,
    BLOCK_V: tl.constexpr,
):
    if is_skipped(found_inf_ptr):
        return
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = rows < V
    mean_square = tl.load(row_sums_ptr + rows, mask=mask, other=0.0).to(tl.float64) / width
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr).to(tl.float64)
        mean_square *= grad_factor * grad_factor
    r = tl.load(row_avg_sq_ptr + rows, mask=mask, other=0.0).to(tl.float64)
    r = (beta2 * r + one_minus_beta2 * mean_square).to(tl.float32)
    tl.store(row_avg_sq_ptr + rows, r, mask=mask)
    correction = bias_correction_at(step_ptr, log_beta2, bias_correction2)
    inverse_root_correction = (1.0 / tl.sqrt(correction)).to(tl.float32)
    y = number(row_exponent_ptr, row_exponent).to(tl.float32)
    tl.store(row_factor_ptr + rows, row_factor_of(r, inverse_root_correction, eps, y), mask=mask)


@triton.jit
def _sum_partials(partial_ptr, columns, mask, P, H, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    """Sum (P, H) partial sums over P, for some columns."""
    sums = tl.zeros((BLOCK_P, BLOCK_H), dtype=tl.float64)
    for first in range(0, P, BLOCK_P):
        partials = first + tl.arange(0, BLOCK_P)
        offsets = partials[:, None] * H + columns[None, :]
        sums += tl.load(partial_ptr + offsets, mask=(partials < P)[:, None] & mask[None, :], other=0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def advance_column_moment_kernel(
    partial_ptr,
    exp_avg_sq_ptr,
    grad_factor_ptr,
    found_inf_ptr,
    beta2,
    one_minus_beta2,
    rows,
    P,
    H,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if is_skipped(found_inf_ptr):
        return
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    mean_square = _sum_partials(partial_ptr, columns, mask, P, H, BLOCK_P, BLOCK_H) / rows
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr).to(tl.float64)
        mean_square *= grad_factor * grad_factor
    v = tl.load(exp_avg_sq_ptr + columns, mask=mask, other=0.0).to(tl.float64)
    tl.store(exp_avg_sq_ptr + columns, (beta2 * v + one_minus_beta2 * mean_square).to(tl.float32), mask=mask)


@triton.jit
def coefficients_kernel(
    exp_avg_sq_ptr,
    weighted_sums_ptr,
    mean_second_moment_ptr,
    coefficient_ptr,
    offset_ptr,
    step_ptr,
    lr_ptr,
    row_exponent_ptr,
    column_exponent_ptr,
    lr,
    row_exponent,
    column_exponent,
    log_beta1,
    log_beta2,
    bias_correction1,
    bias_correction2,
    second_moment_scale,
    eps,
    rows,
    P,
    H,
    WITH_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_MEAN: tl.constexpr,
):
    """Compute `coefficients`. Every program adds up all H numbers of c for s, which is cheaper than another launch."""
    correction1 = bias_correction_at(step_ptr, log_beta1, bias_correction1)
    correction2 = bias_correction_at(step_ptr, log_beta2, bias_correction2)
    if mean_second_moment_ptr is not None:
        s = tl.load(mean_second_moment_ptr).to(tl.float64) / correction2
    else:
        sums = tl.zeros((BLOCK_MEAN,), dtype=tl.float64)
        for first in range(0, H, BLOCK_MEAN):
            all_columns = first + tl.arange(0, BLOCK_MEAN)
            sums += tl.load(exp_avg_sq_ptr + all_columns, mask=all_columns < H, other=0.0).to(tl.float64)
        s = tl.sum(sums, axis=0) / H / correction2
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    c = tl.load(exp_avg_sq_ptr + columns, mask=mask, other=0.0).to(tl.float64) / correction2
    x = number(column_exponent_ptr, column_exponent)
    ratio = tl.where(s == 0.0, 1.0, c / tl.where(s == 0.0, 1.0, s))
    v = tl.where(x == 1.0, c, s * _power(ratio, x))
    a = (-number(lr_ptr, lr) / correction1) / (tl.sqrt(v * second_moment_scale) + eps)
    if WITH_ROWS:
        a *= _power(s, 0.5 * number(row_exponent_ptr, row_exponent))
    # No gradient yet, or a square beyond the range of the state. AdamW does not move such elements either.
    a = tl.where((s == 0.0) | (s == float("inf")), 0.0, a)
    tl.store(coefficient_ptr + columns, a.to(tl.float32), mask=mask)
    if weighted_sums_ptr is not None:
        mean = _sum_partials(weighted_sums_ptr, columns, mask, P, H, BLOCK_P, BLOCK_H) / rows
        tl.store(offset_ptr + columns, (a * mean).to(tl.float32), mask=mask)
