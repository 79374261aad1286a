"""Eigenvectors and singular values of a table from H x H matrices.

The singular values of E are the roots of the eigenvalues of its Gram matrix, but squaring costs half of the digits: a
singular value below about 1e-8 of the largest is lost in rounding. If some are small, the table is first rotated to its
eigenvectors, P = E C. The columns of P are nearly orthogonal, so after normalisation their Gram matrix is well
conditioned, and the small singular values have the accuracy of a float64 SVD of E itself.

Legend: V vocabulary rows, H hidden size. Arrays are float64, of the table divided by its scale.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, Report
from coupled_adam.embeddings.moments import add_gram

# Rounding changes an eigenvalue by about 1e-15 of the largest, so here a singular value is still accurate to 1e-7.
ILL_CONDITIONED = 2e-4


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of the Gram matrix and the table."""

    eigenvalues: Tensor
    """lambda_1 .. lambda_H of the Gram matrix in ascending order, (H,)."""
    eigenvectors: Tensor
    """c_1 .. c_H of the Gram matrix as columns, (H, H)."""
    singular_values: Tensor
    """Of E, largest first, (min(V, H),)."""


def spectrum_of(table: EmbeddingMatrix, gram: Tensor, report: Report | None) -> Spectrum:
    """Diagonalise the Gram matrix; read the table again if it is ill-conditioned."""
    eigenvalues, eigenvectors = eigh(gram)
    sigma = eigenvalues.clamp(min=0).sqrt().flip(0)[: min(table.V, table.H)]
    if sigma[-1] < ILL_CONDITIONED * sigma[0]:
        sigma = small_singular_values(table, eigenvectors, report)
    # P itself is rounded at about this level, so smaller values cannot be distinguished from zero.
    floor = table.H * torch.finfo(torch.float64).eps * sigma[0]
    return Spectrum(eigenvalues, eigenvectors, torch.where(sigma > floor, sigma, 0.0))


def eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors as columns."""
    if symmetric.device.type == "cpu":  # numpy's LAPACK takes half the time of torch's
        values, vectors = np.linalg.eigh(symmetric.numpy())
        return torch.from_numpy(values), torch.from_numpy(vectors)
    values, vectors = torch.linalg.eigh(symmetric)
    return values, vectors


def small_singular_values(table: EmbeddingMatrix, eigenvectors: Tensor, report: Report | None) -> Tensor:
    """Singular values of P = E C by a second Gram matrix, largest first, (min(V, H),)."""
    gram = torch.zeros_like(eigenvectors)
    for span in table.spans(report):
        add_gram(gram, table.rows(span).double() @ eigenvectors)
    gram = gram.triu() + gram.triu(1).T
    length = gram.diagonal().sqrt()  # of the columns of P
    unit = torch.where(length > 0, 1 / length, 0.0)
    # P^T P = D S D with the lengths D and S = W diag(theta) W^T, so P has the singular values of theta^1/2 W^T D.
    theta, W = eigh(gram * unit * unit[:, None])
    factor = theta.clamp(min=0).sqrt()[:, None] * W.T * length
    sigma: Tensor = torch.linalg.svdvals(factor)
    return sigma[: min(table.V, table.H)]
