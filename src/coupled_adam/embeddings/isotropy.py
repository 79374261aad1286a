"""ISO: the smallest over the largest partition function among the eigenvectors of the Gram matrix.

The sign of an eigenvector is arbitrary but its partition function depends on it, so each is turned towards the mean.
Only the extremes matter: bounds determine which eigenvectors can have them, and only those are computed in float64.

Legend: H hidden size, k eigenvectors whose partition function is computed in float64.
"""

import math

import torch
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, Report, part
from coupled_adam.embeddings.moments import Moments
from coupled_adam.embeddings.partition import log_partition
from coupled_adam.embeddings.screening import candidates
from coupled_adam.embeddings.spectrum import Spectrum

# The mean embedding counts as zero along c if it is below the float32 resolution of an embedding.
NO_DIRECTION = 1e-7


def isotropy(
    table: EmbeddingMatrix, moments: Moments, spectrum: Spectrum, report: Report | None
) -> tuple[float, float]:
    """ISO with each eigenvector turned towards the mean, and ISO over both directions of each."""
    towards_mean = spectrum.eigenvectors.T @ moments.mean
    towards_mean = torch.where(towards_mean.abs() > NO_DIRECTION * moments.norms.mean(), towards_mean, 0.0)
    chosen = candidates(table, moments, spectrum, towards_mean, part(report, 0.0, 0.8))
    log_z = log_partition(table, spectrum.eigenvectors[:, chosen], towards_mean[chosen], part(report, 0.8, 1.0))
    return smallest_over_largest(log_z.turned()), smallest_over_largest(log_z.both())


def smallest_over_largest(log_z: Tensor) -> float:
    return math.exp(float(log_z.min() - log_z.max()))
