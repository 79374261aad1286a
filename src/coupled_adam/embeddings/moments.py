"""First and second moments of the rows of a table, in one pass: lengths, mean, Gram matrix, covariance.

The Gram matrix is summed around a point near the mean and shifted back afterwards. So the covariance stays accurate
even if the mean is much longer than the spread around it, as in a strongly anisotropic table.

Legend: V vocabulary rows, H hidden size, n rows of one block. Arrays are float64, of the table divided by its scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, Report

SAMPLED_ROWS = 1024
# The Gram matrix is symmetric: with p column panels, only (p + 1) / 2p of the products are computed.
PANELS = 8


@dataclass(frozen=True)
class Moments:
    """Sums over the rows e_i of a table."""

    norms: Tensor
    """|e_i|, (V,)."""
    mean: Tensor
    """mu = 1/V sum_i e_i, (H,)."""
    unit_sum: Tensor
    """sum_i e_i / |e_i| over the rows that are not zero, (H,)."""
    gram: Tensor
    """sum_i e_i e_i^T, (H, H)."""
    covariance_trace: float
    """Trace of S = sum_i (e_i - mu)(e_i - mu)^T."""
    covariance_norm: float
    """Frobenius norm of S."""


def moments_of(table: EmbeddingMatrix, report: Report | None) -> Moments:
    """Compute the moments in one pass over the table."""
    V, H = table.V, table.H
    near_mean = sample_mean(table)  # (H,)
    norms = torch.empty(V, dtype=torch.float64, device=table.device)
    sums = torch.zeros(2, H, dtype=torch.float64, device=table.device)  # of e_i and of e_i / |e_i|
    shifted = torch.zeros(H, H, dtype=torch.float64, device=table.device)  # sum of (e_i - near_mean)(...)^T
    buffer = torch.empty(table.block_rows, H, dtype=torch.float64, device=table.device)  # not the caller's memory
    for span in table.spans(report):
        block = buffer[: span.stop - span.start].copy_(table.rows(span))  # (n, H)
        length = torch.linalg.vector_norm(block, dim=1)  # (n,)
        norms[span] = length
        weights = torch.stack([torch.ones_like(length), torch.where(length > 0, 1 / length, 0.0)])
        sums.addmm_(weights, block)
        add_gram(shifted, block.sub_(near_mean))
    shifted = shifted.triu() + shifted.triu(1).T
    mean = sums[0] / V
    away = mean - near_mean
    covariance = shifted.addr(away, away, alpha=-V)
    trace, norm = float(covariance.trace()), float(torch.linalg.matrix_norm(covariance))
    del covariance  # at H = 4096 each of these takes 128 MiB
    gram = shifted.addr_(away, near_mean, alpha=V).addr_(near_mean, away, alpha=V).addr_(near_mean, near_mean, alpha=V)
    return Moments(norms, mean, sums[1], gram, trace, norm)


def sample_mean(table: EmbeddingMatrix) -> Tensor:
    """Mean of about a thousand rows spread evenly over the table, (H,)."""
    step = max(1, table.V // SAMPLED_ROWS)
    return table.rows(slice(0, table.V, step)).double().mean(0)


def add_gram(gram: Tensor, block: Tensor) -> None:
    """Add block^T block to the upper triangle of `gram`; the lower triangle is left incomplete."""
    width = -(-gram.shape[1] // PANELS)
    for start in range(0, gram.shape[1], width):
        stop = start + width
        gram[:stop, start:stop].addmm_(block[:, :stop].T, block[:, start:stop])
