"""Cross-entropy of a linear head in chunks of tokens, so that all logits are never in memory at once.

The gradients of a chunk are computed while its logits are in memory, so nothing is computed twice: forward stores the
gradients of the summed loss, and backward only multiplies them by a number. They are dense: every token contributes to
the gradient of every row of the head.

Letters: N tokens, V vocabulary rows, H width. With logits z (N, V), bias included, target y and lse = logsumexp(z):
    loss_n = lse_n - z_{n,y} + z_loss * lse_n^2
    d loss_n / d z_n = (1 + 2 * z_loss * lse_n) * softmax(z_n) - onehot(y)
With a soft cap c, z = c * tanh(a / c) of the logits a, and d z / d a = 1 - (z / c)^2.
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.models import loss_operations

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Bytes of one chunk of logits: small compared with the model, but large enough that summing the weight's gradient over
# chunks costs little. On the CPU, a chunk should fit in the cache.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}
# Matrix products are fastest at multiples of their tiles.
ROW_MULTIPLE = 256


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    logit_cap: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight, bias), targets)` without storing all logits.

    Under autocast, the matrix products use its dtype; bias, softmax and the sum over chunks use at least float32. The
    result can be differentiated once. With reduction="none", the backward pass recomputes the logits.

    Args:
        hidden: (N, H).
        weight: (V, H).
        targets: (N,) int64, rows of the weight, or `ignore_index`. Other values are not detected on CUDA.
        bias: (V,), added to the logits; None for no bias.
        z_loss: weight of the squared logsumexp, added to each token's loss.
        logit_cap: c in c * tanh(logit / c), applied to the logits including the bias; None for no cap.
        reduction: "mean" over the targets that are not ignored (NaN if all are), or "none".
        ignore_index: target to ignore.

    Returns:
        The mean, a scalar, or the losses (N,) with 0 at ignored targets; float32 (float64 for float64 inputs).

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> linear_cross_entropy(hidden, weight, torch.tensor([0, -100]))
        tensor(0.2395)
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected (N, H) and (V, H)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}, one number per row")
    if targets.shape != hidden.shape[:1]:
        raise UserError(f"targets have shape {tuple(targets.shape)}, expected {tuple(hidden.shape[:1])}")
    if logit_cap is not None and not logit_cap > 0:
        raise UserError(f"Invalid logit_cap: {logit_cap}; expected a number above 0, or None")
    if reduction not in ("mean", "none"):
        raise UserError(f"Invalid reduction: {reduction!r}; expected 'mean' or 'none'")
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:  # like autocast, which does not cast float64
        dtype = torch.get_autocast_dtype(device_type)
    # Here rather than in the operator, so that the compiler lets the last norm write this dtype.
    hidden = hidden.to(dtype)
    options = float(z_loss), ignore_index, dtype
    cap = float(logit_cap or 0.0)
    if reduction == "none":
        losses: Tensor = _token_losses(hidden, weight, targets, *options, bias, cap)
        return losses
    needs_bias_grad = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    needs_grad = needs_bias_grad or (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
    total: Tensor = _summed_loss(hidden, weight, targets, *options, needs_grad, bias, needs_bias_grad, cap)[0]
    return total / (targets != ignore_index).sum()


# Custom operators: torch.compile neither unrolls the loop nor breaks the graph.
@torch.library.custom_op("coupled_adam::summed_loss", mutates_args=())
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    needs_grad: bool,
    bias: Tensor | None = None,
    needs_bias_grad: bool = False,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses and its gradients (N, H), (V, H) and (V,); gradients that are not needed are empty."""
    losses, grad_hidden, grad_weight, grad_bias = _walk_chunks(
        hidden, weight, targets, None, z_loss, ignore_index, dtype, needs_grad, bias, needs_bias_grad, logit_cap
    )
    return losses.sum(), grad_hidden, grad_weight, grad_bias


@_summed_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    needs_grad: bool,
    bias: Tensor | None = None,
    needs_bias_grad: bool = False,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    losses, grad_hidden, grad_weight, grad_bias = _results(hidden, weight, dtype, needs_grad, needs_bias_grad)
    return losses.new_empty(()), grad_hidden, grad_weight, grad_bias


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, bias, needs_bias_grad, _ = inputs
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)  # otherwise backward would allocate zeros of their size
    ctx.save_for_backward(*gradients)
    ctx.dtypes = hidden.dtype, weight.dtype, bias.dtype if needs_bias_grad else None


