"""What is done to one chunk of logits, in torch operations. `loss_kernels` has the same functions for GPUs.

Letters: N tokens of the chunk, V vocabulary rows, H width.
"""

import torch
from torch import Tensor


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
    """Write the losses of a chunk, and where gradients are wanted turn its logits into theirs, in place.

    Args:
        logits: (N, V), without the bias; afterwards their gradient of sum_n token_weights_n * loss_n, or anything.
        targets: (N,) int64.
        losses: (N,), written, in the dtype in which the softmax is taken.
        token_weights: (N,), None for 1.
        z_loss: weight of the squared logsumexp in the loss.
        ignore_index: a target whose loss and gradient are 0.
        needs_grad: whether the gradient is wanted.
        bias: (V,) in the dtype of the losses, added to the logits; None for none.
        logit_cap: c in c * tanh(logit / c), taken of the logits with their bias; 0 for none.
    """
    kept = targets != ignore_index
    column = targets.where(kept, 0).unsqueeze(1)  # (N, 1)
    # In place where the logits already have the dtype of the losses.
    in_place = logits.dtype == losses.dtype
    if bias is None:
        z, out = logits, logits if in_place else None
    else:
        z = logits.add_(bias) if in_place else logits + bias  # (N, V) in the dtype of the losses
        out = z
    if logit_cap:
        z = out = z.to(losses.dtype).div_(logit_cap).tanh_().mul_(logit_cap)
    target_logit = z.gather(1, column).to(losses.dtype)
    log_p = torch.log_softmax(z, dim=1, dtype=losses.dtype, out=out)
    target_log_p = log_p.gather(1, column)
    lse = target_logit - target_log_p
    losses.copy_((z_loss * lse.square() - target_log_p).squeeze(1).where(kept, 0))
    if not needs_grad:
        return
    factor = kept.to(losses.dtype) if token_weights is None else token_weights.to(losses.dtype).where(kept, 0)
    factor = factor.unsqueeze(1)
    # d z / d logit = 1 - (z / c)^2, with the capped logit z = log_p + lse.
    slope = (log_p + lse).div_(logit_cap).square_().neg_().add_(1) if logit_cap else None
    gradient = log_p.exp_().mul_(factor * (1 + 2 * z_loss * lse)).scatter_add_(1, column, -factor)
    if slope is not None:
        gradient.mul_(slope)
    if not in_place:
        logits.copy_(gradient)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or total = a @ b for the first product; the total may be wider than the factors."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


def add_column_sums(total: Tensor, matrix: Tensor, first: bool) -> None:
    """total (V,) += the sum over the rows of a matrix (N, V), or total = that sum for the first; the total may be wider
    than the matrix."""
    if first:
        torch.sum(matrix, dim=0, dtype=total.dtype, out=total)
    else:
        total += matrix.sum(dim=0, dtype=total.dtype)
