"""The partition function Z(c) = sum_i exp(c^T e_i) of eigenvectors c and of -c, in float64.

Computed in logarithms, with the largest exponent factored out of every sum, so that nothing overflows.

Legend: V vocabulary rows, H hidden size, n rows of one block, k eigenvectors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, Report


@dataclass(frozen=True)
class LogPartition:
    """log Z of some eigenvectors in both directions, or a bound on it."""

    plus: Tensor
    """log Z(c), (k,)."""
    minus: Tensor
    """log Z(-c), (k,)."""
    towards_mean: Tensor
    """c^T mu, or 0 if the mean counts as zero along c, (k,)."""

    def turned(self) -> Tensor:
        """log Z of c or -c, whichever has c^T mu > 0; the larger one if c^T mu is 0. (k,)"""
        along = torch.where(self.towards_mean > 0, self.plus, self.minus)
        return torch.where(self.towards_mean == 0, torch.maximum(self.plus, self.minus), along)

    def both(self) -> Tensor:
        """log Z of every c and -c, (2, k)."""
        return torch.stack([self.plus, self.minus])


def log_partition(
    table: EmbeddingMatrix, directions: Tensor, towards_mean: Tensor, report: Report | None
) -> LogPartition:
    """log Z of the columns c of `directions` (H, k)."""
    plus = torch.full((directions.shape[1],), -torch.inf, dtype=torch.float64, device=table.device)
    minus = plus.clone()
    for span in table.spans(report):
        exponents = directions.T @ table.rows(span).double().T * table.scale  # (k, n)
        plus = torch.logaddexp(plus, torch.logsumexp(exponents, 1))
        minus = torch.logaddexp(minus, torch.logsumexp(exponents.neg_(), 1))
    return LogPartition(plus, minus, towards_mean)