def _scale_gradients(ctx: Any, grad_total: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    _refuse_second_derivative()
    if grad_total is None:
        return (None,) * 10
    grad_hidden, grad_weight, grad_bias = (
        None if dtype is None else (gradient * grad_total).to(dtype)
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    )
    return grad_hidden, grad_weight, *(None,) * 5, grad_bias, None, None


_summed_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("coupled_adam::token_losses", mutates_args=())
def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """The losses (N,). Their weights in the differentiated sum are only known in backward."""
    return _walk_chunks(hidden, weight, targets, None, z_loss, ignore_index, dtype, False, bias, False, logit_cap)[0]


@_token_losses.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    return _results(hidden, weight, dtype, needs_grad=False, needs_bias_grad=False)[0]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, targets, *options, bias, logit_cap = inputs
    ctx.save_for_backward(hidden, weight, targets, bias)
    ctx.options, ctx.logit_cap = options, logit_cap


def _compute_gradients(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_second_derivative()
    hidden, weight, targets, bias = ctx.saved_tensors
    needs_bias_grad = bias is not None and ctx.needs_input_grad[6]
    grad_hidden, grad_weight, grad_bias = _token_gradients(
        hidden, weight, targets, grad_losses, *ctx.options, bias, needs_bias_grad, ctx.logit_cap
    )
    for_bias = grad_bias.to(bias.dtype) if needs_bias_grad else None
    return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *(None,) * 4, for_bias, None


_token_losses.register_autograd(_compute_gradients, setup_context=_keep_inputs)


@torch.library.custom_op("coupled_adam::token_gradients", mutates_args=())
def _token_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    needs_bias_grad: bool = False,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum of the losses weighted by `token_weights` (N,)."""
    return _walk_chunks(
        hidden, weight, targets, token_weights, z_loss, ignore_index, dtype, True, bias, needs_bias_grad, logit_cap
    )[1:]


@_token_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    needs_bias_grad: bool = False,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden, weight, dtype, True, needs_bias_grad)[1:]


def _refuse_second_derivative() -> None:
    # Gradients are enabled in a backward pass only with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy can be differentiated only once; for second derivatives use "
            "F.cross_entropy(F.linear(hidden, weight, bias), targets), or leave out create_graph=True"
        )


def _walk_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor | None,
    z_loss: float,
    ignore_index: int,
    dtype: torch.dtype,
    needs_grad: bool,
    bias: Tensor | None,
    needs_bias_grad: bool,
    logit_cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the losses, and the gradients of their sum, chunk by chunk.

    Args:
        hidden, weight, targets, z_loss, ignore_index, bias, logit_cap: as in `linear_cross_entropy`.
        token_weights: (N,) weights of the losses in the sum; None for 1.
        dtype: dtype of the matrix products.
        needs_grad: whether to compute the gradients of hidden and weight.
        needs_bias_grad: whether to compute the gradient of the bias, which takes another pass over the logits.

    Returns:
        losses (N,), grad_hidden (N, H) in `dtype`, grad_weight (V, H) and grad_bias (V,) in at least float32; gradients
        that are not needed are empty.
    """
    N, V = hidden.shape[0], weight.shape[0]
    losses, grad_hidden, grad_weight, grad_bias = _results(hidden, weight, dtype, needs_grad, needs_bias_grad)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    # Not rounded to the dtype of the products: the log probability of a rare token can be -20.
    bias = None if bias is None else bias.to(losses.dtype).contiguous()
    rows = chunk_rows(N, V * hidden.itemsize, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]))
    buffer = hidden.new_empty(rows, V)
    operations = operations_for(hidden)
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        logits = torch.mm(hidden[part], weight.T, out=buffer[: len(targets[part])])
        weights = None if token_weights is None else token_weights[part]
        operations.cross_entropy(
            logits, targets[part], losses[part], weights, z_loss, ignore_index, needs_grad, bias, logit_cap
        )
        if needs_grad:  # the logits are now their gradient
            torch.mm(logits, weight, out=grad_hidden[part])
            operations.add_product(grad_weight, logits.T, hidden[part], first=start == 0)
        if needs_bias_grad:
            operations.add_column_sums(grad_bias, logits, first=start == 0)
    if N == 0:
        grad_weight.zero_()
        grad_bias.zero_()
    return losses, grad_hidden, grad_weight, grad_bias


def _results(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, needs_grad: bool, needs_bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of `_walk_chunks`."""
    wide = torch.promote_types(dtype, torch.float32)
    losses = hidden.new_empty(hidden.shape[0], dtype=wide)
    grad_hidden = hidden.new_empty(hidden.shape if needs_grad else (0,), dtype=dtype)
    grad_weight = weight.new_empty(weight.shape if needs_grad else (0,), dtype=wide)
    grad_bias = weight.new_empty(weight.shape[:1] if needs_bias_grad else (0,), dtype=wide)
    return losses, grad_hidden, grad_weight, grad_bias


def chunk_rows(N: int, row_bytes: int, budget: int) -> int:
    """Number of rows per chunk, for chunks of about equal size within the budget, but at least one row.

    Example:
        >>> chunk_rows(98304, row_bytes=2 * 50304, budget=2**30)
        9984
    """
    chunks = -(-N * row_bytes // budget)
    rows = -(-N // max(chunks, 1))
    if rows > ROW_MULTIPLE:
        fitting = max(budget // row_bytes // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        rows = min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, fitting)
    return max(rows, 1)


def operations_for(tensor: Tensor) -> ModuleType:
    """The module that processes a chunk: Triton kernels on CUDA and ROCm, torch operations elsewhere."""
    if HAS_TRITON and tensor.is_cuda and tensor.dtype != torch.float64:  # float64 is for checking, not for speed
        from coupled_adam.models import loss_kernels

        return loss_kernels
    return loss_operations
