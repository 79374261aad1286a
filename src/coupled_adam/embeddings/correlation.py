"""Correlations of two series, in float64."""

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]

# A series whose relative variation is smaller is constant up to rounding.
CONSTANT = 1e-12


def pearson(x: Series, y: Series) -> float | None:
    """Pearson's correlation, or None if one of the two is constant.

    Example:
        >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([5.0, 7.0, 9.0]))
        1.0
        >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 5.0])) is None
        True
    """
    if is_constant(x) or is_constant(y):
        return None
    x, y = centred(x), centred(y)
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def spearman(x: Series, y: Series) -> float | None:
    """Spearman's correlation: Pearson's correlation of the ranks, with the mean rank for equal values."""
    return pearson(ranks(x), ranks(y))


def is_constant(x: Series) -> bool:
    return len(x) < 2 or float(np.ptp(x)) <= CONSTANT * float(np.abs(x).max())


def centred(x: Series) -> Series:
    """x minus its mean, divided by the largest entry so that no square overflows or vanishes."""
    difference = x - x.mean()
    scaled: Series = difference / np.abs(difference).max()
    return scaled


def ranks(x: Series) -> Series:
    """Ranks from 1, the mean rank for equal values.

    Example:
        >>> ranks(np.array([3.0, 1.0, 3.0, 2.0]))
        array([3.5, 1. , 3.5, 2. ])
    """
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean_rank: Series = last - (count - 1) / 2
    return mean_rank[index]
