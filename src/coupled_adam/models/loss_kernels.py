"""Triton kernel for the softmax of one chunk of logits, and a matrix product that accumulates in float32.

Each program handles one token. It reads its row in blocks for the logsumexp, then again, now from the cache, to
overwrite it with the gradient. Both passes also read the bias, which is small and stays in the cache, and apply the
soft cap to the logits. `loss_operations` has the same functions in torch operations.

Letters: N tokens of the chunk, V vocabulary rows.
"""

# Inside a Triton kernel, arguments are Triton values that have no Python type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.models import loss_operations

# Tuned on an H200 at V = 50304. With 32 warps, two rows per multiprocessor are in flight, and all stay in the cache.
BLOCK_V = 8192
NUM_WARPS = 32
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _base_2(reference):
    """Return c = reference * log2(e), and a factor that corrects its rounding.

    exp(z - reference) is then `_shifted_exp2(z, c)` * factor: one multiply-add, exact for z near the reference.
    """
    c = reference * LOG2_E
    return c, tl.exp2(-tl.fma(reference, LOG2_E, -c))


@triton.jit
def _shifted_exp2(z, c):
    """Compute exp2(z * log2(e) - c). The product must not be rounded, or the factor of `_base_2` would be wrong."""
    return tl.exp2(tl.fma(z, LOG2_E, -c))


@triton.jit
def _capped(z, logit_cap):
    """Compute c * tanh(z / c) with tanh u = 1 - 2 / (1 + exp(2u)), which is accurate at both ends."""
    return logit_cap - 2.0 * logit_cap / (1.0 + tl.exp2(z * (2.0 * LOG2_E / logit_cap)))


@triton.jit
def _read(logits_ptr, bias_ptr, logit_cap, first, columns, V, HAS_CAP: tl.constexpr):
    """Read a block of a row of logits in float32, add the bias and apply the cap; -inf past the end of the row."""
    z = tl.load(logits_ptr + first + columns, mask=first + columns < V, other=-float("inf")).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + first + columns, mask=first + columns < V, other=0.0, eviction_policy="evict_last")
    if HAS_CAP:
        z = tl.where(first + columns < V, _capped(z, logit_cap), -float("inf"))
    return z


@triton.jit
def _sum_of_exponentials(logits_ptr, bias_ptr, logit_cap, reference, V, BLOCK_V: tl.constexpr, HAS_CAP: tl.constexpr):
    columns = tl.arange(0, BLOCK_V)
    c, factor = _base_2(reference)
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        z = _read(logits_ptr, bias_ptr, logit_cap, first, columns, V, HAS_CAP)
        sums += _shifted_exp2(z, c)
    return tl.sum(sums, axis=0) * factor


@triton.jit
def _largest(logits_ptr, bias_ptr, logit_cap, V, BLOCK_V: tl.constexpr, HAS_CAP: tl.constexpr):
    columns = tl.arange(0, BLOCK_V)
    maxima = tl.full((BLOCK_V,), -float("inf"), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        maxima = tl.maximum(maxima, _read(logits_ptr, bias_ptr, logit_cap, first, columns, V, HAS_CAP))
    return tl.max(maxima, axis=0)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    token_weights_ptr,
    bias_ptr,
    z_loss,
    ignore_index,
    logit_cap,
    V,
    stride_logits,
    stride_targets,
    stride_token_weights,
    NEEDS_GRAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # From the last row to the first: the last rows are still in the cache, and the next product starts at the first.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(targets_ptr + row * stride_targets)
    kept = target != ignore_index
    target = tl.where(kept, target, 0)
    target_logit = tl.load(logits_ptr + target).to(tl.float32)
    if bias_ptr is not None:
        target_logit += tl.load(bias_ptr + target)
    if HAS_CAP:
        target_logit = _capped(target_logit, logit_cap)

    # Relative to the target's logit: finding the largest logit first would take another pass.
    reference = target_logit
    total = _sum_of_exponentials(logits_ptr, bias_ptr, logit_cap, reference, V, BLOCK_V, HAS_CAP)
    if not total < float("inf"):  # some logit is 88 or more above the target's
        reference = _largest(logits_ptr, bias_ptr, logit_cap, V, BLOCK_V, HAS_CAP)
        total = _sum_of_exponentials(logits_ptr, bias_ptr, logit_cap, reference, V, BLOCK_V, HAS_CAP)
    log_total = tl.log(total)
    lse = reference + log_total
    loss = log_total + (reference - target_logit) + z_loss * lse * lse
    tl.store(losses_ptr + row, tl.where(kept, loss, 0.0))

    if NEEDS_GRAD:
        weight = tl.where(kept, 1.0, 0.0)
        if token_weights_ptr is not None:
            weight = tl.where(kept, tl.load(token_weights_ptr + row * stride_token_weights).to(tl.float32), 0.0)
        c, factor = _base_2(lse)
        push = weight * (1.0 + 2.0 * z_loss * lse) * factor
        columns = tl.arange(0, BLOCK_V)
        tl.debug_barrier()  # all threads must have read the target's logit before one of them overwrites it
        for first in range(0, V, BLOCK_V):
            in_row = first + columns < V
            place = logits_ptr + first + columns
            # Evict this row first: rows that are still to be read a second time should stay in the cache.
            z = tl.load(place, mask=in_row, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
            if bias_ptr is not None:
                z += tl.load(bias_ptr + first + columns, mask=in_row, other=0.0, eviction_policy="evict_last")
            if HAS_CAP:
                z = _capped(z, logit_cap)
            gradient = push * _shifted_exp2(z, c)
            if HAS_CAP:  # the derivative of the cap
                gradient *= 1.0 - (z / logit_cap) * (z / logit_cap)
            tl.store(place, gradient.to(logits_ptr.dtype.element_ty), mask=in_row, eviction_policy="evict_first")
        tl.debug_barrier()
        pull = push * _shifted_exp2(target_logit, c) - weight
        if HAS_CAP:
            pull *= 1.0 - (target_logit / logit_cap) * (target_logit / logit_cap)
        tl.store(logits_ptr + target, pull.to(logits_ptr.dtype.element_ty))


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    token_weights: Tensor | None,
    z_loss: float,
    ignore_index: int,
    needs_grad: bool,
    bias: Tensor | None = None,
    logit_cap: float = 0.0,
) -> None:
    """Write the losses, and replace the logits by their gradient; see `loss_operations.cross_entropy`."""
    N, V = logits.shape
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(N,)](
            logits,
            targets,
            losses,
            token_weights,
            bias,
            z_loss,
            ignore_index,
            float(logit_cap),
            V,
            logits.stride(0),
            targets.stride(0),
            0 if token_weights is None else token_weights.stride(0),
            NEEDS_GRAD=needs_grad,
            HAS_CAP=logit_cap != 0,
            BLOCK_V=min(BLOCK_V, triton.next_power_of_2(V)),
            num_warps=NUM_WARPS,
        )


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a @ b to total, accumulated in float32; see `loss_operations.add_product`."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def add_column_sums(total: Tensor, matrix: Tensor, first: bool) -> None:
    """Add the sum over the rows to total, in float32; see `loss_operations.add_column_sums`.

    Computed as a product with a row of ones: torch.sum over the rows of such a wide matrix would allocate a float32
    buffer almost as large as the matrix.
    """
    if matrix.dtype == total.dtype:  # a product could round to TF32
        loss_operations.add_column_sums(total, matrix, first)
    else:
        add_product(total[None], matrix.new_ones(1, matrix.shape[0]), matrix, first)
