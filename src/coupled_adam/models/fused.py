"""Fused parts of a block for GPUs: GELU, residual sum with LayerNorm, and linear layers.

GELU and LayerNorm are memory-bound and take a seventh of a training step, so each is one pass over memory. The fused
versions run under autocast on a GPU; elsewhere torch computes the same.

Letters: B batch, T time, H width.
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Linear(nn.Linear):
    """nn.Linear whose weight gradient is float32 under autocast on a GPU, without rounding to bf16 first."""

    def forward(self, x: Tensor) -> Tensor:  # (..., K) -> (..., M)
        weight = self.weight
        if getattr(self, "bias", None) is None and x.is_cuda and weight.dtype == torch.float32 and _autocast():
            y: Tensor = _linear(x.to(torch.get_autocast_dtype("cuda")), weight)[0]
            return y
        return super().forward(x)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU, x * Phi(x).

    Example:
        >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])
    """
    if HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        y: Tensor = _gelu(x)
        return y
    return F.gelu(x)


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream, and normalise the sum for the next branch.

    Args:
        x: (B, T, H), the residual stream, in float32 or the dtype of the branch.
        branch: the tensor to add; None for nothing.
        norm: the LayerNorm.

    Returns:
        x + branch in the dtype of the stream, and its norm. The fused version returns the norm in autocast's dtype.

    Example:
        >>> total, y = add_norm(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, 4.0]]]), nn.LayerNorm(2))
        >>> total, y.round()
        (tensor([[[2., 6.]]]), tensor([[[-1.,  1.]]], grad_fn=<RoundBackward0>))
    """
    if branch is None:
        return x, norm(widened(x, norm))
    if _takes_one_pass(x, branch, norm):
        total, y, _, _ = _add_norm(x, branch, norm.weight, norm.eps)
        return total, y
    total = x + branch
    return total, norm(widened(total, norm))


def widened(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """A residual stream with at least the precision of the norm's weight, so that no sum of the norm is narrower."""
    return x.to(torch.promote_types(x.dtype, norm.weight.dtype))


def _takes_one_pass(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> bool:
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in (torch.float32, branch.dtype)
        and norm.weight.dtype == torch.float32
        and x.shape == branch.shape
        and _autocast()
        and branch.dtype == torch.get_autocast_dtype("cuda")
        and getattr(norm, "bias", None) is None
    )


def _autocast() -> bool:
    return torch.is_autocast_enabled("cuda")


def _kernels() -> ModuleType:
    from coupled_adam.models import fused_kernels

    return fused_kernels


# Custom operators: torch.compile leaves them alone, and a gradient may have a wider dtype than its tensor.
@torch.library.custom_op("coupled_adam::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., K) times weight (M, K), and the weight in the dtype of x."""
    narrow = weight.to(x.dtype)
    return x @ narrow.T, narrow


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), torch.empty_like(weight, dtype=x.dtype)


@torch.library.custom_op("coupled_adam::linear_backward", mutates_args=())
def _linear_backward(grad_y: Tensor, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    flat = grad_y.flatten(0, -2)
    return grad_y @ narrow, torch.mm(flat.T, x.flatten(0, -2), out_dtype=torch.float32)


@_linear_backward.register_fake
def _(grad_y: Tensor, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(narrow, dtype=torch.float32)


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1])


def _differentiate_linear(ctx: Any, grad_y: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
    if grad_y is None:
        return None, None
    grad_x, grad_weight = _linear_backward(grad_y, *ctx.saved_tensors)
    return grad_x, grad_weight


_linear.register_autograd(_differentiate_linear, setup_context=_keep_factors)


@torch.library.custom_op("coupled_adam::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _kernels().gelu(x.contiguous(), y)
    return y


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("coupled_adam::gelu_backward", mutates_args=())
def _gelu_backward(x: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _kernels().gelu_backward(x.contiguous(), grad_y.contiguous(), grad_x)
    return grad_x


@_gelu_backward.register_fake
def _(x: Tensor, grad_y: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_gelu.register_autograd(
    lambda ctx, grad_y: _gelu_backward(ctx.saved_tensors[0], grad_y),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("coupled_adam::add_norm", mutates_args=())
def _add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + branch, its LayerNorm, and the mean and inverse standard deviation of each row (B, T)."""
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _add_norm_results(x, branch, weight, eps)
    _kernels().add_norm(x.contiguous(), branch.contiguous(), weight, eps, *results)
    return results


@_add_norm.register_fake
def _add_norm_results(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    y = torch.empty_like(branch, memory_format=torch.contiguous_format)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return total, y, mean, torch.empty_like(mean)


@torch.library.custom_op("coupled_adam::add_norm_backward", mutates_args=())
def _add_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = _add_norm_gradients(grad_total, grad_y, total, weight, mean, rstd)
    gradients = grad_total.contiguous(), grad_y.contiguous()
    _kernels().add_norm_backward(*gradients, total, weight, mean, rstd, *results)
    return results


@_add_norm_backward.register_fake
def _add_norm_gradients(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both summands, each in its own dtype, and of the weight; in one dtype, the second is empty."""
    if grad_y.dtype == total.dtype:
        return torch.empty_like(total), total.new_empty(0), torch.empty_like(weight)
    return torch.empty_like(total), torch.empty_like(total, dtype=grad_y.dtype), torch.empty_like(weight)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(total, inputs[2], mean, rstd)


def _differentiate_add_norm(ctx: Any, grad_total: Tensor, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_branch, grad_weight = _add_norm_backward(grad_total, grad_y, *ctx.saved_tensors)
    return grad_x, grad_branch if grad_branch.numel() else grad_x, grad_weight, None


_add_norm.register_autograd(_differentiate_add_norm, setup_context=_keep_sum)
