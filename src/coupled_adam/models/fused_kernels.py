"""Triton kernels for `fused`: GELU, and residual sum with LayerNorm, forward and backward.

With Q(x) = Phi(-|x|), the upper tail of the normal distribution:
    gelu(x) = max(x, 0) - |x| * Q(x)
    gelu'(x) = Phi(x) + x * phi(x)
Q is exp(-x^2/2) times a polynomial in 1 / (1 + p |x|): Abramowitz and Stegun, formula 7.1.26, with an error below 8e-8.
erf itself takes so many instructions that the kernel would no longer be memory-bound.

LayerNorm of s = x + branch, with s^ = (s - mean) * rstd:
    y = weight * s^
    d s = d_s + rstd * (w - mean(w) - s^ * mean(w * s^)),  w = weight * d_y

All kernels go from the last row to the first: the last rows are still in the cache after the matrix product that wrote
them, and the next product starts with the first rows.

The residual stream, x and s, and its gradient are float32 or have the dtype of the branch. A narrow s is rounded before
its LayerNorm, so that backward, which reads the rounded s, differentiates what forward computed.

Letters: N rows (tokens), H width. Everything is computed in float32.
"""

# Inside a Triton kernel, arguments are Triton values that have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tuned on an H200.
GELU_BLOCK, GELU_WARPS = 4096, 4
GELU_BACKWARD_BLOCK, GELU_BACKWARD_WARPS = 1024, 4
NORM_ROWS, NORM_WARPS = 2, 4
NORM_BACKWARD_WARPS, NORM_BACKWARD_PROGRAMS = 2, 1056
SUM_BLOCK_P, SUM_BLOCK_H = 64, 32

LOG2_E = tl.constexpr(math.log2(math.e))
INVERSE_ROOT_2_PI = tl.constexpr(1 / math.sqrt(2 * math.pi))
P = tl.constexpr(0.3275911 / math.sqrt(2))


@triton.jit
def _upper_tail(x):
    """Phi(-|x|) and exp(-x^2/2)."""
    t = 1.0 / (1.0 + P * tl.abs(x))
    exponential = tl.exp2(x * x * (-0.5 * LOG2_E))
    polynomial = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    return 0.5 * t * polynomial * exponential, exponential


@triton.jit
def _gelu_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    positions = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < size
    x = tl.load(x_ptr + positions, mask=mask, other=0.0).to(tl.float32)
    tail, _ = _upper_tail(x)
    y = tl.maximum(x, 0.0) - tl.abs(x) * tail
    tl.store(y_ptr + positions, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward_kernel(x_ptr, grad_y_ptr, grad_x_ptr, size, BLOCK: tl.constexpr):
    positions = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < size
    x = tl.load(x_ptr + positions, mask=mask, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + positions, mask=mask, other=0.0).to(tl.float32)
    tail, exponential = _upper_tail(x)
    slope = tl.where(x > 0.0, 1.0 - tail, tail) + x * (exponential * INVERSE_ROOT_2_PI)
    tl.store(grad_x_ptr + positions, (grad_y * slope).to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    total_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    N,
    H,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_H)
    mask = (rows < N)[:, None] & (columns < H)[None, :]
    offsets = rows.to(tl.int64)[:, None] * H + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < H, other=0.0)[None, :]
    total = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + offsets, rounded, mask=mask)
    total = rounded.to(tl.float32)
    mean = tl.sum(total, axis=1) / H
    centred = tl.where(mask, total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=1) / H + eps)
    y = centred * rstd[:, None] * weight
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < N)
    tl.store(rstd_ptr + rows, rstd, mask=rows < N)


