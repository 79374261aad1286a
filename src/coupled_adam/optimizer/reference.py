"""Algorithm 1 of the paper and the family of second moments, line by line, in float64 with full V x H second moments.

This is the reference that tests compare every fast path with. It is slow and never used for training.

Legend: V vocabulary rows, H hidden size, t optimizer step (from 1), x column exponent, y row exponent.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.optimizer.reference_rounding import rounded_table


class ReferenceState(NamedTuple):
    """The state of Algorithm 1 between steps."""

    embeddings: Tensor  # e  (V, H) float64
    first_moment: Tensor  # m  (V, H) float64
    second_moment: Tensor  # v  (V, H) float64, one row per token even if coupled
    step: int  # t


def reference_init(embeddings: Tensor) -> ReferenceState:
    """Initialize Algorithm 1: both moments are zero.

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
    row_exponent: float = 0.0,
    column_exponent: float = 1.0,
    mean_free: bool = False,
    vocabulary_size: int | None = None,
    state_seed: int | None = None,
    table: int = 0,
) -> ReferenceState:
    """Take one step of Algorithm 1, or of another member of the family of second moments.

    Args:
        state: embeddings, moments and step count before the update.
        gradient: g, (V, H).
        lr: eta.
        betas: beta1 and beta2.
        eps: epsilon.
        weight_decay: decoupled weight decay; the paper uses none.
        scale_exponent: n of the scaled variant, which multiplies the coupled second moment by 2^-n.
        coupled: False gives standard Adam (AdamW with weight decay).
        maximize: maximize instead of minimize.
        row_exponent: y; 0 is Coupled Adam.
        column_exponent: x; 1 is Coupled Adam.
        mean_free: subtract the mean update from every row.
        vocabulary_size: number of first rows over which all means are taken; None means all.
        state_seed: keep m in bfloat16, with stochastic rounding of this seed; None keeps m in float64.
        table: number of the table, for the random bits.

    Returns:
        The state after the update; `state` is not modified.

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
    stored = m if state_seed is None else rounded_table(m, seed=state_seed, table=table, step=t)
    # The mean update uses the moments as stored, so that the remaining updates add up to zero.
    m_hat = (stored if mean_free else m) / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    if coupled:
        n, x, y = scale_exponent, column_exponent, row_exponent
        denominator = family_denominator(v_hat, eps=eps, n=n, x=x, y=y, vocabulary_size=vocabulary_size)
    else:
        denominator = v_hat.sqrt() + eps
    update = m_hat / denominator
    if mean_free:
        update = update - update[:vocabulary_size].mean(dim=0, keepdim=True)
    e = state.embeddings * (1 - lr * weight_decay) - lr * update
    return ReferenceState(e, stored, v, t)


def family_denominator(
    v_hat: Tensor, *, eps: float, n: float = 0.0, x: float = 1.0, y: float = 0.0, vocabulary_size: int | None = None
) -> Tensor:
    """Compute the denominator (sqrt(2^-n s (c_h / s)^x) + eps) ((sqrt(r_i) + eps) / sqrt(s))^y of the update.

    Args:
        v_hat: Adam's bias-corrected second moment, (V, H) float64.
        eps: epsilon.
        n: scale exponent.
        x: column exponent.
        y: row exponent.
        vocabulary_size: number of first rows over which c and s are taken; None means all.

    Returns:
        The denominator (V, H). Infinity, for an update of zero, where there was no gradient yet and it would be zero.

    Example:
        >>> v_hat = torch.tensor([[1.0, 4.0], [4.0, 16.0]], dtype=torch.float64)
        >>> family_denominator(v_hat, eps=0.0, x=1.0, y=1.0)  # v_hat has rank one: same as Adam
        tensor([[1., 2.],
                [2., 4.]], dtype=torch.float64)
    """
    c = v_hat[:vocabulary_size].mean(dim=0, keepdim=True)  # (1, H)
    r = v_hat.mean(dim=1, keepdim=True)  # (V, 1)
    s = c.mean()
    if s == 0:  # no gradient yet: all ratios are 1
        return torch.full_like(v_hat, math.inf)
    columns: Tensor = (2.0**-n * s * (c / s) ** x).sqrt() + eps  # (1, H)
    rows: Tensor = ((r.sqrt() + eps) / s.sqrt()) ** y  # (V, 1)
    rows = torch.where(rows == 0, math.inf, rows)  # with eps = 0, a row that never had a gradient
    return columns * rows
