"""An experiment: the gradients of queries, keys and values are never put together.

Attention returns them as three tensors, and the one product that made all three wants one gradient: autograd copies
them into it, which costs 2.5 ms of the 125M step on an H200. Here each of them goes through its own products instead:
    d x = d_q W_q + d_k W_k + d_v W_v,  d W = (d_q' x, d_k' x, d_v' x) stacked
The sum d x is rounded to bfloat16 three times instead of once.

Letters: B batch, T time, H width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.models.gpt2 import GPT2Attention


@torch.library.custom_op("coupled_adam_benchmarks::qkv_gradients", mutates_args=())
def qkv_gradients(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (B, T, H) and, in float32, of the weight (3H, H), from gradients (B, T, H)."""
    flat = x.flatten(0, 1)
    grad_x = torch.empty_like(flat)
    grad_weight = torch.empty_like(narrow, dtype=torch.float32)
    parts = zip((grad_q, grad_k, grad_v), narrow.chunk(3), grad_weight.chunk(3), strict=True)
    for i, (gradient, weight, result) in enumerate(parts):
        gradient = gradient.flatten(0, 1)
        torch.addmm(grad_x, gradient, weight, beta=min(i, 1), out=grad_x)
        if x.is_cuda and x.dtype != torch.float32:
            torch.mm(gradient.T, flat, out_dtype=torch.float32, out=result)
        else:
            result.copy_(gradient.T @ flat)
    return grad_x.view_as(x), grad_weight


@qkv_gradients.register_fake
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(narrow, dtype=torch.float32)


class QKV(torch.autograd.Function):
    """One product forward, and one product for each of the three parts backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        return (x @ narrow.T).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, grad_weight = qkv_gradients(*gradients, *ctx.saved_tensors)
        return grad_x, grad_weight


def attention(self: GPT2Attention, x: Tensor) -> Tensor:
    """`GPT2Attention.forward` with the gradients apart."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    parts: tuple[Tensor, ...] = QKV.apply(x, self.c_attn.weight)  # type: ignore[no-untyped-call]
    q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, heads, T, H/heads)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    projected: Tensor = self.c_proj(attended.transpose(1, 2).flatten(2))
    return projected


@contextmanager
def gradients_apart() -> Iterator[None]:
    """Every GPT-2 that is compiled or called in this context keeps the three gradients apart; without biases only."""
    before = GPT2Attention.forward
    GPT2Attention.forward = attention  # type: ignore[method-assign]
    try:
        yield
    finally:
        GPT2Attention.forward = before  # type: ignore[method-assign]
