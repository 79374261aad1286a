"""A small sample of a table for the figures: positions of rows, and angles between them.

The same table always gives the same sample. It is computed in float32, after division by a power of two if the squares
of the entries would overflow or underflow.

Legend: V vocabulary rows, H hidden size, S sampled rows, P pairs.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import torch_rows
from coupled_adam.inspection.stored import Matrix

SAMPLED_ROWS = 10_000
SAMPLED_PAIRS = 50_000
SEED = 0
BLOCK_ROWS = 4096
# Range of the largest entry without scaling: its square and those of much smaller entries are normal float32 numbers.
SMALLEST_UNSCALED, LARGEST_UNSCALED = 1e-10, 1e10


@dataclass(frozen=True)
class Sample:
    """Sample of one table for its figures."""

    rows: NDArray[np.int64]  # (S,) ascending
    places: NDArray[np.float64]  # (S, 3): along the mean, and along the first two principal components orthogonal to it
    cosines: NDArray[np.float32]  # (P,) of random pairs of different rows


def draw_sample(matrix: Matrix) -> Sample:
    """Sample the rows of `matrix` (V, H), place them around the origin, and pair them at random."""
    generator = np.random.default_rng(SEED)
    count = matrix.shape[0]
    rows = np.sort(generator.choice(count, min(count, SAMPLED_ROWS), replace=False))
    points = torch_rows(matrix, rows)  # (S, H)
    scale = _scale_of(points)
    points = (points if scale == 1.0 else points.double() / scale).float()
    axes = axes_around(points, column_mean(matrix, scale))  # (H, 3)
    places = (points @ axes).double() * scale
    return Sample(rows, places.numpy(), _cosines(points, generator))


def column_mean(matrix: Matrix, scale: float = 1.0) -> Tensor:
    """The mean row (H,) divided by `scale`, summed in float64."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for start in range(0, matrix.shape[0], BLOCK_ROWS):
        total += (torch_rows(matrix, slice(start, start + BLOCK_ROWS)).double() / scale).sum(0)
    return total / matrix.shape[0]


def axes_around(points: Tensor, mean: Tensor) -> Tensor:
    """Three orthonormal directions (H, 3), padded with zeros if H < 3."""
    along_mean = torch.nn.functional.normalize(mean, dim=0).float()  # zero stays zero
    across = points - torch.outer(points @ along_mean, along_mean)
    with torch.random.fork_rng(devices=[]):  # svd_lowrank starts from random vectors
        torch.manual_seed(SEED)
        wanted = min(8, *points.shape)
        components = torch.svd_lowrank(across - across.mean(0), q=wanted, niter=8)[2][:, :2]  # (H, 2)
    # The sign of a principal component is arbitrary: make its largest entry positive.
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    components = components * torch.where(largest < 0, -1.0, 1.0)
    axes = torch.zeros(points.shape[1], 3)
    axes[:, 0] = along_mean
    axes[:, 1 : 1 + components.shape[1]] = components
    return axes


def _cosines(points: Tensor, generator: np.random.Generator) -> NDArray[np.float32]:
    norms = points.norm(dim=1, keepdim=True)
    directions = (points / norms)[norms[:, 0] > 0]  # (S', H): a zero row has no direction
    count = len(directions)
    if count < 2:
        return np.zeros(0, np.float32)
    first = generator.integers(count, size=SAMPLED_PAIRS)
    second = (first + generator.integers(1, count, size=SAMPLED_PAIRS)) % count  # never the same row
    cosines = [
        (directions[first[start : start + BLOCK_ROWS]] * directions[second[start : start + BLOCK_ROWS]]).sum(1)
        for start in range(0, SAMPLED_PAIRS, BLOCK_ROWS)
    ]
    return torch.cat(cosines).numpy()


def _scale_of(points: Tensor) -> float:
    """The next power of two above the largest entry, or 1 if the entries are not extreme."""
    low, high = torch.aminmax(points if points.dtype == torch.float64 else points.float())
    largest = max(-float(low), float(high))
    if largest == 0.0 or SMALLEST_UNSCALED <= largest <= LARGEST_UNSCALED:
        return 1.0
    return math.ldexp(1.0, math.frexp(largest)[1])
