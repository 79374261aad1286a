"""Eq. chain_rule_e, g_i = -(delta_it - p_i) h, against automatic differentiation of the plain cross-entropy.

In float64, so that only rounding remains, and with torch's own loss, because the one in `models` uses the formula.

Letters: N positions, V rows of the table, H width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def identity_error(hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None = None) -> float:
    """Largest difference between the two gradients of the summed loss, divided by the largest entry.

    Args:
        hidden: (N, H), input of the head.
        table: (V, H), the head.
        targets: (N,) int64.
        bias: (V,) of the head, or None.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> hidden, table = torch.randn(5, 3, generator=generator), torch.randn(7, 3, generator=generator)
        >>> identity_error(hidden, table, torch.tensor([0, 6, 1, 1, 3])) < 1e-14
        True
    """
    h, E = hidden.detach().double(), table.detach().double().requires_grad_()
    b = None if bias is None else bias.detach().double()
    with torch.enable_grad(), torch.autocast(h.device.type, enabled=False):
        (by_autograd,) = torch.autograd.grad(F.cross_entropy(F.linear(h, E, b), targets, reduction="sum"), E)
    by_formula = gradient_by_formula(h, E.detach(), targets, b)
    return float((by_autograd - by_formula).abs().max() / by_autograd.abs().max())


def gradient_by_formula(hidden: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum over positions of -(delta_it - p_i) h, (V, H)."""
    p = torch.softmax(F.linear(hidden, table, bias), dim=1)  # (N, V)
    delta = F.one_hot(targets, len(table)).to(p.dtype)  # (N, V)
    return -(delta - p).T @ hidden
