"""The Newton-Schulz iteration: approximate the closest matrix with orthogonal rows, with matrix products only.

With the singular value decomposition X = U S V', the odd polynomial a x + b x^3 + c x^5 of X is
a X + b (X X') X + c (X X')^2 X = U (a S + b S^3 + c S^5) V'. Muon's coefficients drive singular values in (0, 1] to
about 1 in five iterations. They end between about 0.7 and 1.2, which does not harm training.

Legend: B matrices, m rows, n columns, m <= n.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def orthogonalised(matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Drive all singular values of many matrices to about 1.

    Args:
        matrices: (B, m, n) with m <= n, which keeps the product X X' small; may be overwritten.
        coefficients: a, b, c.
        steps: number of iterations.
        eps: lower bound of the Frobenius norm by which a matrix is divided; a zero matrix stays zero.

    Returns:
        (B, m, n) in the dtype of `matrices`.

    Example:
        >>> stretched = torch.diag(torch.tensor([1.0, 20.0]))[None]  # (1, 2, 2)
        >>> torch.linalg.svdvals(orthogonalised(stretched, COEFFICIENTS, STEPS, EPS)).round(decimals=1)
        tensor([[0.8000, 0.7000]])
    """
    # The Frobenius norm is an upper bound of the spectral norm. A sum of squares in bfloat16 would lose digits.
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)  # (B, 1, 1)
    return iterated(matrices.div_(norms.clamp_(min=eps)), coefficients, steps)


def iterated(X: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """Run the iteration without the normalization.

    Args:
        X: (B, m, n) with m <= n and singular values of at most 1.
        coefficients: a, b, c.
        steps: number of iterations.
    """
    a, b, c = coefficients
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)  # (B, m, m)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        X = torch.baddbmm(X, polynomial, X, beta=a)
    return X
