"""Algorithm 1 of the paper, line by line, in float64 and with the full V x H second moment.

This is the oracle: slow, plain, and never used for training. Every fast path is compared with it.

Legend: V vocabulary rows, H hidden size, t optimizer step (from 1).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ReferenceState(NamedTuple):
    """What Algorithm 1 carries from one step to the next."""

    embeddings: Tensor  # e  (V, H) float64
    first_moment: Tensor  # m  (V, H) float64
    second_moment: Tensor  # v  (V, H) float64, one row per token also when coupled
    step: int  # t


def reference_init(embeddings: Tensor) -> ReferenceState:
    """Start of Algorithm 1: both moments are zero.

    Example:
        >>> reference_init(torch.ones(3, 2)).step
        0
    """
    e = embeddings.detach().double().clone()
    return ReferenceState(e, torch.zeros_like(e), torch.zeros_like(e), 0)


def reference_step(
    state: ReferenceState,
    gradient: Tensor,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale_exponent: float = 0.0,
    coupled: bool = True,
    maximize: bool = False,
) -> ReferenceState:
    """One pass through the loop of Algorithm 1.

    Args:
        state: embeddings, moments and step count before the update.
        gradient: g, (V, H).
        lr: eta.
        betas: beta1 and beta2.
        eps: epsilon.
        weight_decay: decoupled weight decay; the paper applies none.
        scale_exponent: n of the scaled variant, which multiplies the coupled second moment by 2^-n.
        coupled: False gives standard Adam (AdamW with weight decay).
        maximize: ascend instead of descend.

    Returns:
        The state after the update; the given one is not changed.

    Example:
        >>> before = reference_init(torch.zeros(2, 1))
        >>> after = reference_step(before, torch.tensor([[1.0], [-1.0]]), lr=0.1)
        >>> [round(number, 6) for number in after.embeddings.flatten().tolist()]
        [-0.1, 0.1]
    """
    beta1, beta2 = betas
    g = gradient.double()
    if maximize:
        g = -g
    t = state.step + 1
    m = beta1 * state.first_moment + (1 - beta1) * g
    v = beta2 * state.second_moment + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    if coupled:
        nu = v_hat.mean(dim=0, keepdim=True)  # (1, H), the average over the vocabulary
        v_hat = 2.0**-scale_exponent * nu.expand_as(v)
    e = state.embeddings * (1 - lr * weight_decay)
    e = e - lr * m_hat / (v_hat.sqrt() + eps)
    return ReferenceState(e, m, v, t)
