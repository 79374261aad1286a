"""The parts of a block between its matrix products, each as one pass over memory on a GPU: GELU, and a residual sum
with the LayerNorm behind it.

They take a fifth of a training step, all of it for reading and writing. Under autocast their inputs and outputs have 16
bits, and what is kept for the backward pass is what is in memory anyway. Everywhere else the same is done by torch.

Letters: B batch, T time, H width.
"""

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gelu(x: Tensor) -> Tensor:
    """The exact GELU, x * Phi(x).

    Example:
        >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and kernels() is not None:
        return _apply(_GELU, x)
    return F.gelu(x)


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream, and normalise the sum for the next branch.

    Args:
        x: (B, T, H), the residual stream.
        branch: what to add to it; None for nothing.
        norm: the LayerNorm.

    Returns:
        x + branch, and norm(x + branch): in autocast's dtype where both were taken in one pass.

    Example:
        >>> total, y = add_norm(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[1.0, 4.0]]]), nn.LayerNorm(2))
        >>> total, y.round()
        (tensor([[[2., 6.]]]), tensor([[[-1.,  1.]]], grad_fn=<RoundBackward0>))
    """
    if branch is None:
        return x, norm(x)
    if _takes_one_pass(x, branch, norm):
        total, y = _AddNorm.apply(x, branch, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
        return total, y
    total = x + branch
    return total, norm(total)


def _takes_one_pass(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.shape == branch.shape
        and torch.is_autocast_enabled("cuda")
        and branch.dtype == torch.get_autocast_dtype("cuda")
        and getattr(norm, "bias", None) is None
        and norm.weight.dtype == torch.float32
        and kernels() is not None
    )


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # torch gives `apply` no types
    return result


@functools.cache
def kernels() -> ModuleType | None:
    """The Triton kernels, None where Triton is missing."""
    try:
        from coupled_adam.models import fused_kernels
    except ImportError:
        return None
    return fused_kernels


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = _gelu_forward(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        grad_x: Tensor = _gelu_backward(ctx.saved_tensors[0], grad_y)
        return grad_x


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, mean, rstd = _add_norm_forward(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        grad_x, grad_branch, grad_weight = _add_norm_backward(grad_total, grad_y, total, weight, mean, rstd)
        return grad_x, grad_branch, grad_weight, None


# Operators of their own, so that torch.compile takes them as they are.
@torch.library.custom_op("coupled_adam::gelu", mutates_args=())
def _gelu_forward(x: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _loaded_kernels().gelu(x.contiguous(), y)
    return y


@_gelu_forward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("coupled_adam::gelu_backward", mutates_args=())
def _gelu_backward(x: Tensor, grad_y: Tensor) -> Tensor:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _loaded_kernels().gelu_backward(x.contiguous(), grad_y.contiguous(), grad_x)
    return grad_x


@_gelu_backward.register_fake
def _(x: Tensor, grad_y: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("coupled_adam::add_norm", mutates_args=())
def _add_norm_forward(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _empty_add_norm(x, branch, weight, eps)
    _loaded_kernels().add_norm(x.contiguous(), branch.contiguous(), weight, eps, *results)
    return results


@_add_norm_forward.register_fake
def _empty_add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    y = torch.empty_like(branch, memory_format=torch.contiguous_format)
    statistics = x.new_empty(x.shape[:-1])  # (B, T)
    return total, y, statistics, torch.empty_like(statistics)


@torch.library.custom_op("coupled_adam::add_norm_backward", mutates_args=())
def _add_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_branch, grad_weight = _empty_add_norm_backward(grad_total, grad_y, total, weight, mean, rstd)
    gradients = grad_total.contiguous(), grad_y.contiguous()
    partial = _loaded_kernels().add_norm_backward(*gradients, total, weight, mean, rstd, grad_x, grad_branch)
    torch.sum(partial, dim=0, out=grad_weight)
    return grad_x, grad_branch, grad_weight


@_add_norm_backward.register_fake
def _empty_add_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty_like(total)
    return grad_x, torch.empty_like(total, dtype=grad_y.dtype), torch.empty_like(weight)


def _loaded_kernels() -> ModuleType:
    module = kernels()
    assert module is not None
    return module
