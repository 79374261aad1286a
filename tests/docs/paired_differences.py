"""Means over seeds: with the standard deviation, and of differences between runs with the same seed with their 95%
interval, computed by scipy."""

from collections.abc import Iterable

import numpy as np
from scipy import stats


def interval(values: Iterable[float], digits: int = 3) -> str:
    """The 95% interval of the mean, as pages write it: "-0.013 to 0.130"."""
    low, high = stats.ttest_1samp(np.array(list(values)), 0.0).confidence_interval(0.95)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def mean_and_spread(values: np.ndarray) -> str:
    """Mean with three decimals and the standard deviation in units of the last, such as "4.247(15)"."""
    return f"{values.mean():.3f}({1000 * values.std(ddof=1):.0f})"


def mean_and_interval(values: Iterable[float]) -> str:
    """Mean and 95% interval, such as "-0.086 (-0.098 to -0.075)"."""
    found = list(values)
    return f"{np.mean(found):.3f} ({interval(found)})"


def contains_zero(values: Iterable[float]) -> bool:
    """Whether the 95% interval of the mean contains zero."""
    low, high = stats.ttest_1samp(np.array(list(values)), 0.0).confidence_interval(0.95)
    return bool(low < 0 < high)
