"""The softmax of one chunk of logits as a Triton kernel, and the matrix product that adds up in float32.

One program per token. It reads its row once for the logsumexp, in blocks, and once more, now from the cache, to write
the gradient over it. `loss_operations` has the same functions in torch operations.

Letters: N tokens of the chunk, V vocabulary rows.
"""

# The arguments of a Triton kernel are Triton's own values inside it; there is no type to write down.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

# Found on an H200 at V = 50304. With 32 warps two rows per multiprocessor are under way, and all stay in the cache.
BLOCK_V = 8192
NUM_WARPS = 32
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    token_weights_ptr,
    z_loss,
    ignore_index,
    V,
    stride_logits,
    stride_targets,
    stride_token_weights,
    NEEDS_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(targets_ptr + row * stride_targets)
    kept = target != ignore_index
    target = tl.where(kept, target, 0)
    target_logit = tl.load(logits_ptr + target).to(tl.float32)
    columns = tl.arange(0, BLOCK_V)

    # Relative to the target's logit: the largest would have to be found first, in another pass.
    reference = target_logit
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        z = tl.load(logits_ptr + first + columns, mask=first + columns < V, other=-float("inf")).to(tl.float32)
        sums += tl.exp2(z * LOG2_E - reference * LOG2_E)
    total = tl.sum(sums, axis=0)
    if not total < float("inf"):  # some logit is 88 or more above the target's
        maxima = tl.full((BLOCK_V,), -float("inf"), dtype=tl.float32)
        for first in range(0, V, BLOCK_V):
            z = tl.load(logits_ptr + first + columns, mask=first + columns < V, other=-float("inf")).to(tl.float32)
            maxima = tl.maximum(maxima, z)
        reference = tl.max(maxima, axis=0)
        sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        for first in range(0, V, BLOCK_V):
            z = tl.load(logits_ptr + first + columns, mask=first + columns < V, other=-float("inf")).to(tl.float32)
            sums += tl.exp2(z * LOG2_E - reference * LOG2_E)
        total = tl.sum(sums, axis=0)
    log_total = tl.log(total)
    lse = reference + log_total
    loss = log_total + (reference - target_logit) + z_loss * lse * lse
    tl.store(losses_ptr + row, tl.where(kept, loss, 0.0))

    if NEEDS_GRAD:
        factor = tl.where(kept, 1.0, 0.0)
        if token_weights_ptr is not None:
            factor = tl.where(kept, tl.load(token_weights_ptr + row * stride_token_weights).to(tl.float32), 0.0)
        push = factor * (1.0 + 2.0 * z_loss * lse)
        tl.debug_barrier()  # all threads have read the target's logit before one of them writes there
        for first in range(0, V, BLOCK_V):
            in_row = first + columns < V
            z = tl.load(logits_ptr + first + columns, mask=in_row, other=-float("inf")).to(tl.float32)
            gradient = push * tl.exp2(z * LOG2_E - lse * LOG2_E)
            tl.store(logits_ptr + first + columns, gradient.to(logits_ptr.dtype.element_ty), mask=in_row)
        tl.debug_barrier()
        pull = push * tl.exp2((target_logit - lse) * LOG2_E) - factor
        tl.store(logits_ptr + target, pull.to(logits_ptr.dtype.element_ty))


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    token_weights: Tensor | None,
    z_loss: float,
    ignore_index: int,
    needs_grad: bool,
) -> None:
    """Write the losses, turn the logits into their gradient; see `loss_operations.cross_entropy`."""
    N, V = logits.shape
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(N,)](
            logits,
            targets,
            losses,
            token_weights,
            z_loss,
            ignore_index,
            V,
            logits.stride(0),
            targets.stride(0),
            0 if token_weights is None else token_weights.stride(0),
            NEEDS_GRAD=needs_grad,
            BLOCK_V=min(BLOCK_V, triton.next_power_of_2(V)),
            num_warps=NUM_WARPS,
        )


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, in float32 within the product; see `loss_operations.add_product`."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
