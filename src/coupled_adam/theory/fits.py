"""Linear fits through the origin, mutual information, and means over checkpoints (App. second_moment_empirical).

Letters: V tokens, y measured values, p unigram probabilities, A the slope of y = A p.
"""

import importlib.util
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.extras import require
from coupled_adam.theory.record import FITTED, CheckpointTheory, Fit, Spread, TheoremFit

NEIGHBOURS = 3
"""For the estimate of the mutual information; scikit-learn's default."""
SEED = 0

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def fit_through_origin(y: Array, p: Array) -> Fit:
    """Fit y = A p and compute its quality, ignoring tokens whose y is NaN.

    Args:
        y: (V,).
        p: (V,).

    Example:
        >>> fit = fit_through_origin(np.array([1.0, 2.0, np.nan]), np.array([0.25, 0.5, 0.25]))
        >>> fit.A, fit.r2, fit.r2_centred, fit.count
        (4.0, 1.0, 1.0, 2)
    """
    known = np.isfinite(y)
    y, p = np.asarray(y, np.float64)[known], np.asarray(p, np.float64)[known]
    return Fit(*line_through_origin(y, p), mutual_information(y, p), len(y))


def line_through_origin(y: Floats, x: Floats) -> tuple[float | None, float | None, float | None]:
    """A of y = A x by least squares, with its uncentred and centred R^2; None if undefined."""
    if not x.any():
        return None, None, None
    A = float(x @ y / (x @ x))
    residual = float(np.square(y - A * x).sum())
    r2 = 1 - residual / float(y @ y) if y.any() else None
    # Test the range, because the mean of equal numbers may differ from them by rounding.
    r2_centred = 1 - residual / float(np.square(y - y.mean()).sum()) if np.ptp(y) > 0 else None
    return A, r2, r2_centred


def has_scikit_learn() -> bool:
    """Whether scikit-learn is installed, which mutual information needs."""
    return importlib.util.find_spec("sklearn") is not None


def mutual_information(y: Floats, p: Floats) -> float | None:
    """I(y; p) in nats, estimated from nearest neighbours; None without scikit-learn or with too few tokens."""
    if len(y) <= NEIGHBOURS or not has_scikit_learn():
        return None
    selection = require("sklearn.feature_selection", "study", "to estimate mutual information")
    # scikit-learn scales both to a standard deviation of one.
    found = selection.mutual_info_regression(p[:, None], y, n_neighbors=NEIGHBOURS, random_state=SEED)
    return float(found[0])


def theorem_fit(measured: Array, predicted: Array) -> TheoremFit:
    """Agreement of the Theorem's right-hand side with the measured E[g_i^2], both of the same shape."""
    measured, predicted = (np.asarray(side, np.float64).ravel() for side in (measured, predicted))
    slope, r2, r2_centred = line_through_origin(measured, predicted)
    positive = (measured > 0) & (predicted > 0)
    ratio = predicted[positive] / measured[positive]
    return TheoremFit(
        slope=slope,
        r2=r2,
        r2_centred=r2_centred,
        median_ratio=float(np.median(ratio)) if len(ratio) else None,
        log_correlation=pearson(np.log(measured[positive]), np.log(predicted[positive])),
    )


def pearson(a: Floats, b: Floats) -> float | None:
    """Correlation of a and b; None if one of them is constant."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def summarise(checkpoints: Iterable[CheckpointTheory]) -> dict[str, Spread]:
    """Mean and standard deviation by name over checkpoints of one run, or of several as in the paper."""
    values: dict[str, list[float | None]] = {}
    for checkpoint in checkpoints:
        numbers: dict[str, float | None] = {
            f"{name}_{key}": getattr(checkpoint.fits[name], key)
            for name in FITTED
            for key in ("r2", "r2_centred", "mutual_information", "A")
        }
        numbers |= {
            f"{name}_{key}": getattr(getattr(checkpoint, name), key)
            for name in ("theorem", "theorem_elements")
            for key in ("slope", "r2")
        }
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    return {name: spread(known) for name, all_ in values.items() if (known := [v for v in all_ if v is not None])}


def spread(values: list[float]) -> Spread:
    """The mean of some values, at least one, and their sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
