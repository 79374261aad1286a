"""Find the eigenvectors that can have the smallest or largest partition function, with bounds that are cheaper than
computing it.

Let p_i = c^T e_i and z = Z(c) / V = mean_i exp(p_i). Already known: mean_i p_i = c^T mu and mean_i p_i^2 = lambda / V.

First bound, without reading the table: |p_i| <= r, the longest row, and phi(p) = (exp(p) - 1 - p) / p^2 increases with
p. So z is between 1 + c^T mu + phi(-r) lambda / V and the same with phi(r). The bound is tight for short rows.

Second bound, from products in float32 with rounding u: the error of each p_i is at most d = (H + 3) u r
(Cauchy-Schwarz). With the known means instead of the rounded ones, only the change of exp(p) - p - p^2/2 with p
matters, whose derivative is exp(p) - 1 - p >= 0. So the error of z is at most d mean_i (exp(p_i) - 1 - p_i) =
d (z - 1 - c^T mu).

Legend: V vocabulary rows, H hidden size, n rows of one block, k remaining eigenvectors. The first index of arrays
(2, k) is the direction, c or -c.
"""

import math

import torch
from torch import Tensor

from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, Report
from coupled_adam.embeddings.moments import Moments
from coupled_adam.embeddings.partition import LogPartition
from coupled_adam.embeddings.spectrum import Spectrum

# For longer rows exp(|e_i|) approaches the range of float32, and both bounds become useless.
LONGEST_SCREENED = 60.0
ROUNDING = 2.0**-24
# Far above the float64 rounding of the known means.
SLACK = 1e-11


def candidates(
    table: EmbeddingMatrix, moments: Moments, spectrum: Spectrum, towards_mean: Tensor, report: Report | None
) -> Tensor:
    """Indices of the eigenvectors that may have the smallest or largest Z, (k,)."""
    chosen = torch.arange(table.H, device=table.device)
    longest = float(moments.norms.max()) * table.scale
    if table.scale != 1.0 or longest > LONGEST_SCREENED:
        return chosen
    first = spectrum.eigenvectors.T @ moments.mean
    first = torch.stack([first, -first])  # mean of p_i, (2, H)
    second = spectrum.eigenvalues.clamp(min=0) / table.V  # mean of p_i^2, (H,)
    chosen = possible_extremes(*moment_bounds(first, second, longest), towards_mean)
    if float32_is_float32(table):
        bounds = float32_bounds(
            table, spectrum.eigenvectors[:, chosen], first[:, chosen], second[chosen], longest, report
        )
        chosen = chosen[possible_extremes(*bounds, towards_mean[chosen])]
    return chosen


def possible_extremes(lower: Tensor, upper: Tensor, towards_mean: Tensor) -> Tensor:
    """Indices of the eigenvectors that may have the smallest or largest z, given bounds (2, k)."""
    low, high = (LogPartition(bound[0].log(), bound[1].log(), towards_mean) for bound in (lower, upper))
    possible = torch.zeros_like(towards_mean, dtype=torch.bool)
    for least, most in ((low.turned()[None], high.turned()[None]), (low.both(), high.both())):
        possible |= ((least <= most.min()) | (most >= least.max())).any(0)
    return possible.nonzero()[:, 0]


def moment_bounds(first: Tensor, second: Tensor, longest: float) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on z from the means of p and p^2, each (2, k)."""
    r = max(longest, 1e-6)  # phi(r) approaches 1/2 for smaller r, but is inaccurate in floating point
    below, above = ((math.expm1(p) - p) / p**2 for p in (-r, r))
    jensen = torch.exp(first)
    lower = torch.maximum(1 + first + below * second, jensen)
    upper = torch.maximum(1 + first + above * second, jensen)
    return lower * (1 - SLACK), upper * (1 + SLACK)


def float32_is_float32(table: EmbeddingMatrix) -> bool:
    """Whether float32 products are useful: only on the CPU, and if they are not set to bfloat16 or TF32."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9 and newer
    precision = torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision
    return table.device.type == "cpu" and precision in ("none", "ieee", "highest")


def float32_bounds(
    table: EmbeddingMatrix, directions: Tensor, first: Tensor, second: Tensor, longest: float, report: Report | None
) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on z from float32 products with the columns of `directions` (H, k), each (2, k)."""
    exponential, linear, quadratic = float32_means(table, directions, report)
    jensen = torch.exp(first)
    z = exponential + (first - torch.stack([linear, -linear])) + (second - quadratic) / 2
    z = torch.maximum(z, jensen)
    d = (table.H + 3) * ROUNDING * longest
    # The first term is derived above; then the second order in d, and the rounding of exp, its inverse and squares.
    error = d * (z - 1 - first).clamp(min=0) + d**2 * z + ROUNDING * (8 * z + second)
    return torch.maximum(z - error, jensen * (1 - SLACK)), z + error


def float32_means(table: EmbeddingMatrix, directions: Tensor, report: Report | None) -> tuple[Tensor, Tensor, Tensor]:
    """Means of exp(p_i) for c and -c (2, k), of p_i (k,) and of p_i^2 (k,), for the rounded p_i."""
    exponential = torch.zeros(2, directions.shape[1], dtype=torch.float64)
    linear, quadratic = torch.zeros_like(exponential)
    transposed = directions.T.float().contiguous()
    for span in table.spans(report):
        p = transposed @ table.rows(span).float().T  # (k, n)
        linear += p.sum(1, dtype=torch.float64)
        quadratic += (p * p).sum(1, dtype=torch.float64)
        exponential[0] += p.exp_().sum(1, dtype=torch.float64)
        exponential[1] += p.reciprocal_().sum(1, dtype=torch.float64)
    return exponential / table.V, linear / table.V, quadratic / table.V
