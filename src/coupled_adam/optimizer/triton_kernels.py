"""The coupled update as Triton kernels: six passes over a table in memory, against AdamW's seven.

One kernel reads g for the column sums of squares; one reads g, m, e and writes m, e. Between them a third, of H
numbers only, advances the second moment. All sums are taken in a fixed order, without float atomics, so a step is
deterministic. Nothing here waits for the device: the loss scale, a skipped step and the clipping factor are read
by the kernels themselves. `blockwise` has the same functions in torch operations.

Legend: V vocabulary rows, H hidden size, t optimizer step. A program works on tiles of BLOCK_V x BLOCK_H.
"""

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optimizer.table import Table

# Tile shapes and numbers of programs, found by benchmarks/tune_kernels.py on an H200. SUM_PROGRAMS is eight per
# multiprocessor there: enough to fill the chip, and few enough that their partial sums stay small.
BLOCK_H = 256
SUM_BLOCK_V, SUM_WARPS, SUM_PROGRAMS = 16, 4, 1056
ADVANCE_BLOCK_P, ADVANCE_BLOCK_H, ADVANCE_WARPS = 64, 16, 4
UPDATE_BLOCK_V, UPDATE_WARPS = 2, 8


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
    """Program (i, j) adds up every P-th tile of its columns, so that all programs move through g together."""
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
    tl.store(partial_ptr + tl.program_id(0) * H + columns, tl.sum(sums, axis=0), mask=in_table)


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
    inverse_rows,
    second_moment_scale,
    eps,
    P,
    H,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if found_inf_ptr is not None:  # noqa: SIM102  (decided when compiling, the inner one when running)
        if tl.load(found_inf_ptr) != 0.0:
            return
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = columns < H
    sums = tl.zeros((BLOCK_P, BLOCK_H), dtype=tl.float32)
    for first in range(0, P, BLOCK_P):
        partials = first + tl.arange(0, BLOCK_P)
        offsets = partials[:, None] * H + columns[None, :]
        sums += tl.load(partial_ptr + offsets, mask=(partials < P)[:, None] & mask[None, :], other=0.0)
    mean_square = tl.sum(sums, axis=0) * inverse_rows
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr)
        mean_square *= grad_factor * grad_factor
    if step_ptr is not None:
        # In float64: 1 - beta^t in float32 loses four digits at t = 1.
        t = tl.load(step_ptr).to(tl.float64)
        bias_correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
        bias_correction2 = (1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    v = beta2 * tl.load(exp_avg_sq_ptr + columns, mask=mask, other=0.0) + one_minus_beta2 * mean_square
    tl.store(exp_avg_sq_ptr + columns, v, mask=mask)
    denominator = tl.sqrt_rn(v * (second_moment_scale / bias_correction2)) + eps
    tl.store(coefficient_ptr + columns, (-lr / bias_correction1) / denominator, mask=mask)


@triton.jit
def _update_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    coefficient_ptr,
    grad_factor_ptr,
    found_inf_ptr,
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
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    if found_inf_ptr is not None:  # noqa: SIM102  (decided when compiling, the inner one when running)
        if tl.load(found_inf_ptr) != 0.0:
            return
    if grad_factor_ptr is not None:
        grad_weight *= tl.load(grad_factor_ptr)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    # From the last row to the first: the end of g is what the sums kernel left in the cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    column_blocks = tl.cdiv(H, BLOCK_H)
    rows = (tile // column_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = (tile % column_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (rows < V)[:, None] & (columns < H)[None, :]
    row = rows.to(tl.int64)[:, None]
    column = columns.to(tl.int64)[None, :]
    param_offsets = param_ptr + row * stride_param_v + column * stride_param_h
    exp_avg_offsets = exp_avg_ptr + row * stride_exp_avg_v + column * stride_exp_avg_h
    g = tl.load(grad_ptr + row * stride_grad_v + column * stride_grad_h, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_offsets, mask=mask).to(tl.float32)
    e = tl.load(param_offsets, mask=mask).to(tl.float32)
    coefficient = tl.load(coefficient_ptr + columns, mask=columns < H)[None, :]
    m = beta1 * m + grad_weight * g
    e = e * (1.0 - lr * weight_decay) + coefficient * m
    tl.store(exp_avg_offsets, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(param_offsets, e.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _clip_factor_kernel(total_square_ptr, grad_scale_ptr, norm_ptr, grad_factor_ptr, max_norm):
    inverse_scale = 1.0
    if grad_scale_ptr is not None:
        inverse_scale = 1.0 / tl.load(grad_scale_ptr)
    norm = tl.sqrt_rn(tl.load(total_square_ptr)) * inverse_scale
    factor = max_norm / (norm + 1e-6)
    # Written so that a NaN norm gives a NaN factor, as torch.clamp does.
    factor = tl.where(factor > 1.0, 1.0, factor)
    tl.store(norm_ptr, norm)
    tl.store(grad_factor_ptr, factor * inverse_scale)


def column_square_sums(grad: Tensor) -> Tensor:
    """Partial sums of g_i^2 over the rows i, (P, H) float32; see `blockwise.column_square_sums`."""
    V, H = grad.shape
    column_blocks = _ceil_div(H, BLOCK_H)
    programs = max(1, min(_ceil_div(V, SUM_BLOCK_V), SUM_PROGRAMS // max(column_blocks, 1)))
    partial = torch.empty(programs, H, dtype=torch.float32, device=grad.device)
    if H == 0:
        return partial
    with _on_device_of(grad):
        _column_square_sums_kernel[(programs, column_blocks)](
            grad,
            partial,
            V,
            H,
            grad.stride(0),
            grad.stride(1),
            BLOCK_V=SUM_BLOCK_V,
            BLOCK_H=BLOCK_H,
            num_warps=SUM_WARPS,
        )
    return partial


def advance_second_moment(
    table: Table, square_sums: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> Tensor:
    """Update v_t in place, return the coefficient of m_t, (H,); see `blockwise.advance_second_moment`.

    `found_inf` other than zero (a device scalar) leaves v_t as it is.
    """
    hyper = table.hyper
    step, step_value = (table.step, 1.0) if isinstance(table.step, Tensor) else (None, table.step)
    lr, lr_value = (hyper.lr, 0.0) if isinstance(hyper.lr, Tensor) else (None, hyper.lr)
    H = table.exp_avg_sq.shape[1]
    coefficient = torch.empty(H, dtype=torch.float32, device=square_sums.device)
    if H == 0:
        return coefficient
    with _on_device_of(square_sums):
        _advance_second_moment_kernel[(_ceil_div(H, ADVANCE_BLOCK_H),)](
            square_sums,
            table.exp_avg_sq,
            coefficient,
            grad_factor,
            found_inf,
            step,
            lr,
            lr_value,
            _log(hyper.beta1),
            _log(hyper.beta2),
            1 - hyper.beta1**step_value,
            1 - hyper.beta2**step_value,
            hyper.beta2,
            1 - hyper.beta2,
            1 / table.rows,
            hyper.second_moment_scale,
            hyper.eps,
            square_sums.shape[0],
            H,
            BLOCK_P=ADVANCE_BLOCK_P,
            BLOCK_H=ADVANCE_BLOCK_H,
            num_warps=ADVANCE_WARPS,
        )
    return coefficient


def apply_update(
    table: Table, coefficient: Tensor, grad_factor: Tensor | None, found_inf: Tensor | None = None
) -> None:
    """Update m_t and e_t in place; see `blockwise.apply_update`."""
    hyper = table.hyper
    param, grad, exp_avg = table.param, table.grad, table.exp_avg
    V, H = param.shape
    if V == 0 or H == 0:
        return
    lr, lr_value = (hyper.lr, 0.0) if isinstance(hyper.lr, Tensor) else (None, hyper.lr)
    with _on_device_of(param):
        _update_kernel[(_ceil_div(H, BLOCK_H) * _ceil_div(V, UPDATE_BLOCK_V),)](
            param,
            grad,
            exp_avg,
            coefficient,
            grad_factor,
            found_inf,
            lr,
            lr_value,
            hyper.weight_decay,
            (hyper.beta1 - 1) if hyper.maximize else (1 - hyper.beta1),
            hyper.beta1,
            V,
            H,
            param.stride(0),
            param.stride(1),
            grad.stride(0),
            grad.stride(1),
            exp_avg.stride(0),
            exp_avg.stride(1),
            BLOCK_V=UPDATE_BLOCK_V,
            BLOCK_H=BLOCK_H,
            num_warps=UPDATE_WARPS,
        )


def clip_factor(total_square: Tensor, grad_scale: Tensor | None, max_norm: float) -> tuple[Tensor, Tensor]:
    """Norm of the unscaled gradients, and what the gradients as they are must be multiplied with."""
    norm = torch.empty((), dtype=torch.float32, device=total_square.device)
    grad_factor = torch.empty_like(norm)
    with _on_device_of(total_square):
        _clip_factor_kernel[(1,)](total_square, grad_scale, norm, grad_factor, max_norm, num_warps=1)
    return norm, grad_factor


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv is meant for kernels and takes microseconds here


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