@triton.jit
def _add_norm_backward_kernel(
    grad_total_ptr,
    grad_y_ptr,
    total_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    grad_branch_ptr,
    partial_ptr,
    N,
    H,
    BLOCK_H: tl.constexpr,
    ONE_GRADIENT: tl.constexpr,
):
    """Process every P-th row from row i in program i, and sum these rows' part of the weight's gradient."""
    columns = tl.arange(0, BLOCK_H)
    mask = columns < H
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    grad_weight = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for before in range(tl.program_id(0), N, tl.num_programs(0)):
        row = N - 1 - before
        offsets = tl.cast(row, tl.int64) * H + columns
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        total = tl.load(total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_total = tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        normal = tl.where(mask, (total - mean) * rstd, 0.0)
        weighted = weight * grad_y
        mean_weighted = tl.sum(weighted, axis=0) / H
        mean_product = tl.sum(weighted * normal, axis=0) / H
        gradient = grad_total + rstd * (weighted - mean_weighted - normal * mean_product)
        tl.store(grad_x_ptr + offsets, gradient.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if not ONE_GRADIENT:
            tl.store(grad_branch_ptr + offsets, gradient.to(grad_branch_ptr.dtype.element_ty), mask=mask)
        grad_weight += grad_y * normal
    tl.store(partial_ptr + tl.program_id(0) * H + columns, grad_weight, mask=mask)


@triton.jit
def _column_sums_kernel(partial_ptr, sum_ptr, P, H, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    sums = tl.zeros((BLOCK_P, BLOCK_H), dtype=tl.float32)
    for first in range(0, P, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (columns < H)[None, :]
        sums += tl.load(partial_ptr + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + columns, tl.sum(sums, axis=0), mask=columns < H)


def gelu(x: Tensor, y: Tensor) -> None:
    """Write gelu(x) into y; both contiguous."""
    with torch.cuda.device_of(x):
        _gelu_kernel[(triton.cdiv(x.numel(), GELU_BLOCK),)](x, y, x.numel(), BLOCK=GELU_BLOCK, num_warps=GELU_WARPS)


def gelu_backward(x: Tensor, grad_y: Tensor, grad_x: Tensor) -> None:
    """Write grad_y * gelu'(x) into grad_x; all contiguous."""
    block = GELU_BACKWARD_BLOCK
    with torch.cuda.device_of(x):
        _gelu_backward_kernel[(triton.cdiv(x.numel(), block),)](
            x, grad_y, grad_x, x.numel(), BLOCK=block, num_warps=GELU_BACKWARD_WARPS
        )


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, total: Tensor, y: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    """Write x + branch into `total` (N, H), its LayerNorm into `y`, and `mean` and `rstd` (N,) for backward."""
    N, H = mean.numel(), weight.numel()
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(N, NORM_ROWS),)](
            x,
            branch,
            weight,
            total,
            y,
            mean,
            rstd,
            N,
            H,
            eps,
            BLOCK_N=NORM_ROWS,
            BLOCK_H=triton.next_power_of_2(H),
            num_warps=NORM_WARPS,
        )


def add_norm_backward(
    grad_total: Tensor,
    grad_y: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_x: Tensor,
    grad_branch: Tensor,
    grad_weight: Tensor,
) -> None:
    """Write the gradients of both summands, each in its own dtype, and of the weight.

    An empty `grad_branch` is not written: both summands have the same gradient, and in one dtype it is one tensor.
    """
    N, H = mean.numel(), weight.numel()
    programs = max(1, min(N, NORM_BACKWARD_PROGRAMS))
    partial = torch.empty(programs, H, dtype=torch.float32, device=total.device)
    with torch.cuda.device_of(total):
        _add_norm_backward_kernel[(programs,)](
            grad_total,
            grad_y,
            total,
            weight,
            mean,
            rstd,
            grad_x,
            grad_branch,
            partial,
            N,
            H,
            BLOCK_H=triton.next_power_of_2(H),
            ONE_GRADIENT=grad_branch.numel() == 0,
            num_warps=NORM_BACKWARD_WARPS,
        )
        _column_sums_kernel[(triton.cdiv(H, SUM_BLOCK_H),)](
            partial, grad_weight, programs, H, BLOCK_P=SUM_BLOCK_P, BLOCK_H=SUM_BLOCK_H, num_warps=4
        )
