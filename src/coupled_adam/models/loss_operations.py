"""Cross-entropy of one chunk of logits in torch operations. `loss_kernels` has the same functions for GPUs.

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
    """Write the losses of a chunk and, if needed, replace its logits by their gradient in place.

    Args:
        logits: (N, V), without the bias. On return they hold the gradient of sum_n token_weights_n * loss_n, or are
            undefined without `needs_grad`.
        targets: (N,) int64.
        losses: (N,), output; the softmax uses their dtype.
        token_weights: (N,); None for 1.
        z_loss: weight of the squared logsumexp in the loss.
        ignore_index: a target whose loss and gradient are 0.
        needs_grad: whether to compute the gradient.
        bias: (V,) in the dtype of the losses, added to the logits; None for no bias.
        logit_cap: c in c * tanh(logit / c), applied to the logits including the bias; 0 for no cap.
    """
    kept = targets != ignore_index
    column = targets.where(kept, 0).unsqueeze(1)  # (N, 1)
    # In place if the logits already have the dtype of the losses.
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
    """Add a @ b to total, or overwrite it for the first product; total may have a wider dtype than a and b."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


def add_column_sums(total: Tensor, matrix: Tensor, first: bool) -> None:
    """Add the sum over the rows of a matrix (N, V) to total (V,), or overwrite it for the first matrix.

    total may have a wider dtype than the matrix.
    """
    if first:
        torch.sum(matrix, dim=0, dtype=total.dtype, out=total)
    else:
        total += matrix.sum(dim=0, dtype=total.dtype)
